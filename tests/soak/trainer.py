"""The trainer of the soak: real tensors, the real engine, and a report of what it sees of itself.

It runs in a process of its own (``python -m tests.soak.trainer ORDER``) or in a Ray actor. A first part builds the state
and says so; only then is the limit known, and the harness sends the second part of the order.

What it tells goes, one JSON object a line, into a file that the harness follows: ``mapped`` several times a second, a line
for each save and each restore, and a last one with everything counted.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import mmap
import os
import resource
import sys
import threading
import time
import traceback
from typing import Any, Literal

PAGE = mmap.PAGESIZE
MIB = 1 << 20
_WATCH_SECONDS = 0.1
_SAVE_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Order:
    """What a trainer does.

    Attributes:
        tells: the file that it tells into.
        group: directory of the memory group to enter first, or empty.
        state_bytes: full size of the state.
        directory: for checkpoints.
        budget, extent_bytes: of the engine.
        saves: how many; every ``restore_every``-th is restored, over the state itself, and compared.
        address_space: bytes that the process may map beyond what it has after its first engine, or 0.
        breathe: bytes of its own that the trainer maps and unmaps in the course of the saves.
    """

    tells: str
    group: str
    state_bytes: int
    directory: str
    budget: int | Literal["auto"] = "auto"
    extent_bytes: int = 4 * MIB
    saves: int = 10
    restore_every: int = 5
    address_space: int = 0
    breathe: int = 0


class Trainer:
    """Made before the limit is set, which is why nothing may be imported for the first time in :meth:`run`."""

    def __init__(self, order: Order) -> None:
        self._file = open(order.tells, "a", buffering=1)
        if order.group:
            with open(os.path.join(order.group, "cgroup.procs"), "w") as procs:
                procs.write(str(os.getpid()))
        self._forks = 0
        os.register_at_fork(before=self._forked)
        sys.addaudithook(self._audit)
        import torch

        from tests.soak.state import KnownState

        torch.set_num_threads(1)
        import ckpt_engine  # noqa: F401

        self._state = KnownState(order.state_bytes)
        self._blocks: list[mmap.mmap] = []
        self._refused = 0
        self._engine: Any = None
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="soak-watch", daemon=True)
        self._watcher.start()
        self.tell(ready=True, pid=os.getpid(), state=self._state.bytes)

    def tell(self, **what: Any) -> None:
        self._file.write(json.dumps({"at": time.monotonic(), **what}) + "\n")

    def run(self, order: Order) -> None:
        """Tells what went wrong before it raises it."""
        try:
            self._run(order)
        except BaseException:
            self.tell(error=traceback.format_exc())
            raise
        finally:
            self._over.set()

    def _run(self, order: Order) -> None:
        self._session(order, first=0, saves=2)  # lazy imports, caches, malloc's arenas: the base line is what is left
        gc.collect()
        if order.address_space:
            # Now, since glibc reserves 64 MiB for the malloc of each of the first threads, and gives none of it back.
            used = int(_statm()[0]) * PAGE
            resource.setrlimit(resource.RLIMIT_AS, (used + order.address_space, resource.RLIM_INFINITY))
            self.tell(address_limit=used + order.address_space, address_used=used)
        base = self._counts()
        restored = self._session(order, first=2, saves=order.saves)
        self._blocks.clear()
        gc.collect()
        self.tell(
            end=True,
            base=base,
            after=self._counts(),
            forks=self._forks,
            saves=order.saves,
            restored=restored,
            own_refused=self._refused,
            children=_children(),
        )

    def _session(self, order: Order, *, first: int, saves: int) -> int:
        """One engine, from its construction to its end. Returns the number of bit-exact restores."""
        from ckpt_engine import CheckpointEngine, EngineConfig, TrainState

        config = EngineConfig(
            staging_budget=order.budget, extent_bytes=order.extent_bytes, keep_last=2, commit_timeout=60.0
        )
        restored = 0
        self._state.fill(first)
        with CheckpointEngine(order.directory, config) as engine:
            self._engine = engine
            report = engine.memory()
            self.tell(budget=report.ceiling, ruled_by=report.ruled_by, extent=report.extent_bytes)
            for number, step in enumerate(range(first, first + saves), 1):
                tree = self._state.tree(step)
                started = time.monotonic()
                handle = engine.save(tree, step, TrainState(step=step))
                stall = time.monotonic() - started
                self._state.fill(step + 1)  # at once: what is on its way must not be this
                restore = number % order.restore_every == 0 or number == saves
                if number % 3 == 0 and not restore:
                    continue  # the next one is taken with this one still on its way
                self._breathe(order, number)
                while not handle.done():
                    engine.poll()
                    time.sleep(0.005)
                info = handle.result(_SAVE_SECONDS)
                engine.poll()
                self.tell(
                    saved=number,
                    rest=int(_statm()[1]) * PAGE - _pool_resident(),
                    bytes=info.bytes,
                    stall=stall,
                    extent=info.stats.extent_bytes,
                    budget=info.stats.budget_bytes,
                )
                if restore:
                    engine.restore(tree, step=step)
                    if wrong := self._state.wrong(step, tree):
                        raise AssertionError(f"step {step} came back with other values: {wrong}")
                    restored += 1
                    self.tell(restored=number)
                    self._state.fill(step + 1)
                del tree, handle, info
            self._engine = None
        return restored

    def _breathe(self, order: Order, number: int) -> None:
        """Takes and gives back memory of the trainer's own, a MiB at a time, as a trainer's steps would."""
        if not order.breathe:
            return
        wave = number % 24
        wanted = order.breathe // MIB * min(wave, 24 - wave) // 12
        while len(self._blocks) > wanted:
            self._blocks.pop().close()
        while len(self._blocks) < wanted:
            try:
                self._blocks.append(mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            except OSError:
                self._refused += 1
                return
            self._engine.poll()
            time.sleep(0.01)

    def _counts(self) -> dict[str, int]:
        return {
            "rss": int(_statm()[1]) * PAGE,
            "descriptors": _open_files(),
            # The engine's own, by their names: in an actor, Ray's come and go.
            "threads": sum(thread.name.startswith("ckpt") for thread in threading.enumerate()),
        }

    def _watch(self) -> None:
        while not self._over.wait(_WATCH_SECONDS):
            engine = self._engine
            if engine is not None:
                stats = engine._workers.pool.stats()
                self.tell(mapped=stats.mapped, in_use=stats.in_use)

    def _forked(self) -> None:
        self._forks += 1

    def _audit(self, event: str, _: Any) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn"):  # these need not come by the hook for forks
            self._forks += 1


def _statm() -> list[str]:
    with open("/proc/self/statm") as file:
        return file.read().split()


def _pool_resident() -> int:
    """What the staging pool has in memory as the kernel counts it: it alone is kept out of forks ("dc")."""
    total = resident = 0
    with open("/proc/self/smaps", "rb") as file:
        for line in file:
            if line.startswith(b"Rss:"):
                resident = 1024 * int(line.split()[1])
            elif line.startswith(b"VmFlags:") and b" dc" in line:
                total += resident
    return total


def _children() -> int:
    count = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                count += len(file.read().split())
        except OSError:
            pass  # a thread that has ended since
    return count


def main() -> None:
    trainer = Trainer(Order(**json.loads(sys.argv[1])))
    line = sys.stdin.readline()
    if line:
        trainer.run(Order(**json.loads(line)))


def _open_files() -> int:
    """Files and directories that are open; sockets and pipes of one rank are never the engine's."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("/")
        except OSError:  # the one that listed them
            pass
    return count


if __name__ == "__main__":
    main()
