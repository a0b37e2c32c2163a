"""A stock saver with the state of the soak, in the place of the trainer: the same memory, the same limit, no engine.

    python -m tests.soak.peer ORDER PEER FOLDER

PEER is ``engine`` (for comparison), ``torch``, ``dcp``, ``dcp_async``, ``megatron`` or ``megatron_async``; FOLDER is where an
unpacked megatron-core lies. Each save has its own directory, and the one before it is removed.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.soak.trainer import Order

#: Removes what the save before wrote, for those that keep everything.
_KEEP = 1


class Peer:
    """Made before the limit is set, like the trainer."""

    def __init__(self, order: Order, name: str, folder: str = "") -> None:
        self._file = open(order.tells, "a", buffering=1)
        self._order, self._name, self._folder = order, name, folder
        if order.group:
            with open(os.path.join(order.group, "cgroup.procs"), "w") as procs:
                procs.write(str(os.getpid()))
        import torch

        from tests.soak.state import KnownState

        torch.set_num_threads(1)
        self._save = self._prepared(name, folder)
        self._state = KnownState(order.state_bytes, fixed=True)
        self.tell(ready=True, pid=os.getpid(), state=self._state.bytes)

    def tell(self, **what: Any) -> None:
        self._file.write(json.dumps({"at": time.monotonic(), **what}) + "\n")

    def run(self, order: Order) -> None:
        try:
            for step in range(order.saves):
                begin = time.monotonic()
                path = os.path.join(order.directory, f"step_{step}")
                wait = self._save(self._state.tree(step), path, step)
                stall = time.monotonic() - begin
                self._state.fill(step + 1)  # an asynchronous save has its own copy by now
                wait()
                self.tell(saved=step + 1, stall=stall, durable=time.monotonic() - begin)
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(os.path.join(order.directory, f"step_{step - _KEEP}"))
            self.tell(end=True, saves=order.saves)
        except BaseException:
            self.tell(error=traceback.format_exc())
            raise

    def _prepared(self, name: str, folder: str) -> Callable[[dict[str, Any], str, int], Callable[[], Any]]:
        """Imports what it needs; the result saves, and returns what waits for the save to be durable."""
        if name.startswith("megatron"):
            return self._megatron(name, folder)
        if name == "dcp_async":
            _group_of_one()
        from benchmarks.peers import make_peer
        from benchmarks.states import State

        if name == "engine":
            from ckpt_engine import CheckpointEngine, EngineConfig

            config = EngineConfig(
                staging_budget=self._order.budget, extent_bytes=self._order.extent_bytes, keep_last=_KEEP + 1
            )
            engines: list[CheckpointEngine] = []

            def engine(tree: dict[str, Any], path: str, step: int) -> Callable[[], Any]:
                if not engines:  # the limit is there by now
                    engines.append(CheckpointEngine(os.path.dirname(path), config))
                return engines[0].save(tree, step).result

            return engine
        root = os.path.join(self._order.directory, name)
        stock = make_peer(name, root, None)

        def save(tree: dict[str, Any], path: str, step: int) -> Callable[[], Any]:
            pending = stock.save(State("soak", tree, 0, 0), step)

            def wait() -> None:
                pending.result()
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(os.path.join(root, f"step_{step - _KEEP}"))

            return wait

        return save

    def _megatron(self, name: str, folder: str) -> Callable[[dict[str, Any], str, int], Callable[[], Any]]:
        from benchmarks import megatron_versions

        megatron_versions.use(folder)
        _group_of_one()
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.mapping import ShardedTensor
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
        from megatron.core.msc_utils import MultiStorageClientFeature

        MultiStorageClientFeature.disable()
        asynchronous = name == "megatron_async"
        queue = AsyncCallsQueue(persistent=False) if asynchronous else None
        options: dict[str, Any] = {"async_sharded_save": asynchronous}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            options["async_strategy"] = "mcore"

        def save(tree: dict[str, Any], path: str, step: int) -> Callable[[], Any]:
            os.mkdir(path)
            sharded: dict[str, Any] = {
                key: ShardedTensor.from_rank_offsets(key, tensor)
                for part in ("model", "optim")
                for key, tensor in tree[part].items()
            }
            sharded["iteration"] = step
            request = dist_checkpointing.save(sharded, path, **options)
            if queue is None:
                return lambda: None
            queue.schedule_async_request(request)
            return lambda: queue.maybe_finalize_async_calls(blocking=True)

        return save


def _group_of_one() -> None:
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = os.path.join(tempfile.mkdtemp(prefix="ckpt-soak-"), "rendezvous")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    shutil.rmtree(os.path.dirname(meeting), ignore_errors=True)


def run() -> None:
    """Called through ``-c``: the process that stock Megatron spawns would import a ``__main__`` with torch in it first."""
    peer = Peer(Order(**json.loads(sys.argv[1])), *sys.argv[2:])
    line = sys.stdin.readline()
    if line:
        peer.run(Order(**json.loads(line)))


if __name__ == "__main__":
    run()
