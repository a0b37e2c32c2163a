"""One rank of one way to save with megatron-core, in a process of its own: :mod:`benchmarks.megatron` starts it and tells it when.

Orders come as lines of JSON on standard input, the first of them an :class:`Order`; answers go as lines of JSON into a pipe,
since Megatron prints. The process stays from save to save, as a trainer does, so that a later save finds what the one before
left: a manager process, cached plans, mapped memory.

The state lies in shared memory that the driver has filled and all workers map: that many copies of it would not fit. Nobody
changes it. Compared with a trainer whose state is memory of its own this spares stock's forks the copy of its page tables.

This is not run as ``__main__``: the manager process that stock Megatron spawns would import it once more.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import mmap
import multiprocessing.util
import os
import resource
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks import measure, megatron_versions


@dataclasses.dataclass(frozen=True)
class Order:
    """What a worker is.

    Attributes:
        folder: what to put in front of ``sys.path``; empty if Megatron is installed.
        asynchronous: save through a temporal queue.
        rank, ranks, rendezvous: its place in the gloo group; the file through which the ranks find each other.
        state_fd, state_bytes: the shared memory with the state.
        tensors: key, dtype, shape and offset there of each tensor of this rank.
        reply_fd: where answers go.
    """

    folder: str
    asynchronous: bool
    rank: int
    ranks: int
    rendezvous: str
    state_fd: int
    state_bytes: int
    tensors: Sequence[tuple[str, str, Sequence[int], int]]
    reply_fd: int


class ProcessCounter:
    """Counts the processes that this one and its forks start; helper processes of ``multiprocessing`` among them.

    Each start puts a byte into a pipe that forks inherit, so that those of forks count as well. A spawned process is not
    looked into.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.register_at_fork(before=self._note)
        spawn = multiprocessing.util.spawnv_passfds

        def counted(*args: Any) -> Any:
            self._note()
            return spawn(*args)

        multiprocessing.util.spawnv_passfds = counted  # type: ignore[assignment]
        sys.addaudithook(self._audit)

    def take(self) -> int:
        """How many since it was asked last."""
        try:
            return len(os.read(self._read, 1 << 16))
        except BlockingIOError:
            return 0

    def _note(self) -> None:
        os.write(self._write, b".")

    def _audit(self, event: str, _: Any) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn"):
            self._note()


def tree_cpu_seconds() -> float:
    """CPU seconds of this process, of its children that have ended, and of its descendants that live.

    What is alive counts in the kernel's ticks of 10 ms.
    """
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])  # user, system, and both of its own children that have ended
        except psutil.NoSuchProcess:
            pass  # ended since the list was made
    return total


class _Saver:
    """Saves the state, one whole save at a time."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._processes = ProcessCounter()
        megatron_versions.use(order.folder)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{order.rendezvous}", rank=order.rank, world_size=order.ranks
        )
        from megatron.core import __version__, dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
        from megatron.core.msc_utils import MultiStorageClientFeature

        # Where that package happens to be installed, 0.16 writes through it and 0.19 doesn't. Plain files for everyone.
        MultiStorageClientFeature.disable()
        self.version: str = __version__
        self._megatron = dist_checkpointing
        self._queue_class = AsyncCallsQueue
        self._queue: Any = None
        # Without this, the first save of whoever comes first would pay for the page tables.
        self._memory = mmap.mmap(
            order.state_fd, max(1, order.state_bytes), flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        )
        # A storage of its own for each: stock copies tensors that are part of a larger storage.
        self._tensors = {key: self._tensor(dtype, shape, offset) for key, dtype, shape, offset in order.tensors}

    def install(self, budget: int | None) -> list[str]:
        import ckpt_engine.megatron
        from ckpt_engine import EngineConfig

        config = EngineConfig(staging_budget="auto" if budget is None else budget)
        return [str(check) for check in ckpt_engine.megatron.install(config)]

    def save(self, path: str, step: int) -> dict[str, float]:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        order = self._order
        if order.asynchronous and self._queue is None:
            self._queue = self._queue_class(persistent=False)
        # A new tree each time, as a framework makes it; it belongs to none of the measured times.
        tree: dict[str, Any] = {key: ShardedTensor.from_rank_offsets(key, data) for key, data in self._tensors.items()}
        tree["iteration"] = step
        options: dict[str, Any] = {"async_sharded_save": order.asynchronous}
        if "async_strategy" in inspect.signature(self._megatron.save).parameters:
            options["async_strategy"] = "mcore"
        if order.rank == 0:
            os.mkdir(path)
        dist.barrier()
        self._processes.take()
        machine, cpu, start = measure.machine_cpu_seconds(), tree_cpu_seconds(), time.perf_counter()
        request = self._megatron.save(tree, path, **options)
        if order.asynchronous:
            self._queue.schedule_async_request(request)
        returned = end = time.perf_counter()
        if order.asynchronous:
            self._queue.maybe_finalize_async_calls(blocking=True)
            end = time.perf_counter()
        used, machine = tree_cpu_seconds() - cpu, measure.machine_cpu_seconds() - machine
        return {
            "stall": returned - start,
            "durable": end - start,
            "cpu": used,
            "machine_cpu": machine,
            "processes": self._processes.take(),
        }

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
        dist.destroy_process_group()

    def _tensor(self, dtype: str, shape: Sequence[int], offset: int) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        return torch.frombuffer(self._memory, dtype=getattr(torch, dtype), count=count, offset=offset).view(*shape)


def main() -> None:
    """Obeys until it is told to stop, or nobody is there any more."""
    order = Order(**json.loads(sys.stdin.readline()))
    with open(order.reply_fd, "w", encoding="utf-8") as replies:

        def answer(content: dict[str, Any]) -> None:
            replies.write(json.dumps(content) + "\n")
            replies.flush()

        try:
            saver = _Saver(order)
            answer({"version": saver.version, "pid": os.getpid()})
            while line := sys.stdin.readline():
                told = json.loads(line)
                if told["do"] == "install":
                    answer({"checks": saver.install(told["budget"])})
                elif told["do"] == "save":
                    answer({**saver.save(told["path"], told["step"])})
                else:
                    break
            saver.close()
        except BaseException as error:
            answer({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
            raise
