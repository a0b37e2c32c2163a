"""The trainer as a Ray actor, on a Ray of its own that takes the campaign's memory group for its container.

    python -m tests.soak.in_ray SETTINGS          (JSON: see :class:`Settings`)

This process enters the group, and a mount namespace of its own in which the group lies where a container has its root group:
Ray's memory monitor looks nowhere else. Raylet, object store and workers are its children, and so in the same group and
namespace. What other processes of the machine take is then no matter of this Ray's.

The first line on standard input is the second part of the order, as for :mod:`tests.soak.trainer`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import sys
import tempfile
import time
from typing import Any

MIB = 1 << 20
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 4096, 16384, 1 << 18


@dataclasses.dataclass(frozen=True)
class Settings:
    """The first part of the order; the group, where it is to be mounted, and the share of its limit that Ray kills above.

    ``peer``: a stock saver (:mod:`tests.soak.peer`) instead of the trainer.
    """

    order: dict[str, Any]
    group: str
    mount: str
    threshold: float
    peer: str = ""


def enter(group: str, mount: str) -> None:
    """Goes into the group, and into a mount namespace that shows it as the root group.

    Raises:
        OSError: this user may not.
    """
    with open(os.path.join(group, "cgroup.procs"), "w") as procs:
        procs.write(str(os.getpid()))
    libc = ctypes.CDLL(None, use_errno=True)

    def need(result: int, what: str) -> None:
        if result != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{what}: {os.strerror(code)}")

    need(libc.unshare(_CLONE_NEWNS), "unshare")
    need(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "making mounts private")
    need(libc.mount(group.encode(), mount.encode(), None, _MS_BIND, None), f"mounting {group} on {mount}")


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    enter(settings.group, settings.mount)
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(
        RAY_memory_usage_threshold=str(settings.threshold), RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled"
    )
    import ray

    from tests.soak.peer import Peer
    from tests.soak.trainer import Order, Trainer

    kind: Any = Peer if settings.peer else Trainer
    first = Order(**settings.order)

    def tell(**what: Any) -> None:
        with open(first.tells, "a") as file:
            file.write(json.dumps({"at": time.monotonic(), **what}) + "\n")

    with tempfile.TemporaryDirectory(prefix="ckpt-", ignore_cleanup_errors=True) as scratch:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 * MIB,
            _temp_dir=scratch,
        )
        try:
            # Without a restart: the harness has to see that it died.
            actor = ray.remote(num_cpus=1, max_restarts=0)(kind).remote(first, *filter(None, [settings.peer]))
            line = sys.stdin.readline()
            if line:
                ray.get(actor.run.remote(Order(**json.loads(line))))
        except ray.exceptions.RayError as error:
            words = str(error)
            low = "memory" in words and ("OutOfMemory" in type(error).__name__ or "low on memory" in words)
            tell(**{"monitor" if low else "ray": f"{type(error).__name__}: {words}"})
            print(words)
            sys.exit(1)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
