"""Ray: what the node's memory monitor watches, and a process group made of actors.

What it holds:

* :func:`memory_monitor` tells how far this node is from the point at which Ray kills workers, as Ray itself counts. It works
  in an actor, in a task and in the driver. The monitor is part of the raylet, one process per node, and obeys the settings
  that the *raylet* was started with: a ``runtime_env`` can change the variables that a worker sees, not the monitor.
* :func:`join_group` makes the default process group of ``torch.distributed`` out of actors or tasks, which is all that a
  :class:`ckpt_engine.CheckpointEngine` needs to save from them together.

The monitor of Ray 2.10 and later::

                        what counts as total          what counts as used                   kills above
    no limit            MemTotal                      MemTotal - MemAvailable               total x threshold, or
    a container         memory.max (v2) or            usage - inactive_file - active_file   total - min_memory_free_bytes
                        memory.limit_in_bytes (v1)                                          if that is higher
    resource isolation  memory.high of Ray's          anon + shmem of Ray's "user" group,   memory.high
                        "user" group                  + shmem of its "system" group

Only the group at the root of ``/sys/fs/cgroup`` counts as the container, and only if its limit is below the memory of the node.

What it promises: it reads and tells; it changes nothing of Ray's, and starts no process. Importing it imports Ray, and nothing
in ``ckpt_engine`` imports it.

What it does not do: settings that were passed as ``ray.init(_system_config=...)`` (for Ray's own tests) aren't seen, nor is swap
(``RAY_count_swap_in_memory_monitor``). The engine doesn't need any of this: its guard keeps away from the threshold by itself,
and its ranks find out by themselves how many of them share a node.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import psutil
import ray
import torch.distributed as dist

from ckpt_engine.commit.coordinator import Coordinator
from ckpt_engine.commit.store_client import StoreClient
from ckpt_engine.config import MIB
from ckpt_engine.errors import CheckpointError, CommitTimeoutError, ConfigError
from ckpt_engine.staging.guard import RAY_MARGIN, Limit

__all__ = ["MemoryMonitor", "join_group", "memory_monitor"]

#: Ray's own defaults.
_THRESHOLD, _REFRESH_MS, _KEEP_FREE = 0.95, 250, -1

#: Pause between two looks for the address that rank 0 publishes.
_POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryMonitor:
    """Ray's memory monitor on this node, at the moment of the call. Sizes in bytes.

    Attributes:
        watched: "the node", "the container" or "Ray's user group".
        total, used: of what is watched, as Ray counts it.
        threshold: Ray kills a worker when more than this is used.
        margin: distance that the engine's guard keeps from it, since Ray looks only now and then, and kills at once.
        refresh_ms: milliseconds between two looks of Ray; 0: the monitor is off.
        settings: the variables behind it that the raylet was started with; empty where Ray's defaults hold.
        certain: whether the raylet's own settings could be read; otherwise they are taken from this process.
    """

    watched: str
    total: int
    used: int
    threshold: int
    margin: int
    refresh_ms: int
    settings: Mapping[str, str]
    certain: bool

    @property
    def enabled(self) -> bool:
        return self.refresh_ms > 0

    @property
    def room(self) -> int:
        """What may still be used before the margin is reached."""
        return max(self.threshold - self.margin - self.used, 0)

    def limit(self) -> Limit:
        """The same as the engine's guard puts it."""
        return Limit(f"Ray's memory threshold for {self.watched}", self.room, self.explain(), bound=self.threshold)

    def explain(self) -> str:
        """All of it in one line."""
        if not self.enabled:
            return "Ray's memory monitor is off (RAY_memory_monitor_refresh_ms=0)"
        settings = ", ".join(f"{name}={value}" for name, value in sorted(self.settings.items()))
        return (
            f"Ray kills workers when {self.watched} has more than {self.threshold / MIB:.0f} MiB of "
            f"{self.total / MIB:.0f} MiB in use; now {self.used / MIB:.0f} MiB, {self.room / MIB:.0f} MiB of room with "
            f"{self.margin / MIB:.0f} MiB of margin; it looks every {self.refresh_ms} ms (settings "
            f"{'of the raylet' if self.certain else 'of this process, the raylet is out of sight'}: {settings or 'defaults'})"
        )

    __str__ = explain


def memory_monitor(*, proc: str = "/proc", cgroup_root: str = "/sys/fs/cgroup") -> MemoryMonitor | None:
    """Ray's memory monitor on this node.

    Args:
        proc, cgroup_root: where procfs and the control groups are mounted.

    Returns:
        ``None`` if this process belongs to no Ray cluster, or memory can't be read here (macOS, Windows: Ray has none there).
    """
    if "RAY_RAYLET_PID" not in os.environ and not ray.is_initialized():
        return None
    environ, certain = _raylet_environment(proc)
    settings = {name: environ[name] for name in _SETTINGS if name in environ}
    watched = _user_group(proc, cgroup_root) or _host_or_container(proc, cgroup_root)
    if watched is None:
        return None
    what, total, used, threshold = watched
    if threshold is None:
        # Ray multiplies with a float of 32 bits; with one of 64 the result is a few hundred bytes off.
        share = struct.unpack("f", struct.pack("f", _number(settings, _SETTINGS[0], _THRESHOLD)))[0]
        threshold = int(total * (share if 0 <= share <= 1 else _THRESHOLD))
        keep_free = int(_number(settings, _SETTINGS[1], _KEEP_FREE))
        if keep_free >= 0:
            threshold = max(threshold, total - keep_free)
    return MemoryMonitor(
        watched=what,
        total=total,
        used=max(used, 0),
        threshold=threshold,
        margin=int(total * RAY_MARGIN),
        refresh_ms=int(_number(settings, _SETTINGS[2], _REFRESH_MS)),
        settings=settings,
        certain=certain,
    )


_SETTINGS = ("RAY_memory_usage_threshold", "RAY_min_memory_free_bytes", "RAY_memory_monitor_refresh_ms")


def join_group(
    rank: int,
    world_size: int,
    name: str,
    *,
    backend: str = "gloo",
    timeout: float = 60.0,
    group_timeout: float | None = None,
) -> None:
    """Makes the default process group of ``torch.distributed`` out of the actors or tasks that call this.

    Rank 0 opens the store on a free port of its node, and the others learn the address from Ray: nobody has to choose a
    port, or to pass an address through the driver. gloo is told to use the network interface of the node's address, unless
    ``GLOO_SOCKET_IFNAME`` says otherwise. To leave the group: ``torch.distributed.destroy_process_group()``.

    Args:
        rank, world_size: of the caller.
        name: the same for all; another one for every attempt. A rank that was restarted would find the dead group otherwise.
        backend: as for ``init_process_group``.
        timeout: seconds to wait for the other ranks.
        group_timeout: that of the group's collectives; PyTorch's default if ``None``.

    Raises:
        ConfigError: not inside Ray, a group exists already, or the ranks disagree about ``world_size``.
        CommitTimeoutError: somebody has not come. ``silent_ranks`` names them.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}, expected 0 to {world_size - 1}", phase="config")
    if not ray.is_initialized():
        raise ConfigError(
            "join_group was called outside of Ray", phase="config", hint="call it in an actor's method or a task"
        )
    if dist.is_initialized():
        raise ConfigError(
            "this process has a default process group already",
            rank=rank,
            phase="config",
            hint="leave it first: torch.distributed.destroy_process_group()",
        )
    end = time.monotonic() + timeout
    key = f"ckpt_engine/{ray.get_runtime_context().get_job_id()}/{name}".encode()
    store = _open_store(rank, world_size, key, end)
    coordinator = Coordinator(
        StoreClient(dist.PrefixStore("ckpt_engine/join", store), world_size),  # type: ignore[attr-defined]
        rank,
        world_size,
        timeout=max(end - time.monotonic(), 0.1),
    )
    try:
        # gloo's own rendezvous would tell after its timeout that something is amiss, but not who.
        coordinator.decide("here", str(world_size).encode(), _same_size, phase="config", step=None)
    finally:
        coordinator.close()
        if rank == 0:
            _kv()._internal_kv_del(key)
    if backend == "gloo" and (interface := _interface_of(_node_address())):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    patience = None if group_timeout is None else timedelta(seconds=group_timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)


def _open_store(rank: int, world_size: int, key: bytes, end: float) -> Any:
    def store(host: str, port: int) -> Any:
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                *(host, port, world_size, rank == 0),
                timeout=timedelta(seconds=max(end - time.monotonic(), 1.0)),
                wait_for_workers=False,
            )
        except (RuntimeError, OSError) as error:
            raise CheckpointError(
                f"the store at {host}:{port} can't be {'opened' if rank == 0 else 'reached'}: {error}",
                rank=rank,
                phase="config",
                hint="use a name for the group that no earlier attempt has used",
            ) from None

    if rank == 0:
        host = _node_address()
        opened = store(host, 0)
        _kv()._internal_kv_put(key, f"{host} {opened.port}".encode(), overwrite=True)
        return opened
    while (address := _kv()._internal_kv_get(key)) is None:
        if time.monotonic() > end:
            raise CommitTimeoutError(
                f"rank 0 has not opened the store of group {key.decode().rpartition('/')[2]!r} in time",
                silent_ranks=(0,),
                rank=rank,
                phase="config",
                hint="all ranks have to call join_group with the same name",
            )
        time.sleep(_POLL_SECONDS)
    host, _, port = address.decode().partition(" ")
    return store(host, int(port))


def _same_size(said: list[bytes]) -> bytes:
    if len(set(said)) > 1:
        sizes = ", ".join(f"rank {rank}: {size.decode()}" for rank, size in enumerate(said))
        raise ConfigError(f"the ranks disagree about the size of the group: {sizes}", phase="config")
    return b""


def _kv() -> Any:
    """Ray's cluster-wide table of keys; a named actor instead would be one more process."""
    from ray.experimental import internal_kv

    return internal_kv


def _node_address() -> str:
    util: Any = ray.util  # untyped in some versions of Ray
    return str(util.get_node_ip_address())


def _interface_of(address: str) -> str | None:
    """The network interface with this address. gloo would ask the resolver for the host's name, which may know nothing of it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None


# -- what the raylet sees ----------------------------------------------------------------------------------------------


def _raylet_environment(proc: str) -> tuple[Mapping[str, str], bool]:
    """The variables that the node's raylet was started with, or this process's if they can't be read."""
    for pid in _raylet_pids(proc):
        try:
            with open(os.path.join(proc, pid, "environ"), "rb") as file:
                entries = file.read().decode(errors="replace").split("\0")
        except OSError:
            continue  # another user's, or in another pid namespace
        return dict(entry.split("=", 1) for entry in entries if "=" in entry), True
    return os.environ, False


def _raylet_pids(proc: str) -> list[str]:
    if "RAY_RAYLET_PID" in os.environ:  # in a worker
        return [os.environ["RAY_RAYLET_PID"]]
    mine = f"--node_id={ray.get_runtime_context().get_node_id()}".encode()
    pids = []
    for pid in filter(str.isdecimal, os.listdir(proc)):
        try:
            with open(os.path.join(proc, pid, "cmdline"), "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"raylet") and mine in words:
            pids.append(pid)
    return pids


def _host_or_container(proc: str, root: str) -> tuple[str, int, int, int | None] | None:
    memory = _table(os.path.join(proc, "meminfo"), 1024)
    total, available = memory.get("MemTotal:"), memory.get("MemAvailable:")
    container = _container(root)
    if container is not None and (total is None or container[0] <= total):
        return "the container", *container, None
    if total is None or available is None:
        return None
    return "the node", total, total - available, None


def _container(root: str) -> tuple[int, int] | None:
    """Total and used of the group at the root, if it has a limit."""
    bound = os.path.join(root, "memory.max")
    directory, usage, prefix = root, "memory.current", ""
    if not os.path.exists(bound):
        directory, usage, prefix = os.path.join(root, "memory"), "memory.usage_in_bytes", "total_"
        bound = os.path.join(directory, "memory.limit_in_bytes")
    total, used = _whole(bound), _whole(os.path.join(directory, usage))
    stat = _table(os.path.join(directory, "memory.stat"))
    files = [stat.get(f"{prefix}{name}_file") for name in ("inactive", "active")]
    if not total or used is None or None in files:
        return None
    return total, min(max(used - sum(size or 0 for size in files), 0), total)


def _user_group(proc: str, root: str) -> tuple[str, int, int, int | None] | None:
    """Under resource isolation: ``…/ray-node_<id>/user/workers`` is this process's group, the limit is that of ``user``."""
    for line in _text(os.path.join(proc, "self", "cgroup")).splitlines():
        number, _, path = line.partition("::")
        parts = [part for part in path.split("/") if part]
        nodes = [index for index, part in enumerate(parts) if part.startswith("ray-node")]
        if number != "0" or not nodes or parts[nodes[-1] + 1 : nodes[-1] + 2] != ["user"]:
            continue
        node = os.path.join(root, *parts[: nodes[-1] + 1])
        high = _whole(os.path.join(node, "user", "memory.high"))
        user, system = (_table(os.path.join(node, name, "memory.stat")) for name in ("user", "system"))
        if high is not None and "anon" in user:
            used = user["anon"] + user.get("shmem", 0) + system.get("shmem", 0)
            return "Ray's user group", high, used, high
    return None


def _number(settings: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(settings.get(name, default))
    except ValueError:
        return default


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _whole(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _table(path: str, unit: int = 1) -> dict[str, int]:
    words = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) * unit for pair in words if len(pair) >= 2 and pair[1].isdecimal()}
