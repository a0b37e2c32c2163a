"""Promises of the memory guard: every limit that can hurt is seen, cache that the kernel can drop isn't counted, and
the answer names what decided."""

from __future__ import annotations

import logging
import resource
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.config import MIB, MIN_BUDGET_BYTES
from ckpt_engine.errors import MemoryBudgetError
from ckpt_engine.staging import guard
from ckpt_engine.staging.guard import BudgetDecision, decide_budget, local_rank_count

pytestmark = pytest.mark.timeout(60)

GIB = 1 << 30
V1_NONE = 9223372036854771712  # what v1 shows where there is no limit


class Machine:
    """A made-up /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.cgroup.mkdir(parents=True)
        self.membership()
        self.meminfo(MemTotal=64 * GIB, MemAvailable=48 * GIB, CommitLimit=32 * GIB, Committed_AS=8 * GIB)
        self.write(self.proc / "sys/vm/overcommit_memory", "0\n")
        self.write(
            self.proc / "self/status", f"Name:\ttrainer\nVmSize:\t{3 * GIB // 1024} kB\nVmData:\t{GIB // 1024} kB\n"
        )

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def membership(self, v2: str = "/", v1: str | None = None) -> None:
        lines = [f"4:memory:{v1}", "3:cpu,cpuacct:/"] if v1 is not None else []
        self.write(self.proc / "self/cgroup", "\n".join([*lines, f"0::{v2}", ""]))

    def meminfo(self, **fields: int) -> None:
        lines = [f"{name}:{value // 1024:>15} kB" for name, value in fields.items()]
        self.write(self.proc / "meminfo", "\n".join([*lines, "HugePages_Total:       0", ""]))

    def group_v2(
        self, path: str, *, maximum: int | None, high: int | None = None, used: int, inactive: int = 0, active: int = 0
    ) -> None:
        group = self.cgroup / path.strip("/")
        for name, bound in (("memory.max", maximum), ("memory.high", high)):
            self.write(group / name, "max\n" if bound is None else f"{bound}\n")
        self.write(group / "memory.current", f"{used}\n")
        self.write(group / "memory.stat", f"anon {used}\ninactive_file {inactive}\nactive_file {active}\n")

    def group_v1(self, path: str, *, limit: int, used: int, inactive: int = 0, active: int = 0) -> None:
        group = self.cgroup / "memory" / path.strip("/")
        self.write(group / "memory.limit_in_bytes", f"{limit}\n")
        self.write(group / "memory.usage_in_bytes", f"{used}\n")
        own = "inactive_file 1\nactive_file 1\n"  # of the group alone, without those below it: must not be taken
        self.write(group / "memory.stat", f"{own}total_inactive_file {inactive}\ntotal_active_file {active}\n")

    def decide(
        self,
        requested: int | str = "auto",
        *,
        local_ranks: int = 1,
        already_held: int = 0,
        environ: Mapping[str, str] | None = None,
    ) -> BudgetDecision:
        return decide_budget(
            requested,  # type: ignore[arg-type]
            local_ranks=local_ranks,
            already_held=already_held,
            proc=str(self.proc),
            cgroup_root=str(self.cgroup),
            environ=environ or {},
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def room(decision: BudgetDecision, name: str) -> int:
    return next(limit.room for limit in decision.limits if limit.name == name)


def test_auto_is_half_of_what_is_left_shared_between_the_ranks(machine: Machine) -> None:
    decision = machine.decide(local_ranks=8)
    assert decision.granted == 48 * GIB // 2 // 8
    assert decision.ruled_by == "MemAvailable"


def test_auto_is_capped_per_rank(machine: Machine) -> None:
    decision = machine.decide()
    assert decision.granted == guard.AUTO_CAP_BYTES
    assert "cap" in decision.ruled_by


def test_a_number_that_fits_is_granted_as_it_is(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    decision = machine.decide(3 * GIB + 4096, local_ranks=8)
    assert (decision.granted, decision.ruled_by) == (3 * GIB + 4096, "staging_budget")
    assert not caplog.records


def test_a_number_that_does_not_fit_is_cut_with_a_warning_naming_the_limit(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """B010: the whole shard was staged whatever the node had left."""
    machine.membership(v2="/job")
    machine.group_v2("/job", maximum=10 * GIB, used=2 * GIB)
    with caplog.at_level(logging.WARNING, "ckpt_engine"):
        decision = machine.decide(100 * GIB, local_ranks=2)
    assert decision.granted == int(4 * GIB * 0.9)
    assert decision.ruled_by == "cgroup memory.max of /job"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cgroup memory.max of /job" in caplog.text and str(100 * GIB) in caplog.text


def test_looking_again_is_not_worth_another_warning(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ckpt_engine"):
        assert machine.decide(100 * GIB, already_held=GIB).granted < 100 * GIB
    assert not caplog.records


@pytest.mark.parametrize("which", ["memory.max", "memory.high"])
def test_v2_limits_rule(machine: Machine, which: str) -> None:
    machine.membership(v2="/kubepods/pod1/box")
    bounds = {"memory.max": (6 * GIB, None), "memory.high": (50 * GIB, 6 * GIB)}[which]
    machine.group_v2("/kubepods/pod1/box", maximum=bounds[0], high=bounds[1], used=2 * GIB)
    decision = machine.decide()
    assert (decision.granted, decision.ruled_by) == (2 * GIB, f"cgroup {which} of /kubepods/pod1/box")


def test_v1_limit_rules(machine: Machine) -> None:
    machine.membership(v1="/docker/box")
    machine.group_v1("/docker/box", limit=6 * GIB, used=3 * GIB, inactive=GIB)
    decision = machine.decide()
    assert (decision.granted, decision.ruled_by) == (2 * GIB, "cgroup memory.limit_in_bytes of /docker/box")


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_limit_further_up_is_seen(machine: Machine, version: str) -> None:
    if version == "v2":
        machine.membership(v2="/pod/box/job")
        machine.group_v2("/pod/box/job", maximum=None, used=GIB)
        machine.group_v2("/pod/box", maximum=20 * GIB, used=2 * GIB)
        machine.group_v2("/pod", maximum=9 * GIB, used=5 * GIB)
        machine.group_v2("/other", maximum=MIB, used=MIB)
    else:
        machine.membership(v1="/pod/box/job")
        machine.group_v1("/", limit=V1_NONE, used=30 * GIB)
        machine.group_v1("/pod/box/job", limit=V1_NONE, used=GIB)
        machine.group_v1("/pod/box", limit=20 * GIB, used=2 * GIB)
        machine.group_v1("/pod", limit=9 * GIB, used=5 * GIB)
        machine.group_v1("/other", limit=MIB, used=MIB)
    decision = machine.decide()
    assert decision.granted == 2 * GIB
    assert decision.ruled_by.endswith(" of /pod")
    assert len([limit for limit in decision.limits if limit.name.startswith("cgroup")]) == 2


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_cache_that_the_kernel_can_drop_is_not_counted_as_used(machine: Machine, version: str) -> None:
    """B083: a group full of file pages looked full, and the job was stopped at save time."""
    figures = {"used": 8 * GIB, "inactive": 5 * GIB, "active": 2 * GIB}
    if version == "v2":
        machine.membership(v2="/job")
        machine.group_v2("/job", maximum=8 * GIB, **figures)
        name = "cgroup memory.max of /job"
    else:
        machine.membership(v1="/job")
        machine.group_v1("/job", limit=8 * GIB, **figures)
        name = "cgroup memory.limit_in_bytes of /job"
    assert room(machine.decide(), name) == 7 * GIB


def test_cache_figures_beyond_the_usage_do_not_add_room(machine: Machine) -> None:
    machine.membership(v2="/job")  # the files are read one after the other: the figures may not fit together
    machine.group_v2("/job", maximum=4 * GIB, used=GIB, inactive=3 * GIB)
    assert room(machine.decide(), "cgroup memory.max of /job") == 4 * GIB


@pytest.mark.parametrize("path", ["/docker/0123/job", "/../../elsewhere", "/gone (deleted)"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_container_that_sees_its_group_as_the_root_finds_its_limit(machine: Machine, version: str, path: str) -> None:
    machine.membership(**{version: path})
    if version == "v2":
        machine.group_v2("/", maximum=6 * GIB, used=2 * GIB)
        machine.group_v2("/job", maximum=5 * GIB, used=2 * GIB)
    else:
        machine.group_v1("/", limit=6 * GIB, used=2 * GIB)
        machine.group_v1("/job", limit=5 * GIB, used=2 * GIB)
    inside = path.endswith("/job")
    decision = machine.decide()
    assert decision.ruled_by.endswith(" of /job" if inside else " of /")
    assert decision.granted == (1536 * MIB if inside else 2 * GIB)


def test_a_hybrid_machine_takes_both_versions(machine: Machine) -> None:
    machine.membership(v2="/a", v1="/b")
    machine.group_v2("/unified/a", maximum=20 * GIB, used=0)
    machine.group_v1("/b", limit=10 * GIB, used=0)
    names = {limit.name for limit in machine.decide().limits}
    assert {"cgroup memory.max of /a", "cgroup memory.limit_in_bytes of /b"} <= names


def test_strict_overcommit_rules(machine: Machine) -> None:
    assert all("overcommit" not in limit.name for limit in machine.decide().limits)
    machine.write(machine.proc / "sys/vm/overcommit_memory", "2\n")
    decision = machine.decide(local_ranks=4)
    assert (decision.granted, decision.ruled_by) == (24 * GIB // 2 // 4, "vm.overcommit_memory=2")


@pytest.mark.parametrize("name, used", [("RLIMIT_AS", 3 * GIB), ("RLIMIT_DATA", GIB)])
def test_process_limits_rule_and_are_not_shared_between_ranks(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, used: int
) -> None:
    real, which = resource.getrlimit, getattr(resource, name)
    monkeypatch.setattr(resource, "getrlimit", lambda r: (used + 2 * GIB, -1) if r == which else real(r))
    decision = machine.decide(local_ranks=4)
    assert (decision.granted, decision.ruled_by) == (GIB, name)


RAY_WORKER = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "4711"}


def test_ray_threshold_rules_in_a_ray_worker_only(machine: Machine) -> None:
    """B083: Ray kills workers at 95 % of the node, long before the kernel would."""
    machine.meminfo(MemTotal=100 * GIB, MemAvailable=10 * GIB)
    assert machine.decide().ruled_by == "MemAvailable"
    decision = machine.decide(environ=RAY_WORKER)
    assert decision.ruled_by == "Ray's memory threshold for the node"
    assert room(decision, decision.ruled_by) == pytest.approx(3 * GIB, abs=MIB)  # 95 GiB - 2 GiB of margin - 90 GiB


def test_ray_threshold_of_the_container_leaves_file_cache_out_as_ray_does(machine: Machine) -> None:
    """B083: since Ray 2.10 neither list of file pages counts as used."""
    machine.membership(v1="/job")
    machine.group_v1("/job", limit=20 * GIB, used=16 * GIB, inactive=6 * GIB, active=6 * GIB)
    decision = machine.decide(environ=RAY_WORKER)
    assert decision.ruled_by == "Ray's memory threshold for cgroup /job"
    assert room(decision, decision.ruled_by) == pytest.approx((19 - 0.4 - 4) * GIB, abs=MIB)


def test_the_settings_of_the_raylet_count_not_those_of_a_runtime_env(machine: Machine) -> None:
    """A worker that says 0.99, or that the monitor is off, is killed at the raylet's 0.6 all the same."""
    machine.meminfo(MemTotal=100 * GIB, MemAvailable=50 * GIB)
    raylet = machine.proc / "4711"
    raylet.mkdir()
    (raylet / "environ").write_bytes(b"PATH=/bin\0RAY_memory_usage_threshold=0.6\0EMPTY\0")
    worker = RAY_WORKER | {
        "RAY_RAYLET_PID": "4711",
        "RAY_memory_usage_threshold": "0.99",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    decision = machine.decide(environ=worker)
    assert room(decision, "Ray's memory threshold for the node") == pytest.approx((60 - 2 - 50) * GIB, abs=MIB)
    unreadable = machine.decide(environ=worker | {"RAY_RAYLET_PID": "12"})
    assert all("Ray" not in limit.name for limit in unreadable.limits)  # then the worker's own have to do


@pytest.mark.parametrize(
    "setting, gib_left",
    [
        ({"RAY_memory_usage_threshold": "0.9"}, 38.0),
        ({"RAY_memory_usage_threshold": "1.0"}, 48.0),
        ({"RAY_memory_usage_threshold": "lots"}, 43.0),
        ({"RAY_memory_usage_threshold": "95"}, 43.0),
        ({"RAY_min_memory_free_bytes": str(3 * GIB)}, 45.0),  # the higher of the two thresholds is the one that kills
        ({"RAY_min_memory_free_bytes": str(30 * GIB)}, 43.0),
    ],
)
def test_settings_of_ray_are_honoured(machine: Machine, setting: dict[str, str], gib_left: float) -> None:
    machine.meminfo(MemTotal=100 * GIB, MemAvailable=50 * GIB)
    decision = machine.decide(environ=RAY_WORKER | setting)
    assert room(decision, "Ray's memory threshold for the node") == pytest.approx(gib_left * GIB, abs=MIB)


def test_no_ray_limit_where_its_monitor_is_off(machine: Machine) -> None:
    decision = machine.decide(environ=RAY_WORKER | {"RAY_memory_monitor_refresh_ms": "0"})
    assert all("Ray" not in limit.name for limit in decision.limits)


@pytest.mark.parametrize("requested", ["auto", GIB])
def test_too_little_is_an_error_that_names_the_limit(machine: Machine, requested: int | str) -> None:
    machine.membership(v2="/job")
    machine.group_v2("/job", maximum=4 * GIB, used=4 * GIB - 2 * MIB)
    with pytest.raises(MemoryBudgetError) as caught:
        machine.decide(requested)
    assert "cgroup memory.max of /job" in str(caught.value)
    assert str(MIN_BUDGET_BYTES) in str(caught.value)
    assert caught.value.hint


def test_auto_goes_down_to_the_floor_before_it_gives_up(machine: Machine) -> None:
    machine.membership(v2="/job")
    machine.group_v2("/job", maximum=4 * GIB, used=4 * GIB - 3 * MIB)  # half of it is below the floor, 90 % is not
    assert machine.decide().granted == MIN_BUDGET_BYTES


def test_a_group_above_its_limit_has_no_room(machine: Machine) -> None:
    machine.membership(v2="/job")  # memory.high may be passed for a while
    machine.group_v2("/job", maximum=None, high=GIB, used=2 * GIB)
    with pytest.raises(MemoryBudgetError, match=r"memory\.high"):
        machine.decide()


@pytest.mark.parametrize("ranks", [1, 4])
def test_asking_again_with_a_pool_in_place_gives_the_same_answer(machine: Machine, ranks: int) -> None:
    """A pool must not shrink from save to save because its own memory counts as used."""
    machine.membership(v2="/job")
    machine.group_v2("/job", maximum=20 * GIB, used=4 * GIB)
    first = machine.decide(local_ranks=ranks)
    machine.group_v2("/job", maximum=20 * GIB, used=4 * GIB + ranks * first.granted)
    assert machine.decide(local_ranks=ranks, already_held=first.granted).granted == first.granted


def test_a_machine_without_any_readable_limit_gets_a_modest_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    nowhere = str(tmp_path / "nothing")
    decision = decide_budget("auto", local_ranks=1, proc=nowhere, cgroup_root=nowhere, environ=RAY_WORKER)
    assert (decision.granted, decision.limits) == (guard.BLIND_BYTES, ())
    asked = decide_budget(GIB, local_ranks=1, proc=nowhere, cgroup_root=nowhere, environ={})
    assert asked.granted == GIB


def test_garbage_in_the_files_is_skipped(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "\x00nonsense\n4:memory\n::\n0::/job\n")
    machine.write(machine.proc / "meminfo", "MemTotal:\nMemAvailable: many kB\n\n")
    machine.write(machine.cgroup / "job/memory.max", "12 apples\n")
    machine.write(machine.cgroup / "memory.max", f"{4 * GIB}\n")
    machine.write(machine.cgroup / "memory.current", f"{2 * GIB}\n")  # and no memory.stat
    assert machine.decide().granted == GIB


def test_explain_is_one_line_with_everything_in_it(machine: Machine) -> None:
    machine.membership(v2="/job")
    machine.group_v2("/job", maximum=8 * GIB, used=2 * GIB, inactive=GIB)
    text = machine.decide(local_ranks=2).explain()
    assert "\n" not in text
    for part in ("1.75 GiB per rank", "cgroup memory.max of /job", "MemAvailable", "auto", "limit 8.00 GiB"):
        assert part in text


@settings(max_examples=100, deadline=None)
@given(
    requested=st.one_of(st.just("auto"), st.integers(MIN_BUDGET_BYTES, 1 << 45)),
    available=st.integers(0, 1 << 44),
    bound=st.integers(0, 1 << 44),
    used=st.integers(0, 1 << 44),
    ranks=st.integers(1, 16),
)
def test_all_ranks_together_never_get_more_than_nine_tenths_of_the_tightest_limit(
    tmp_path_factory: pytest.TempPathFactory, requested: int | str, available: int, bound: int, used: int, ranks: int
) -> None:
    """B010: what the ranks of a node stage together has to fit into what the node has left."""
    machine = Machine(tmp_path_factory.mktemp("machine"))
    machine.meminfo(MemTotal=1 << 45, MemAvailable=available)
    machine.group_v2("/", maximum=bound, used=used)
    least = min(available // 1024 * 1024, max(bound - used, 0))
    try:
        decision = machine.decide(requested, local_ranks=ranks)
    except MemoryBudgetError:
        assert least / ranks * 0.9 < MIN_BUDGET_BYTES + 1
    else:
        assert decision.granted * ranks <= least * 0.9
        assert decision.granted >= MIN_BUDGET_BYTES


def test_on_this_machine_the_answer_is_sane() -> None:
    decision = decide_budget("auto", local_ranks=1)
    assert MIN_BUDGET_BYTES <= decision.granted <= guard.AUTO_CAP_BYTES
    assert decision.granted <= psutil.virtual_memory().total // 2
    available = room(decision, "MemAvailable")
    assert abs(available - psutil.virtual_memory().available) < GIB
    assert decision.limits[0].room == min(limit.room for limit in decision.limits)


@pytest.mark.parametrize("value, ranks", [("8", 8), (" 2 ", 2), ("0", 1), ("-4", 1), ("four", 1), ("", 1), (None, 1)])
def test_local_ranks_come_from_the_launcher(value: str | None, ranks: int) -> None:
    assert local_rank_count({} if value is None else {"LOCAL_WORLD_SIZE": value}) == ranks
