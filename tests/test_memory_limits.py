"""Promises about saves when memory or threads run short (real limits are in test_memory_real)."""

from __future__ import annotations

import errno
import functools
import gc
import mmap
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import CheckpointEngine, EngineConfig, workers
from ckpt_engine.config import MIB
from ckpt_engine.errors import MemoryBudgetError
from ckpt_engine.layout.image import BlobRun
from ckpt_engine.staging import pool as pool_module
from ckpt_engine.staging.pressure import PressureGauge
from ckpt_engine.threads import Crew
from ckpt_engine.workers import Workers
from tests.pool_tools import SOON, Refusing, take
from tests.ranks import run_ranks
from tests.sinks import failing_writes
from tests.test_guard import GIB, Machine

pytestmark = pytest.mark.timeout(150)


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"staging_budget": 64 * MIB, "commit_timeout": 30.0, **options})


def saved_and_back(engine: CheckpointEngine, step: int, mebibytes: int = 24) -> Any:
    state = {f"t{i}": torch.randn(MIB // 2) for i in range(mebibytes // 2)}
    info = engine.save(state, step).result(60)
    found = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    engine.restore(found, step=step)
    assert all(torch.equal(found[key], state[key]) for key in state)
    return info.stats


# Geometry -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def made_up(tmp_path: Path) -> Iterator[tuple[Machine, Workers]]:
    machine = Machine(tmp_path / "machine")
    gauge = PressureGauge(256 * MIB, proc=str(machine.proc), cgroup_root=str(machine.cgroup), environ={})
    crew = Workers(config(staging_budget=256 * MIB), gauge=gauge)
    yield machine, crew
    crew.close()


def left(machine: Machine, size: int) -> None:
    machine.meminfo(MemTotal=64 * GIB, MemAvailable=size)


def test_a_budget_that_sinks_between_saves_is_cut_into_smaller_extents_and_back(
    made_up: tuple[Machine, Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, crew = made_up
    monkeypatch.setattr("ckpt_engine.staging.pressure.RELIEF_SECONDS", 0.0)
    sizes = []
    for room in (GIB, 40 * MIB, 8 * MIB, 3 * MIB, 40 * MIB, GIB):
        left(machine, room)
        crew.fit()
        report = crew.memory()
        sizes.append((report.extent_bytes // MIB, report.writers))
        assert report.ceiling <= max(report.granted, 2 * report.extent_bytes)
        assert report.mapped <= max(int(room * 0.9), 2 * MIB)
        crew.pool.trim()
    assert sizes == [(16, 2), (8, 2), (1, 2), (1, 1), (4, 2), (16, 2)]


def test_extents_of_a_save_on_its_way_keep_their_size(made_up: tuple[Machine, Workers]) -> None:
    machine, crew = made_up
    extent, pool = take(crew.pool), crew.pool
    left(machine, 8 * MIB)
    crew.fit()
    assert crew.pool is pool and crew.geometry.extent_bytes == 16 * MIB
    assert pool.stats().budget == 32 * MIB
    pool.release(extent)
    pool.trim()
    crew.fit()
    assert crew.pool is not pool and crew.geometry.extent_bytes == MIB


def test_nothing_left_is_an_error_before_the_save_unless_two_extents_are_held(made_up: tuple[Machine, Workers]) -> None:
    machine, crew = made_up
    crew.pool.reserve(2)
    left(machine, MIB)
    crew.fit()
    crew.pool.trim()
    with pytest.raises(MemoryBudgetError, match="MemAvailable"):
        crew.fit()
    left(machine, GIB)
    crew.fit()


class RefusingAbove:
    """Stands in for mmap.mmap on a system that has no piece of memory larger than ``most``."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._real = mmap.mmap

    def __call__(self, fd: int, size: int, *args: Any, **kwargs: Any) -> mmap.mmap:
        if size > self.most:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return self._real(fd, size, *args, **kwargs)


@pytest.mark.parametrize("populate", [False, True])
def test_refused_memory_makes_the_extents_smaller_and_the_save_goes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, populate: bool
) -> None:
    with CheckpointEngine(tmp_path, config(populate=populate)) as engine:
        assert saved_and_back(engine, 1).extent_bytes == 16 * MIB
        engine._workers.pool.trim()
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", RefusingAbove(3 * MIB))
            assert saved_and_back(engine, 2).extent_bytes <= 3 * MIB
        monkeypatch.setattr(workers, "_REFUSED_SECONDS", 0.0)
        assert saved_and_back(engine, 3).extent_bytes == 16 * MIB


def test_two_extents_of_the_smallest_size_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointEngine(tmp_path, config(staging_budget=2 * MIB)) as engine:
        monkeypatch.setattr(mmap, "mmap", Refusing(2, MemoryError))
        stats = saved_and_back(engine, 1, mebibytes=16)
        assert (stats.extent_bytes, stats.writers, stats.peak_staged_bytes) == (MIB, 1, 2 * MIB)
        monkeypatch.undo()


@pytest.mark.parametrize("allow", [0, 1])
def test_below_the_floor_it_is_a_typed_error_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow: int
) -> None:
    with CheckpointEngine(tmp_path, config()) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", Refusing(allow, MemoryError))
            if allow:
                patch.setattr(mmap, "mmap", RefusingAbove(0))
            with pytest.raises(MemoryBudgetError, match="expected at least 2"):
                engine.save({"t": torch.ones(1000)}, 1)
        assert not list(tmp_path.glob("iter_*"))
        monkeypatch.setattr(workers, "_REFUSED_SECONDS", 0.0)
        assert saved_and_back(engine, 2).extent_bytes == 16 * MIB, "the engine can be used again"


def refused_on_one_rank(rank: int, world: int, directory: str) -> str:
    with CheckpointEngine(directory, config()) as engine:
        real = mmap.mmap
        if rank == 1:
            mmap.mmap = RefusingAbove(0)  # type: ignore[assignment, misc]
        try:
            with pytest.raises(MemoryBudgetError) as caught:
                engine.save({"t": torch.ones(1000)}, 1)
        finally:
            mmap.mmap = real  # type: ignore[misc]
        engine.save({"t": torch.ones(1000)}, 2).result(30)
        return f"{caught.value.rank} {engine.steps()} {len(os.listdir(directory)) > 0}"


def test_one_rank_without_memory_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, refused_on_one_rank, str(tmp_path)) == ["1 [2] True"] * 2


# Ranks of a node ------------------------------------------------------------------------------------------------------


def share_of_a_node(rank: int, world: int, directory: str, machine: str, announced: str) -> tuple[int, int]:
    os.environ.pop("LOCAL_WORLD_SIZE")
    if announced:
        os.environ["LOCAL_WORLD_SIZE"] = announced
    workers.PressureGauge = functools.partial(  # type: ignore[misc, assignment]
        PressureGauge, proc=f"{machine}/proc", cgroup_root=f"{machine}/cgroup", environ={}
    )
    with CheckpointEngine(directory, config(staging_budget=GIB)) as engine:
        engine.save({f"t{rank}": torch.ones(32 * MIB // 4)}, 1).result(30)
        report = engine.memory()
        assert report.peak_in_use <= report.ceiling <= report.granted
        return report.local_ranks, report.ceiling


@pytest.mark.parametrize("announced, counted", [("", 2), ("4", 4)])
def test_ranks_of_one_node_never_get_more_than_the_node_has(tmp_path: Path, announced: str, counted: int) -> None:
    """B010: without LOCAL_WORLD_SIZE (Ray, mpirun) the ranks find out for themselves how many share the node."""
    machine = Machine(tmp_path / "machine")
    left(machine, 300 * MIB)
    results = run_ranks(2, share_of_a_node, str(tmp_path / "c"), str(tmp_path / "machine"), announced)
    assert [ranks for ranks, _ in results] == [counted] * 2
    # The made-up MemAvailable doesn't sink when the pools are filled, so each also gets what it holds.
    assert sum(ceiling for _, ceiling in results) <= 0.9 * (300 + 2 * 32 + 32) * MIB
    assert all(ceiling <= 0.9 * (300 // counted + 48) * MIB for _, ceiling in results)


# Threads --------------------------------------------------------------------------------------------------------------


def refuse_threads(monkeypatch: pytest.MonkeyPatch, *prefixes: str) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(prefixes):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


def test_threads_that_cannot_be_started_cost_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        refuse_threads(patch, "ckpt-write_1", "ckpt-copy_1", "ckpt-copy_2", "ckpt-copy_3")
        with CheckpointEngine(tmp_path, config(copy_threads=4)) as engine:
            assert engine.memory().threads == 2
            for step in range(3):
                assert saved_and_back(engine, step).writers >= 1
            warned = [r for r in caplog.records if "could be started" in r.getMessage()]
            assert len(warned) == 2, "once for each kind, not once for each save"
            patch.undo()
            saved_and_back(engine, 4)
            assert engine.memory().threads == 6, "they are started when the system lets them"


@pytest.mark.parametrize("prefix", ["ckpt-copy", "ckpt-write", "ckpt-commit"])
def test_not_one_thread_is_a_typed_error_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    before = threading.active_count()
    refuse_threads(monkeypatch, prefix)
    with pytest.raises(MemoryBudgetError, match=f"not one thread {prefix}"):
        CheckpointEngine(tmp_path, config())
    assert threading.active_count() == before
    assert not list(tmp_path.iterdir())


def test_work_that_a_crew_takes_is_done_even_if_no_more_threads_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock executor raises here and does the work later all the same: it would read tensors that have changed."""
    refuse_threads(monkeypatch, "crew_1")
    crew = Crew(4, "crew")
    assert crew.start(4) == 1
    busy, done = threading.Event(), []
    futures = [crew.submit(busy.wait, SOON)] + [crew.submit(done.append, n) for n in range(3)]
    busy.set()
    for future in futures:
        future.result(SOON)
    assert done == [0, 1, 2]
    crew.shutdown()


# Pins and maps --------------------------------------------------------------------------------------------------------


def test_every_map_is_unmapped_exactly_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B091: the engine pins nothing; what it maps goes back once, over changing shapes, budgets and a failure."""
    real_map, real_unmap = pool_module._map, pool_module._unmap
    live: set[int] = set()
    count: Counter[str] = Counter()

    def mapped(size: int, *, populate: bool) -> tuple[memoryview, int]:
        view, address = real_map(size, populate=populate)
        assert address not in live, "mapped twice"
        live.add(address)
        count["map"] += 1
        return view, address

    def unmapped(extent: Any) -> None:
        live.remove(extent.address)
        count["unmap"] += 1
        real_unmap(extent)

    monkeypatch.setattr(pool_module, "_map", mapped)
    monkeypatch.setattr(pool_module, "_unmap", unmapped)
    with CheckpointEngine(tmp_path, config(extent_bytes=MIB, staging_budget=8 * MIB)) as engine:
        for step in range(5):
            engine.save({"t": torch.ones((step + 1) * MIB)}, step).result(60)
            engine._workers.pool.resize((2 + step) * MIB)
        with monkeypatch.context() as patch:

            def refuse(*args: Any) -> int:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patch.setattr(os, "pwrite", refuse)
            assert engine.save({"t": torch.ones(MIB)}, 9).exception(60) is not None
    assert count["map"] == count["unmap"] > 8 and not live


def test_pickled_values_go_with_the_save_without_a_garbage_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B062: closures of the save referred to it, and each save left the bytes of its values behind."""
    placed: list[weakref.ref[BlobRun]] = []
    real = BlobRun.place.__func__  # type: ignore[attr-defined]

    def place(cls: type[BlobRun], *args: Any) -> BlobRun:
        run = real(cls, *args)
        placed.append(weakref.ref(run))
        return run  # type: ignore[no-any-return]

    monkeypatch.setattr(BlobRun, "place", classmethod(place))
    gc.collect()
    gc.disable()
    try:
        with CheckpointEngine(tmp_path, config()) as engine:
            for step in range(3):
                engine.save({"value": os.urandom(MIB), "t": torch.ones(3)}, step).result(60)
                engine.wait(60)
            with failing_writes(monkeypatch, lambda: OSError(errno.ENOSPC, "No space left on device")):
                assert engine.save({"value": os.urandom(MIB), "t": torch.ones(3)}, 9).exception(60) is not None
        assert len(placed) == 4
        assert [ref() for ref in placed if ref() is not None] == []
    finally:
        gc.enable()


# engine.memory() ------------------------------------------------------------------------------------------------------


def test_memory_is_explained_in_one_line(tmp_path: Path) -> None:
    with CheckpointEngine(tmp_path, config()) as engine:
        saved_and_back(engine, 1)
        report = engine.memory()
        assert report.requested == 64 * MIB and report.granted <= 64 * MIB
        assert 0 < report.peak_in_use <= 64 * MIB and report.in_use == 0 and report.mapped <= report.ceiling
        assert {"MemAvailable"} <= {limit.name for limit in report.limits}
        text = str(report)
        assert "\n" not in text and text == report.explain()
        for part in ("MemAvailable", "64.0 MiB granted by staging_budget", "ranks on this node: 1", "writers"):
            assert part in text
