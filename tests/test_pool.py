"""Promises of the staging pool: never above the budget, waits instead of growing, lives with a system that refuses."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.config import MIB, MIN_BUDGET_BYTES, MIN_EXTENT_BYTES
from ckpt_engine.errors import ConfigError, EngineClosedError, MemoryBudgetError
from ckpt_engine.staging import pool as pool_module
from ckpt_engine.staging.pool import ExtentPool, choose_geometry
from tests.pool_tools import SOON, Refusing, Waiter, map_at, rss, take

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pool() -> Iterator[ExtentPool]:
    made = ExtentPool(MIB, 3 * MIB)
    yield made
    made.close()


@pytest.fixture(params=["OSError", "MemoryError"])
def no_memory(request: pytest.FixtureRequest) -> Callable[[], BaseException]:
    if request.param == "MemoryError":
        return MemoryError
    return lambda: OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


# Geometry -------------------------------------------------------------------------------------------------------------


@given(
    budget=st.integers(MIN_BUDGET_BYTES, 1 << 40),
    extent_bytes=st.integers(MIN_EXTENT_BYTES // 4096, 1 << 16).map(lambda pages: pages * 4096),
    writers=st.integers(1, 256),
)
def test_geometry_gives_every_writer_two_extents_within_the_budget(
    budget: int, extent_bytes: int, writers: int
) -> None:
    geometry = choose_geometry(budget, extent_bytes, writers)
    assert geometry.extents * geometry.extent_bytes <= budget < (geometry.extents + 1) * geometry.extent_bytes
    assert geometry.extents >= 2 * geometry.writers
    assert 1 <= geometry.writers <= writers
    assert MIN_EXTENT_BYTES <= geometry.extent_bytes <= extent_bytes
    if geometry.extent_bytes != extent_bytes:
        mebibytes, rest = divmod(geometry.extent_bytes, MIB)
        assert rest == 0 and mebibytes & (mebibytes - 1) == 0
        bigger = min(2 * geometry.extent_bytes, extent_bytes)
        assert bigger * 2 * geometry.writers > budget or bigger == extent_bytes, "a larger extent would have fitted"
    if extent_bytes * 2 * writers <= budget:
        assert (geometry.extent_bytes, geometry.writers) == (extent_bytes, writers)
    if geometry.writers < writers:
        assert MIN_EXTENT_BYTES * 2 * (geometry.writers + 1) > budget, "a writer was given up without need"


@pytest.mark.parametrize(
    "budget, extent, writers, expected",
    [
        (64 * MIB, 16 * MIB, 2, (16 * MIB, 4, 2)),
        (63 * MIB, 16 * MIB, 2, (8 * MIB, 7, 2)),
        (100 * MIB, 24 * MIB, 2, (24 * MIB, 4, 2)),
        (7 * MIB, 16 * MIB, 4, (1 * MIB, 7, 3)),
        (2 * MIB, 16 * MIB, 8, (1 * MIB, 2, 1)),
    ],
)
def test_geometry_examples(budget: int, extent: int, writers: int, expected: tuple[int, int, int]) -> None:
    geometry = choose_geometry(budget, extent, writers)
    assert (geometry.extent_bytes, geometry.extents, geometry.writers) == expected


def test_geometry_below_the_floor_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match=str(MIN_BUDGET_BYTES - 1)):
        choose_geometry(MIN_BUDGET_BYTES - 1, 16 * MIB, 1)
    for extent_bytes, writers in ((MIB - 4096, 1), (MIB + 1, 1), (MIB, 0)):
        with pytest.raises(ConfigError):
            choose_geometry(64 * MIB, extent_bytes, writers)


# Extents --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("populate", [False, True])
def test_extents_are_page_aligned_and_writable(populate: bool) -> None:
    pool = ExtentPool(MIB + 4096, 3 * (MIB + 4096), populate=populate)
    extents = [take(pool) for _ in range(3)]
    for extent in extents:
        assert extent.address % mmap.PAGESIZE == 0
        assert (extent.nbytes, extent.view.nbytes, extent.view.readonly) == (MIB + 4096, MIB + 4096, False)
        extent.view[:3] = b"abc"
        extent.view[-1:] = bytes([extent.index])
        assert ctypes.string_at(extent.address, 3) == b"abc", "the address is that of another place"
    assert len({extent.address for extent in extents}) == len({extent.index for extent in extents}) == 3
    assert [extent.view[-1] for extent in extents] == [extent.index for extent in extents]
    for extent in extents:
        pool.release(extent)
    pool.close()


def test_extents_stay_out_of_forked_children_and_core_dumps(pool: ExtentPool) -> None:
    fields = map_at(take(pool).address)
    assert fields is not None
    flags = fields["VmFlags"].split()
    assert "dc" in flags, "MADV_DONTFORK isn't set"
    assert "dd" in flags, "MADV_DONTDUMP isn't set"
    assert "sh" not in flags, "the map is shared"


def test_populating_makes_every_page_resident_at_once() -> None:
    before = rss()
    pool = ExtentPool(8 * MIB, 64 * MIB, populate=True)
    assert rss() - before > 60 * MIB
    assert pool.stats().mapped == 64 * MIB
    pool.close()


def test_populating_works_on_kernels_without_the_call_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_kernel(address: int, size: int, advice: int) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(pool_module, "_madvise", old_kernel)
    before = rss()
    pool = ExtentPool(8 * MIB, 32 * MIB, populate=True)
    assert rss() - before > 28 * MIB
    pool.close()


def test_without_populating_nothing_is_mapped_before_it_is_needed(pool: ExtentPool) -> None:
    assert pool.stats().mapped == 0
    take(pool)
    assert pool.stats().mapped == MIB


# Budget and waiting ---------------------------------------------------------------------------------------------------


def test_the_budget_is_never_exceeded_and_acquire_waits(pool: ExtentPool) -> None:
    """B010: staging went on whatever the host had left; here it waits."""
    extents = [take(pool) for _ in range(3)]
    waiter = Waiter(pool, timeout=SOON)
    assert waiter.is_stuck_for(0.1)
    assert pool.stats().mapped == 3 * MIB
    pool.release(extents[1])
    assert waiter.finish() is extents[1]
    stats = pool.stats()
    assert (stats.mapped, stats.in_use, stats.peak_in_use, stats.extents_mapped) == (3 * MIB, 3 * MIB, 3 * MIB, 3)
    assert stats.waits == 1 and 0.05 < stats.wait_seconds < SOON


def test_a_budget_that_is_no_multiple_of_the_extent_is_rounded_down() -> None:
    pool = ExtentPool(MIB, 3 * MIB - 1)
    extents = [take(pool), take(pool)]
    with pytest.raises(TimeoutError):
        pool.acquire(timeout=0.01)
    assert len(extents) == 2
    pool.close()


def test_an_expired_wait_says_what_is_in_use(pool: ExtentPool) -> None:
    for _ in range(3):
        take(pool)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="3 in use"):
        pool.acquire(timeout=0.05)
    assert 0.05 <= time.monotonic() - start < SOON


def test_an_idle_extent_is_taken_even_with_no_time_left(pool: ExtentPool) -> None:
    pool.release(take(pool))
    assert pool.acquire(timeout=0) is not None


def test_wake_makes_a_waiter_notice_that_it_is_cancelled(pool: ExtentPool) -> None:
    extents = [take(pool) for _ in range(3)]
    stop = threading.Event()
    waiter = Waiter(pool, cancelled=stop.is_set)
    pool.wake()
    assert waiter.is_stuck_for(0.05), "woken without being cancelled it goes on waiting"
    stop.set()
    pool.wake()
    assert waiter.finish() is None
    pool.release(extents[0])
    assert pool.acquire(cancelled=stop.is_set) is None, "cancelled comes before a free extent"


def test_a_wake_between_the_question_and_the_wait_is_not_missed(pool: ExtentPool) -> None:
    for _ in range(3):
        take(pool)
    answers = iter([False, True])

    def cancelled() -> bool:
        answer = next(answers)
        pool.wake()  # as another thread would that sets the flag just after it was read
        return answer

    start = time.monotonic()
    assert pool.acquire(timeout=SOON, cancelled=cancelled) is None
    assert time.monotonic() - start < SOON / 2, "the wake was missed, and only the deadline ended the wait"


def test_cancelled_is_asked_without_holding_a_lock_of_the_pool(pool: ExtentPool) -> None:
    def cancelled() -> bool:
        other = threading.Thread(target=pool.stats, daemon=True)
        other.start()
        other.join(SOON)
        return other.is_alive()

    assert pool.acquire(timeout=SOON, cancelled=cancelled) is not None


def test_releasing_twice_or_to_another_pool_is_an_error(pool: ExtentPool) -> None:
    other = ExtentPool(MIB, MIB)
    extent, foreign = take(pool), take(other)
    with pytest.raises(ValueError, match="another pool"):
        pool.release(foreign)
    pool.release(extent)
    with pytest.raises(ValueError, match="twice"):
        pool.release(extent)
    assert pool.stats().in_use == 0
    assert take(pool) is extent and take(pool) is not extent
    other.close()


def test_no_extent_is_ever_with_two_owners_and_the_budget_holds_under_load() -> None:
    pool = ExtentPool(MIB, 3 * MIB)
    failures: list[str] = []
    stop = threading.Event()

    def user(mark: int) -> None:
        for _ in range(150):
            extent = pool.acquire(timeout=SOON)
            if extent is None:
                failures.append("None without cancelled")
                return
            extent.view[0] = mark
            extent.view[-1] = mark
            if mark % 2:
                time.sleep(0)
            if (extent.view[0], extent.view[-1]) != (mark, mark):
                failures.append("two owners")
            pool.release(extent)

    def meddler() -> None:
        while not stop.is_set():
            for budget in (MIB, 3 * MIB, 2 * MIB):
                pool.resize(budget)
                pool.trim()
                if pool.stats().mapped > 3 * MIB:
                    failures.append("above the budget")
                time.sleep(0.001)

    users = [threading.Thread(target=user, args=(mark,), daemon=True) for mark in range(1, 6)]
    other = threading.Thread(target=meddler, daemon=True)
    for thread in (*users, other):
        thread.start()
    for thread in users:
        thread.join(SOON)
        assert not thread.is_alive(), "a user of the pool hangs"
    stop.set()
    other.join(SOON)
    assert not failures
    assert pool.stats().in_use == 0
    pool.close()
    assert pool.stats().mapped == 0


# Refusals of the system -----------------------------------------------------------------------------------------------


def test_a_refused_map_is_no_failure_while_there_are_others(
    monkeypatch: pytest.MonkeyPatch, pool: ExtentPool, no_memory: Callable[[], BaseException]
) -> None:
    monkeypatch.setattr(mmap, "mmap", Refusing(2, no_memory))
    first, second = take(pool), take(pool)
    waiter = Waiter(pool, timeout=SOON)
    assert waiter.is_stuck_for(0.05)
    pool.release(second)
    assert waiter.finish() is second
    stats = pool.stats()
    assert stats.mapped == 2 * MIB and stats.refused >= 1
    pool.release(first)


def test_a_refused_first_map_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, pool: ExtentPool, no_memory: Callable[[], BaseException]
) -> None:
    monkeypatch.setattr(mmap, "mmap", Refusing(0, no_memory))
    with pytest.raises(MemoryBudgetError) as caught:
        pool.acquire(timeout=SOON)
    assert (caught.value.errno, caught.value.phase) == (errno.ENOMEM, "stage")
    assert caught.value.hint
    with pytest.raises(MemoryBudgetError):
        ExtentPool(MIB, 3 * MIB, populate=True)
    monkeypatch.undo()
    assert take(pool), "the pool works again once the system has memory"


def test_populating_goes_on_with_what_it_got(
    monkeypatch: pytest.MonkeyPatch, no_memory: Callable[[], BaseException]
) -> None:
    monkeypatch.setattr(mmap, "mmap", Refusing(2, no_memory))
    pool = ExtentPool(MIB, 8 * MIB, populate=True)
    assert pool.stats().mapped == 2 * MIB
    pool.close()


def test_waiters_do_not_spin_while_the_system_refuses(monkeypatch: pytest.MonkeyPatch, pool: ExtentPool) -> None:
    refusing = Refusing(1, MemoryError)
    monkeypatch.setattr(mmap, "mmap", refusing)
    held = take(pool)
    waiters = [Waiter(pool, timeout=SOON) for _ in range(3)]
    assert all(waiter.is_stuck_for(0.1) for waiter in waiters)
    assert refusing.calls <= 10
    for _ in waiters:
        pool.release(held)
        deadline = time.monotonic() + SOON
        while pool.stats().in_use == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert [waiter.finish() for waiter in waiters] == [held] * 3


def test_closing_ends_every_wait(monkeypatch: pytest.MonkeyPatch, pool: ExtentPool) -> None:
    monkeypatch.setattr(mmap, "mmap", Refusing(1, MemoryError))
    held = take(pool)
    waiters = [Waiter(pool, timeout=SOON) for _ in range(3)]
    assert all(waiter.is_stuck_for(0.02) for waiter in waiters)
    pool.close()
    pool.release(held)
    for waiter in waiters:
        with pytest.raises(EngineClosedError):
            waiter.finish()


def test_a_real_address_space_limit_makes_the_pool_smaller() -> None:
    pool = ExtentPool(32 * MIB, 256 * MIB)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    extents = []
    resource.setrlimit(resource.RLIMIT_AS, (used + 100 * MIB, hard))
    try:
        while True:
            extents.append(pool.acquire(timeout=0.01))
    except TimeoutError:
        pass
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert 1 <= len(extents) <= 3
    assert pool.stats().refused >= 1
    pool.close()


def test_an_unexpected_failure_of_a_map_gives_its_place_back(monkeypatch: pytest.MonkeyPatch, pool: ExtentPool) -> None:
    monkeypatch.setattr(mmap, "mmap", Refusing(0, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pool.acquire(timeout=SOON)
    monkeypatch.undo()
    assert len([take(pool) for _ in range(3)]) == 3
