"""Promises: one process, bounded memory, the trainer keeps its GIL, nothing leaks (design invariants 2, 3 and 7)."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import CheckpointEngine, EngineConfig
from ckpt_engine.staging.pool import ExtentPool

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"staging_budget": 64 * MIB, "commit_timeout": 30.0, **options})


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@contextmanager
def peak_rss() -> Iterator[list[int]]:
    """Samples the resident set every 5 ms; the list holds the base and, at the end, the peak."""
    stop = threading.Event()
    found = [rss(), 0]

    def sample() -> None:
        while not stop.wait(0.005):
            found[1] = max(found[1], rss())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


NO_PROCESS = """
import os, signal, subprocess, sys, threading
import torch
from ckpt_engine import CheckpointEngine, EngineConfig, TrainState
forks = []
os.register_at_fork(before=lambda: forks.append(1))
def refuse(*args, **kwargs):
    raise OSError(12, "Cannot allocate memory")
import _posixsubprocess
os.fork = os.forkpty = os.posix_spawn = os.posix_spawnp = os.system = os.popen = refuse
subprocess.Popen = refuse
_posixsubprocess.fork_exec = refuse
signal.signal = refuse
def children():
    return [c for t in os.listdir("/proc/self/task") for c in open(f"/proc/self/task/{t}/children").read().split()]
def drive():
    with CheckpointEngine(sys.argv[1], EngineConfig(staging_budget=32 << 20, keep_last=1)) as engine:
        for step in range(4):
            state = {f"t{i}": torch.full((1 << 18,), float(step)) for i in range(32)} | {"o": {"n": step}}
            engine.save(state, step, TrainState(step=step))
            assert children() == []
        engine.wait(60)
        assert engine.steps() == [3] and engine.verify(3).ok
        engine.restore(state)
    done.append(1)
done = []
thread = threading.Thread(target=drive)   # as a method of a Ray actor would
thread.start(); thread.join()
assert done == [1] and forks == [] and children() == []
"""


def test_no_fork_spawn_or_subprocess_on_any_path(tmp_path: Path) -> None:
    """B040, B044, B058: saves, retention and restore, from a thread that isn't the main one, with all of them forbidden."""
    subprocess.run([sys.executable, "-c", NO_PROCESS, str(tmp_path)], timeout=90, check=True)


@pytest.mark.parametrize("single", [False, True], ids=["40 tensors", "one tensor"])
def test_memory_held_stays_within_the_budget(tmp_path: Path, single: bool) -> None:
    """B010: 320 MiB through 32 MiB, also when it is one tensor."""
    state = {"t": torch.ones(80 * MIB)} if single else {f"t{i}": torch.full((2 * MIB,), float(i)) for i in range(40)}
    with CheckpointEngine(tmp_path, config(staging_budget=32 * MIB)) as engine:
        with peak_rss() as seen:
            info = engine.save(state, 1).result(60)
        assert info.bytes > 320 * MIB
        assert seen[1] - seen[0] <= 32 * MIB + 20 * MIB
        assert info.stats.peak_staged_bytes <= 32 * MIB
        assert engine.verify(1).ok


MIXED_SIZES = """
import resource, sys
import torch
from ckpt_engine import CheckpointEngine, EngineConfig
MIB = 1 << 20
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
sizes = []
with CheckpointEngine(sys.argv[1], config=EngineConfig(staging_budget=64 * MIB, commit_timeout=30.0, keep_last=1)) as engine:
    for step in range(24):
        state = {f"t{i}": torch.ones((i % 8 + 1) * MIB // 4 + step) for i in range(64)}
        engine.save(state, step).result(60)
        del state
        sizes.append(rss())
print(max(sizes[12:]) - max(sizes[4:12]))
"""


def test_memory_comes_back_after_saves_of_changing_sizes(tmp_path: Path) -> None:
    """B020, B037. In a process whose allocator keeps nothing of the trainer's own tensors, so that what grows is the engine's."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(
        [sys.executable, "-c", MIXED_SIZES, str(tmp_path)], env=env, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 0.01 * 288 * MIB, done.stdout


def test_nothing_of_an_engine_is_left(tmp_path: Path) -> None:
    """B037"""
    gc.collect()
    base_threads, base_descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with CheckpointEngine(tmp_path, config(keep_last=1)) as engine:
        for step in range(3):
            engine.save({f"t{i}": torch.ones((i % 8 + 1) * MIB // 4 + step) for i in range(64)}, step).result(60)
    del engine
    gc.collect()
    assert threading.active_count() == base_threads
    assert len(os.listdir("/proc/self/fd")) == base_descriptors
    assert not [o for o in gc.get_objects() if isinstance(o, ExtentPool)]


def test_a_pool_of_mappings_is_given_back_without_garbage_collection(tmp_path: Path) -> None:
    """B062"""
    gc.collect()
    gc.disable()
    try:
        before = rss()
        engine = CheckpointEngine(tmp_path, config())
        engine.save({"t": torch.ones(16 * MIB)}, 1).result(60)
        engine.close()
        del engine
        assert rss() - before < 24 * MIB
    finally:
        gc.enable()


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    """B071: 5,000 tensors with 128 descriptors, and no listening socket is opened."""

    def listening() -> set[str]:
        """Inodes of this process's listening sockets."""
        mine = {
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        }
        found = set()
        for name in ("tcp", "tcp6"):
            with open(f"/proc/net/{name}") as file:
                found |= {line.split()[9] for line in file if line.split()[3] == "0A"}
        return {inode for inode in found if f"socket:[{inode}]" in mine}

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = {f"t{i}": torch.ones(10) for i in range(5000)}
    base, ports = len(os.listdir("/proc/self/fd")), listening()
    resource.setrlimit(resource.RLIMIT_NOFILE, (base + 64, hard))
    try:
        with CheckpointEngine(tmp_path, config()) as engine:
            for step in range(3):
                engine.save(state, step)
            engine.wait(60)
            assert engine.steps() == [0, 1, 2]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert listening() <= ports


def test_the_page_cache_is_left_alone(tmp_path: Path) -> None:
    """B083: buffered writes, too."""
    from tests.test_shard_file_cache import resident

    for direct in ("auto", False):
        with CheckpointEngine(tmp_path / str(direct), config(direct_io=direct)) as engine:
            info = engine.save({"t": torch.ones(32 * MIB)}, 1).result(60)
        shards = list(Path(info.path).glob("*.distcp"))
        assert shards and all(resident(str(shard)) <= 0.05 for shard in shards)


def ticks_during(work: Any) -> float:
    """How often another thread that wants to run every 2 ms gets to run while ``work`` does, as a part of what it wants."""
    stop = threading.Event()
    ticks = [0]

    def tick() -> None:
        while not stop.is_set():
            time.sleep(0.002)
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    try:
        work()
    finally:
        spent = time.perf_counter() - begin
        stop.set()
        thread.join()
    return ticks[0] / (spent / 0.002)


def test_other_threads_run_while_bulk_work_is_done(tmp_path: Path) -> None:
    """B013: one 512 MiB tensor, copied, checksummed and written. Were the GIL held for one of these, nobody else would run."""
    with CheckpointEngine(tmp_path, config(keep_last=1)) as engine:
        state = {"t": torch.ones(128 * MIB)}
        assert ticks_during(lambda: engine.save(state, 1).result(90)) > 0.1
        held = ticks_during(lambda: bytes(memoryview(state["t"].numpy()).cast("B")))  # a copy that does hold it
        assert held < 0.1


KILLED = """
import os, random, sys, threading, time
import torch
from ckpt_engine import CheckpointEngine, EngineConfig, TrainState

def train(directory, delay, report):
    threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), 9)), daemon=True).start()
    engine = CheckpointEngine(directory, EngineConfig(staging_budget=16 << 20, keep_last=2, extent_bytes=1 << 20))
    state = {"w": torch.zeros(1 << 20), "small": {str(i): torch.zeros(50) for i in range(50)}, "n": 0}
    restored = engine.restore(state)
    step = restored.step if restored else 0
    tensors = [state["w"], *state["small"].values()]
    assert state["n"] == step and all((t == step).all() for t in tensors), (step, state["n"])
    assert restored is None or restored.train_state.consumed_train_samples == 8 * step
    os.write(report, f"{step} ".encode())
    while True:
        step += 1
        state["n"] = step
        for t in tensors: t.fill_(step)
        engine.save(state, step, TrainState(step=step, consumed_train_samples=8 * step))
        engine.poll()

directory, rounds = sys.argv[1], int(sys.argv[2])
generator = random.Random(7)
read, write = os.pipe()
for number in range(rounds):   # torch is imported once; each round is a fresh process in every other way
    delay = generator.uniform(0.0, 0.4)
    child = os.fork()
    if child == 0:
        try:
            train(directory, delay, write)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9, f"round {number}: {status}"
os.close(write)
print(os.read(read, 1 << 16).decode())
"""


@pytest.mark.crash
def test_a_run_that_is_killed_at_any_moment_resumes_right(tmp_path: Path) -> None:
    """B005, B107: 50 SIGKILLs at random moments; every restart finds a whole checkpoint, never older than the one before."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), os.environ.get("CKPT_ENGINE_KILLS", "50")],
        timeout=170,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = [int(word) for word in done.stdout.split()]
    assert steps == sorted(steps) and steps[-1] > 0
    with CheckpointEngine(tmp_path, config()) as engine:
        assert engine.steps() and all(engine.verify(step).ok for step in engine.steps())
        assert int((tmp_path / "latest_checkpointed_iteration.txt").read_text()) in engine.steps()


def test_growing_threads_do_not_break_the_second_save(tmp_path: Path) -> None:
    """B082: eight more threads before each of ten saves of changing sizes."""
    stop = threading.Event()
    threads: list[threading.Thread] = []
    try:
        with CheckpointEngine(tmp_path, config(keep_last=2)) as engine:
            for step in range(10):
                for _ in range(8):
                    threads.append(threading.Thread(target=stop.wait))
                    threads[-1].start()
                state = {"t": torch.full((1000 * (step + 1),), float(step))}
                engine.save(state, step).result(60)
                found = {"t": torch.zeros(1000 * (step + 1))}
                engine.restore(found)
                assert torch.equal(found["t"], state["t"])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
