"""Promises of the staging pool about memory: it really goes back to the system, and nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.config import MIB
from ckpt_engine.errors import ConfigError, EngineClosedError, MemoryBudgetError
from ckpt_engine.staging.pool import ExtentPool
from tests.pool_tools import SOON, Refusing, Waiter, fill, map_at, rss, take

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pool() -> Iterator[ExtentPool]:
    made = ExtentPool(MIB, 3 * MIB)
    yield made
    made.close()


@pytest.mark.parametrize("how", ["trim", "close", "drop"])
def test_memory_really_goes_back_to_the_system(how: str) -> None:
    """B020: buffers stayed with the C library after they were freed, gigabytes at each save."""
    before = rss()
    pool = ExtentPool(8 * MIB, 96 * MIB)
    extents = [take(pool) for _ in range(12)]
    for extent in extents:
        fill(extent)
    assert rss() - before > 90 * MIB
    for extent in extents:
        pool.release(extent)
    del extent, extents
    if how == "trim":
        assert pool.trim() == 96 * MIB
        assert pool.stats().mapped == 0
    elif how == "close":
        pool.close()
    else:
        del pool
    assert rss() - before < 8 * MIB


def test_the_pool_can_be_used_again_after_a_trim(pool: ExtentPool) -> None:
    held = take(pool)
    fill(held)
    pool.release(take(pool))
    assert pool.trim() == MIB
    assert held.view[0] == 0x5A, "an extent in use was touched"
    assert len([take(pool), take(pool)]) == 2


def test_shrinking_unmaps_idle_extents_now_and_used_ones_when_they_come_back(pool: ExtentPool) -> None:
    first, second, third = (take(pool) for _ in range(3))
    pool.release(first)
    pool.resize(MIB)
    assert pool.stats().mapped == 2 * MIB
    pool.release(second)
    assert pool.stats().mapped == MIB
    with pytest.raises(ValueError):
        second.view[0] = 1  # released memory raises; it must not be written by mistake
    pool.release(third)
    assert (pool.stats().mapped, pool.stats().budget) == (MIB, MIB)
    assert take(pool) is third


def test_growing_lets_a_waiter_through(pool: ExtentPool) -> None:
    for _ in range(3):
        take(pool)
    waiter = Waiter(pool, timeout=SOON)
    assert waiter.is_stuck_for(0.02)
    pool.resize(4 * MIB)
    assert waiter.finish() is not None
    assert pool.stats().mapped == 4 * MIB


def test_a_budget_below_one_extent_is_refused_and_changes_nothing(pool: ExtentPool) -> None:
    with pytest.raises(MemoryBudgetError):
        pool.resize(MIB - 1)
    assert pool.stats().budget == 3 * MIB
    with pytest.raises(MemoryBudgetError):
        ExtentPool(MIB, MIB - 1)
    with pytest.raises(ConfigError):
        ExtentPool(MIB + 1, 3 * MIB)


def test_close_is_idempotent_waits_for_nothing_and_takes_late_releases(pool: ExtentPool) -> None:
    held = take(pool)
    pool.release(take(pool))
    for _ in range(2):
        pool.close()
    assert pool.stats().mapped == MIB
    held.view[0] = 7  # a writer may still be at it
    with pytest.raises(EngineClosedError):
        pool.acquire(timeout=SOON)
    pool.release(held)
    assert pool.stats().mapped == 0


def test_a_hundred_pools_leave_no_map_behind() -> None:
    """B037: each save left its staging buffers behind."""

    def cycle() -> None:
        pool = ExtentPool(MIB, 4 * MIB)
        extents = [take(pool) for _ in range(4)]
        for extent in extents:
            extent.view[0] = 1
            pool.release(extent)
        pool.close()

    def maps() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    for _ in range(5):
        cycle()
    before, before_rss = maps(), rss()
    for _ in range(100):
        cycle()
    assert maps() <= before + 2
    assert rss() - before_rss < 4 * MIB


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_lives_on_without_the_garbage_collector(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """B062: trainers switch the collector off, and staged buffers in reference cycles stayed."""
    gc.collect()
    gc.disable()
    try:
        pool = ExtentPool(MIB, 4 * MIB)
        extents = [take(pool) for _ in range(3)]
        if fails:
            monkeypatch.setattr(mmap, "mmap", Refusing(0, MemoryError))
            raised = False
            try:  # pytest.raises() itself makes a cycle with the traceback
                pool.acquire(timeout=0.01)
            except TimeoutError:
                raised = True
            assert raised
            monkeypatch.undo()
        alive: list[weakref.ref[Any]] = [weakref.ref(extent.view) for extent in extents]
        alive += [weakref.ref(extent.view.obj) for extent in extents] + [weakref.ref(pool)]
        for extent in extents:
            pool.release(extent)
        pool.close()
        del extents, extent, pool
        assert not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()


def test_memory_goes_back_although_a_tensor_still_looks_at_it() -> None:
    """B062: a tensor in the frames of a kept traceback must neither keep the pages nor lose its addresses."""
    pool = ExtentPool(32 * MIB, 32 * MIB)
    extent = take(pool)
    address = extent.address
    tensor = torch.frombuffer(extent.view, dtype=torch.uint8)
    before = rss()
    tensor.fill_(3)
    assert rss() - before > 28 * MIB
    pool.release(extent)
    pool.close()
    assert rss() - before < 8 * MIB
    assert int(tensor.sum()) == 0, "reading it is harmless"
    del tensor, extent
    fields = map_at(address)
    assert fields is None or "dc" not in fields["VmFlags"].split(), "the map outlived its last user"


def test_a_forked_child_leaves_the_addresses_of_the_pool_alone() -> None:
    """Somebody else's fork: the child's own memory may lie where extents were, and closing must not unmap it."""
    pool = ExtentPool(MIB, 2 * MIB)
    held, idle = take(pool), take(pool)
    pool.release(idle)
    addresses = [held.address, idle.address]
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fixed = 0x10 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            absent = all(map_at(address) is None for address in addresses)
            for address in addresses:
                libc.mmap(address, MIB, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0)
                ctypes.memset(address, 0x77, MIB)
            pool.close()
            del pool, held, idle
            gc.collect()
            intact = all(ctypes.string_at(address + MIB - 4, 4) == b"wwww" for address in addresses)
            status = 0 if absent and intact else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + SOON
    while (result := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(result[1]) == 0
    fill(held)  # and the parent's pool works on
    pool.release(held)
    assert take(pool) is held
    pool.close()
