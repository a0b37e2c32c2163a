"""Promises of the pressure gauge, and of a pool that follows it: never above the grant, never below the floor, back on relief."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.config import MIB
from ckpt_engine.staging import pressure
from ckpt_engine.staging.guard import BudgetDecision, Limit, node_identity
from ckpt_engine.staging.pool import Extent, ExtentPool
from ckpt_engine.staging.pressure import PressureGauge
from tests.pool_tools import SOON, Waiter, fill, rss, take
from tests.test_guard import GIB, Machine

pytestmark = pytest.mark.timeout(60)

FLOOR = 2 * MIB


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Simulated(PressureGauge):
    """A gauge over one made-up limit, whose room is what is left beside the pool."""

    def __init__(self, requested: int, room: int, clock: Clock) -> None:
        super().__init__(requested, proc="/nowhere", cgroup_root="/nowhere", environ={}, clock=clock)
        self.left = room
        self.asked = 0

    def weigh(self, *, mapped: int = 0, resident: int = 0) -> BudgetDecision:
        self.asked += 1
        share = self.left + resident
        limit = Limit("the limit", self.left, "made up")
        if int(share * 0.9) < self.requested:  # type: ignore[operator]
            return BudgetDecision(int(share * 0.9), self.requested, limit.name, (limit,), 1, share)
        return BudgetDecision(self.requested, self.requested, "staging_budget", (limit,), 1, share)  # type: ignore[arg-type]

    def ceiling(self, held: int) -> int:
        return self.look(mapped=held, resident=held, extent_bytes=MIB, floor=FLOOR)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def gauge_of(machine: Machine, clock: Clock, requested: Any = GIB) -> PressureGauge:
    return PressureGauge(requested, proc=str(machine.proc), cgroup_root=str(machine.cgroup), environ={}, clock=clock)


def look(gauge: PressureGauge, held: int = 0, extent: int = 16 * MIB) -> int:
    return gauge.look(mapped=held, resident=held, extent_bytes=extent, floor=2 * extent)


# The ceiling ----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    requested=st.integers(2, 4096),
    steps=st.lists(
        st.tuples(st.integers(0, 8192), st.integers(0, 4096), st.sampled_from([0.0, 0.05, 0.6, 5.0])), max_size=12
    ),
)
def test_never_above_the_grant_and_never_below_the_floor(requested: int, steps: list[tuple[int, int, float]]) -> None:
    clock = Clock()
    gauge = Simulated(requested * MIB, 4 * GIB, clock)
    for room, held, pause in steps:
        clock.now += pause
        gauge.left = room * MIB
        held = min(held, requested) * MIB
        ceiling = gauge.ceiling(held)
        assert FLOOR <= ceiling <= max(FLOOR, gauge.weigh(resident=held).granted)
        assert ceiling <= max(FLOOR, room * MIB + held - 2 * MIB), "the limit has less than two extents left"


@settings(max_examples=200, deadline=None)
@given(
    requested=st.integers(2, 4096),
    history=st.lists(st.tuples(st.integers(0, 8192), st.sampled_from([0.05, 2.0])), max_size=6),
    rooms=st.tuples(st.integers(0, 8192), st.integers(0, 8192)),
    held=st.integers(0, 4096),
)
def test_more_room_never_means_a_lower_ceiling(
    requested: int, history: list[tuple[int, float]], rooms: tuple[int, int], held: int
) -> None:
    found = []
    for room in sorted(rooms):
        clock = Clock()
        gauge = Simulated(requested * MIB, 4 * GIB, clock)
        for earlier, pause in history:
            clock.now += pause
            gauge.left = earlier * MIB
            gauge.ceiling(0)
        clock.now += 2.0
        gauge.left = room * MIB
        found.append(gauge.ceiling(held * MIB))
    assert found[0] <= found[1]


def test_a_limit_that_comes_near_lowers_it_at_once_and_lasting_relief_raises_it_to_the_grant(
    machine: Machine, clock: Clock
) -> None:
    machine.membership(v2="/job")

    def others_use(used: int, held: int) -> None:
        machine.group_v2("/job", maximum=4 * GIB, used=used + held)

    others_use(GIB, 0)
    gauge = gauge_of(machine, clock)
    assert look(gauge) == GIB
    others_use(3 * GIB + 512 * MIB, GIB // 2)
    assert look(gauge, GIB // 2) == int(GIB // 2 * 0.9)
    assert gauge.last is not None
    assert (gauge.last.state, gauge.last.reason) == ("shrink", "cgroup memory.max of /job")
    others_use(4 * GIB, 0)
    assert look(gauge, 0) == 32 * MIB, "the floor stays"
    others_use(GIB, 32 * MIB)
    assert look(gauge, 32 * MIB) == 32 * MIB and gauge.last.state == "hold", "a moment's relief is not believed"
    clock.now += pressure.RELIEF_SECONDS
    assert look(gauge, 32 * MIB) == GIB and gauge.last.state == "grow"


@pytest.mark.parametrize("where", ["group", "node"])
def test_stalled_tasks_lower_it_step_by_step_and_it_comes_back(machine: Machine, clock: Clock, where: str) -> None:
    machine.membership(v2="/job")
    machine.group_v2("/job", maximum=60 * GIB, used=GIB)
    file = machine.cgroup / "job/memory.pressure" if where == "group" else machine.proc / "pressure/memory"
    total = 0

    def stalls(part: float, seconds: float = 0.6) -> None:
        nonlocal total
        total += int(part * seconds * 1e6)
        clock.now += seconds
        machine.write(file, f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\nfull avg10=9.00 total=99\n")

    if where == "node":
        machine.meminfo(MemTotal=64 * GIB, MemAvailable=8 * GIB)
    stalls(0.0)
    gauge = gauge_of(machine, clock)
    assert look(gauge) == GIB
    seen = [GIB]
    for _ in range(20):
        stalls(0.3)
        seen.append(look(gauge))
    assert seen == sorted(seen, reverse=True) and seen[1] == GIB * 3 // 4 and seen[-1] == 32 * MIB
    assert gauge.last is not None and "30% of the time stalled" in gauge.last.reason
    assert ("cgroup /job" if where == "group" else "the node") in gauge.last.reason
    for _ in range(20):
        stalls(0.0)
        look(gauge)
    assert look(gauge) == GIB


def test_stalls_of_a_node_with_plenty_left_are_those_of_somebody_else(machine: Machine, clock: Clock) -> None:
    machine.write(machine.proc / "pressure/memory", "some avg10=80.00 avg60=0.00 avg300=0.00 total=1\n")
    assert look(gauge_of(machine, clock)) == GIB
    machine.meminfo(MemTotal=64 * GIB, MemAvailable=8 * GIB)
    assert look(gauge_of(machine, clock)) == GIB * 3 // 4


@pytest.mark.parametrize("text", [None, "", "some avg10=x total=\n", "\x00\xff"])
def test_a_kernel_without_pressure_files_is_no_problem(machine: Machine, clock: Clock, text: str | None) -> None:
    if text is not None:
        machine.write(machine.proc / "pressure/memory", text)
    gauge = gauge_of(machine, clock)
    for _ in range(3):
        clock.now += 1.0
        assert look(gauge) == GIB


def test_it_looks_a_few_times_a_second_at_most(clock: Clock) -> None:
    gauge = Simulated(64 * MIB, GIB, clock)
    pool = ExtentPool(MIB, 64 * MIB, gauge=gauge)
    for _ in range(1000):
        clock.now += 0.001
        pool.release(take(pool))
    assert 5 <= gauge.asked <= 12
    pool.close()


def test_a_slow_look_is_taken_seldom(clock: Clock) -> None:
    gauge = Simulated(64 * MIB, GIB, clock)
    weigh = gauge.weigh

    def slow(**held: int) -> BudgetDecision:
        clock.now += 0.050
        return weigh(**held)

    gauge.weigh = slow  # type: ignore[method-assign]
    gauge.ceiling(0)
    clock.now += 2.0
    assert not gauge.due()
    clock.now += 1.0
    assert gauge.due()


def test_log_lines_name_the_limit_and_are_few(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    gauge = Simulated(64 * MIB, GIB, clock)
    with caplog.at_level(logging.INFO, "ckpt_engine"):
        gauge.ceiling(0)
        for _ in range(50):
            clock.now += 0.1
            gauge.left = 8 * MIB
            gauge.ceiling(0)
        for _ in range(200):
            clock.now += 0.1
            gauge.left = GIB
            gauge.ceiling(0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert all("ruled by the limit" in r.getMessage() or "up from" in r.getMessage() for r in caplog.records)
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_memory_that_is_mapped_but_not_touched_is_not_added_twice(machine: Machine, clock: Clock) -> None:
    """It is in nobody's "used" yet: added to what is left it would hide that a neighbour has taken that much."""
    machine.meminfo(MemTotal=64 * GIB, MemAvailable=GIB // 2)
    gauge = gauge_of(machine, clock)
    ceiling = gauge.look(mapped=GIB, resident=0, extent_bytes=16 * MIB, floor=32 * MIB)
    assert ceiling == int(GIB // 2 * 0.9)


# The pool -------------------------------------------------------------------------------------------------------------


class Told:
    """A gauge that says what it was told, at every question."""

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling

    def due(self) -> bool:
        return True

    def look(self, *, mapped: int, resident: int, extent_bytes: int, floor: int) -> int:
        return max(self.ceiling, floor)


@pytest.fixture
def told() -> Told:
    return Told(8 * MIB)


@pytest.fixture
def pool(told: Told) -> Iterator[ExtentPool]:
    made = ExtentPool(MIB, 8 * MIB, gauge=told)
    yield made
    made.close()


def test_under_pressure_idle_extents_go_at_once_and_used_ones_when_they_come_back(pool: ExtentPool, told: Told) -> None:
    before = rss()
    extents = [take(pool) for _ in range(8)]
    for extent in extents:
        fill(extent)
    for extent in extents[:4]:
        pool.release(extent)
    told.ceiling = 0
    pool.release(extents[4])
    assert pool.stats().mapped == 3 * MIB, "all idle ones are gone; what is in use stays"
    assert extents[7].view[0] == 0x5A
    for extent in extents[5:]:
        pool.release(extent)
    assert pool.stats().mapped == 2 * MIB, "two stay, so that the next save can begin"
    assert rss() - before < 5 * MIB


def test_staging_goes_on_with_two_extents(pool: ExtentPool, told: Told) -> None:
    told.ceiling = 0
    held: list[Extent] = []
    for _ in range(50):
        held.append(take(pool))
        if len(held) == 2:
            pool.release(held.pop(0))
    assert pool.stats().peak_in_use == 2 * MIB


def test_relief_lets_a_waiter_through(pool: ExtentPool, told: Told) -> None:
    told.ceiling = 0
    held = [take(pool), take(pool)]
    waiter = Waiter(pool, timeout=SOON)
    assert waiter.is_stuck_for(0.05)
    told.ceiling = 8 * MIB
    pool.look()
    assert waiter.finish() is not None
    assert len(held) == 2 and pool.stats().mapped == 3 * MIB


def test_between_saves_idle_extents_go_as_soon_as_somebody_asks(pool: ExtentPool, told: Told) -> None:
    for extent in [take(pool) for _ in range(8)]:
        pool.release(extent)
    assert pool.stats().mapped == 8 * MIB
    told.ceiling = 0
    pool.look()
    assert pool.stats().mapped == 2 * MIB


def test_what_is_touched_is_known(pool: ExtentPool) -> None:
    pool.reserve(3)
    assert (pool.stats().mapped, pool.stats().resident) == (3 * MIB, 0)
    pool.release(take(pool))
    assert (pool.stats().mapped, pool.stats().resident) == (3 * MIB, MIB)


# Promised memory ------------------------------------------------------------------------------------------------------


def test_stacks_of_threads_to_come_count_where_address_space_is_promised(machine: Machine, clock: Clock) -> None:
    """vm.overcommit_memory=2 refuses what is promised, touched or not: stacks and mapped extents count."""
    machine.write(machine.proc / "sys/vm/overcommit_memory", "2\n")
    machine.meminfo(MemTotal=64 * GIB, MemAvailable=48 * GIB, CommitLimit=32 * GIB, Committed_AS=31 * GIB)
    gauge = gauge_of(machine, clock, requested=2 * GIB)
    plain = gauge.weigh().granted
    gauge.stacks = 256 * MIB
    assert plain == int(GIB * 0.9) and gauge.weigh().granted == int(768 * MIB * 0.9)
    machine.meminfo(MemTotal=64 * GIB, MemAvailable=48 * GIB, CommitLimit=32 * GIB, Committed_AS=31 * GIB + GIB // 2)
    assert gauge.weigh(mapped=GIB // 2, resident=0).granted == int(768 * MIB * 0.9), "what is mapped is in it already"
    assert gauge.weigh(mapped=GIB // 2, resident=0).limits[0].name == "vm.overcommit_memory=2"


def test_the_identity_of_a_node_is_its_name_and_its_boot(machine: Machine) -> None:
    boot = machine.proc / "sys/kernel/random/boot_id"
    found = {node_identity(str(machine.proc))}
    for text in ("11-22\n", "33-44\n"):
        machine.write(boot, text)
        found.add(node_identity(str(machine.proc)))
        assert node_identity(str(machine.proc)) in found
    assert len(found) == 3
