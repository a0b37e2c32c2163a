"""Promises about interrupts that fall between two steps, forked children, and descriptors that run out."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_engine import CheckpointEngine, CheckpointError, EngineConfig
from ckpt_engine.spool import Spool
from ckpt_engine.staging.pool import ExtentPool
from ckpt_engine.workers import Workers

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"staging_budget": 2 * MIB, "extent_bytes": MIB, "commit_timeout": 5.0, **options})


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((MIB,), value), "n": int(value)}


def restored(engine: CheckpointEngine, value: float) -> bool:
    found: dict[str, Any] = {"w": torch.zeros(MIB), "n": 0}
    engine.restore(found)
    return bool(torch.equal(found["w"], torch.full((MIB,), value))) and found["n"] == int(value)


@contextlib.contextmanager
def interrupted_once(owner: Any, name: str, *, after: bool) -> Iterator[None]:
    """The next call of ``owner.name`` ends in a KeyboardInterrupt, before it does its work or right after."""
    real, left = getattr(owner, name), [1]

    def call(*args: Any, **options: Any) -> Any:
        if not left:
            return real(*args, **options)
        left.pop()
        if after:
            real(*args, **options)
        raise KeyboardInterrupt

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, real)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", ["vote", "enter", "writers", "copiers"])
def test_an_interrupt_between_two_steps_costs_that_save_only(tmp_path: Path, place: str, after: bool) -> None:
    """The save that was interrupted ends as failed or committed; the next ones work, with a pool that lacks nothing."""
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save(state(1.0), 1)
        engine.wait()
        owner, name = {
            "vote": (engine._background._thread, "submit"),
            "enter": (engine._background, "enter"),
            "writers": (engine._workers, "write"),
            "copiers": (engine._workers.copiers, "submit"),
        }[place]
        with interrupted_once(owner, name, after=after), pytest.raises(KeyboardInterrupt):
            engine.save(state(2.0), 2)
        begin = time.monotonic()
        with contextlib.suppress(CheckpointError):
            engine.wait(10)
        assert time.monotonic() - begin < 4, "nobody voted: the save had to run into its deadline"
        for value in (3.0, 4.0, 5.0):
            engine.save(state(value), int(value))
            engine.wait()
        assert engine.memory().in_use == 0
        assert restored(engine, 5.0)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_on_the_way_out_of_the_pool_loses_no_extent(tmp_path: Path, after: bool) -> None:
    """Two lost ones would be the whole pool."""
    with CheckpointEngine(tmp_path, config()) as engine:
        for step in (1, 2, 3):
            with interrupted_once(ExtentPool, "_hand_out", after=after), pytest.raises(KeyboardInterrupt):
                engine.save(state(1.0), step)
            with contextlib.suppress(CheckpointError):
                engine.wait(10)
        assert engine.memory().in_use == 0
        engine.save(state(4.0), 4)
        engine.wait()
        assert restored(engine, 4.0)


def test_an_interrupt_while_the_pool_is_cut_anew_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents of one size with a pool of another would be written past their end."""
    workers = Workers(EngineConfig(staging_budget=32 * MIB))
    try:
        before = workers.geometry, workers.pool
        smaller = type(before[0])(MIB, 8, 1)
        with monkeypatch.context() as patched:
            patched.setattr(workers, "_make_pool", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                workers._replace(smaller, 8 * MIB, "test")
        assert (workers.geometry, workers.pool) == before
        extent = workers.pool.acquire(timeout=1)
        assert extent is not None and extent.nbytes == workers.geometry.extent_bytes
        workers.pool.release(extent)
        workers._replace(smaller, 8 * MIB, "test")
        assert workers.pool.extent_bytes == workers.geometry.extent_bytes == MIB
    finally:
        workers.close()


def test_a_forked_child_that_leaves_the_block_leaves_it_at_once(tmp_path: Path) -> None:
    """What is in flight is the parent's; a child that waited for it would wait for threads that it doesn't have."""
    hold = threading.Event()
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.on_committed(lambda info: hold.wait(20) and None)
        engine.save(state(1.0), 1)
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                engine.__exit__(None, None, None)
                try:
                    engine.save({"n": 2}, 2)  # no tensors: torch's own threads aren't in a forked child
                except CheckpointError:
                    code = 0
            os._exit(code)
        begin, status = time.monotonic(), None
        while status is None and time.monotonic() - begin < 10:
            pid, found = os.waitpid(child, os.WNOHANG)
            status = found if pid else time.sleep(0.02)
        if status is None:
            os.kill(child, 9)
            os.waitpid(child, 0)
        hold.set()
        assert status == 0
        engine.wait()
        assert restored(engine, 1.0)


def test_a_callback_that_polls_hides_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, as waiting is; the trainer hears of the save that failed."""
    refused: list[str] = []

    with CheckpointEngine(tmp_path, config(staging_budget=16 * MIB)) as engine:

        def callback(info: Any) -> None:
            try:
                engine.poll()
            except CheckpointError as error:
                refused.append(error.message)

        engine.on_committed(callback)
        engine.save(state(1.0), 1)
        engine.wait()
        real = os.pwrite

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        engine.save(state(2.0), 2)
        with pytest.raises(CheckpointError, match="No space"):
            engine.wait()
        monkeypatch.setattr(os, "pwrite", real)
    assert len(refused) == 1 and "callback" in refused[0]


def test_closing_again_from_a_new_thread_is_nothing(tmp_path: Path) -> None:
    """Which may have the identity of the committer that is gone."""
    engine = CheckpointEngine(tmp_path, config())
    engine.save(state(1.0), 1)
    engine.close()
    errors: list[BaseException] = []

    def close() -> None:
        try:
            engine.close()
        except BaseException as error:
            errors.append(error)

    for _ in range(20):
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
    assert errors == []


# -- descriptors ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def descriptors(more: int) -> Iterator[None]:
    """Only so many more files than now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_hundreds_of_large_values_take_few_descriptors(tmp_path: Path) -> None:
    values = {f"v{n}": np.full(200_000, float(n)) for n in range(150)}  # 1.6 MB each
    with CheckpointEngine(tmp_path, config(staging_budget=16 * MIB)) as engine:
        with descriptors(90):
            engine.save({"values": values, "n": 1}, 1)
            engine.wait()
        found: dict[str, Any] = {"values": {}, "n": 0}
        engine.restore(found)
        assert all((found["values"][name] == value).all() for name, value in values.items())


def test_limits_that_cant_be_read_for_want_of_descriptors_hold(tmp_path: Path) -> None:
    """Not "no limit at all", which would let the pool grow where it must not."""
    with CheckpointEngine(tmp_path, EngineConfig(staging_budget="auto")) as engine:
        before = engine.memory()
        taken = []
        with descriptors(0):
            with contextlib.suppress(OSError):  # numbers below the highest one may be free
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            after = engine.memory()
        for fd in taken:
            os.close(fd)
        assert (after.granted, after.limits) == (before.granted, before.limits) and after.limits


@pytest.mark.parametrize("good_writes", [0, 1, 2])
def test_a_spool_that_runs_out_of_space_keeps_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good_writes: int
) -> None:
    real, left = os.write, [1] * good_writes

    def write(fd: int, data: Any) -> int:
        if not left:
            raise OSError(27, "File too large")
        left.pop()
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    spool, pieces = Spool(str(tmp_path)), [os.urandom(700_000) for _ in range(5)]
    for piece in pieces:
        spool.write(piece)
    assert bytes(spool.take()) == b"".join(pieces)
