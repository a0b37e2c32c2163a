"""Promises that take a limit of their own to show: short runs of the soak (:mod:`tests.soak`), and single acts under real limits.

Where root, control groups or Ray are missing, the tests that need them are skipped, and say so.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ckpt_engine import CheckpointEngine, EngineConfig
from ckpt_engine.config import MIB
from ckpt_engine.staging.guard import BudgetDecision
from ckpt_engine.staging.pressure import PressureGauge
from tests.ranks import run_ranks
from tests.sinks import blocked_writes
from tests.soak import campaign, ray_campaign
from tests.soak.cgroups import Deaths, MemoryGroup, Unavailable, memory_group
from tests.soak.peers import peers
from tests.soak.sampling import Sampler, Tells
from tests.soak.trainer import Order
from tests.soak.verdict import MOST_DRIFT, Outcome, judge

pytestmark = [pytest.mark.soak, pytest.mark.timeout(240)]

GIB = 1 << 30


def ran(
    run: Callable[[campaign.Plan, Path], tuple[Outcome, Sampler, Tells]], plan: campaign.Plan, out: Path
) -> tuple[Outcome, Tells]:
    """The outcome of a campaign, which has to be without problems; skips where it can't run."""
    try:
        outcome, _, tells = run(dataclasses.replace(plan, deadline=180.0), out)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert outcome.problems == (), outcome.line()
    return outcome, tells


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        with memory_group() as made:
            yield made
    except Unavailable as reason:
        pytest.skip(str(reason))


# -- the campaigns, shorter --------------------------------------------------------------------------------------------


def test_saves_in_a_memory_group_next_to_a_neighbour_that_breathes(tmp_path: Path) -> None:
    """B010, B020, B083: model + budget + 10 %, sizes that change; nobody is killed, and memory between saves doesn't drift."""
    outcome, _ = ran(campaign.cgroup, campaign.Plan(saves=48, state_bytes=96 * MIB, restore_every=6), tmp_path)
    assert outcome.deaths.out_of_memory == outcome.deaths.killed == outcome.forks == outcome.children == 0
    assert abs(outcome.drift) < MOST_DRIFT and outcome.spread <= outcome.extent
    assert outcome.restored == 8 and outcome.saves == 48
    assert 0 < outcome.peak <= outcome.peak_charged <= outcome.limit
    assert outcome.neighbour > 40 * MIB and outcome.least_mapped < outcome.peak_mapped <= outcome.budget
    assert outcome.after["descriptors"] <= outcome.base["descriptors"]
    assert outcome.after["threads"] <= outcome.base["threads"]


def test_saves_under_an_address_space_limit_that_the_trainer_uses_as_well(tmp_path: Path) -> None:
    """B020, B040"""
    outcome, _ = ran(campaign.rlimit, campaign.Plan(saves=30, state_bytes=96 * MIB, restore_every=6), tmp_path)
    assert outcome.restored == 5 and outcome.own_refused == 0
    assert outcome.model < outcome.peak <= outcome.limit
    assert outcome.least_mapped < outcome.peak_mapped <= outcome.budget


def test_saves_in_a_ray_actor_below_a_low_threshold_of_the_memory_monitor(tmp_path: Path) -> None:
    """B058: Ray kills at once above its threshold, and the actor lives."""
    outcome, _ = ran(ray_campaign.ray, campaign.Plan(saves=16, state_bytes=96 * MIB, restore_every=8), tmp_path)
    assert outcome.monitor_kills == 0 and outcome.restored == 2
    assert outcome.peak <= outcome.limit


def test_the_harness_sees_a_saver_that_takes_too_much(tmp_path: Path) -> None:
    """A soak that can't fail shows nothing: ``dcp.async_save`` copies the whole state, and is killed for it."""
    try:
        (found,) = peers(campaign.Plan(saves=1, state_bytes=192 * MIB), tmp_path, ("dcp_async",))
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert found.kills == 1 and found.saves == 0 and "SIGKILL" in found.fate


def test_the_verdict_names_what_drifts_or_is_left_behind(tmp_path: Path) -> None:
    tells = Tells(tmp_path / "told")
    base = {"rss": 100 * MIB, "descriptors": 4, "threads": 2}
    lines: list[dict[str, Any]] = [{"budget": 64 * MIB, "ruled_by": "x"}]
    lines += [{"saved": n, "rest": 100 * MIB + n * 40_000, "extent": MIB, "budget": 64 * MIB} for n in range(1, 51)]
    lines += [{"end": True, "base": base, "after": {"rss": 110 * MIB, "descriptors": 5, "threads": 3}, "saves": 50}]
    (tmp_path / "told").write_text("".join(json.dumps({"at": n, **line}) + "\n" for n, line in enumerate(lines)))
    tells.follow()
    outcome = judge(
        "made up",
        tells,
        Sampler(os.getpid(), None, None),
        limit=GIB,
        limit_name="none",
        model=0,
        state=0,
        saves=50,
        deaths=Deaths(1, 1, 1),
        peak_charged=0,
        monitor_kills=0,
        ended="killed",
    )
    said = "; ".join(outcome.problems)
    for problem in ("killed", "out of memory", "drifts", "RSS after close", "5 descriptors", "3 threads"):
        assert problem in said


# -- single acts -------------------------------------------------------------------------------------------------------


def test_a_state_of_a_gibibyte_is_saved_with_96_mebibytes_of_head_room(tmp_path: Path) -> None:
    """B010: asynchronously, with the budget that the guard finds by itself. Restored over the state, since a copy wouldn't fit."""
    plan = campaign.Plan(
        saves=1, state_bytes=GIB, budget="auto", extent_bytes=16 * MIB, head_room=96 * MIB, neighbour=0
    )
    outcome, tells = ran(campaign.cgroup, plan, tmp_path)
    assert outcome.limit == outcome.model + 96 * MIB
    assert outcome.deaths.out_of_memory == outcome.deaths.killed == 0
    saved = [line["bytes"] for line in tells.all("saved")]
    restored = [line for line in tells.all("restored") if "end" not in line]
    assert max(saved) >= GIB and len(restored) == 2


STAND_IN = """
import resource, torch
from ckpt_engine.layout.records import make_template
make_template((3,), torch.float32)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), -1))
print(make_template((1 << 20, 512), torch.float32).nbytes)
"""


def test_planning_a_large_tensor_takes_no_address_space() -> None:
    """B020, B040: as much as the largest tensor was mapped to plan a save, or, where that was refused, 100 MiB of modules loaded."""
    done = subprocess.run([sys.executable, "-c", STAND_IN], timeout=100, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-600:]
    assert int(done.stdout) == 2 * GIB


def test_a_look_that_waits_for_a_processor_puts_the_next_one_off_no_longer() -> None:
    """While Python threads compute, 0.3 ms of looking take 20 ms: the pool looked once a second then, and a neighbour grew."""
    now, work = [0.0], [0.0]

    class Waiting(PressureGauge):
        def weigh(self, **_: Any) -> BudgetDecision:
            now[0] += 0.030
            work[0] += 0.0003
            return BudgetDecision(64 * MIB, 64 * MIB, "staging_budget", (), 1, GIB)

    gauge = Waiting(64 * MIB, proc="/nowhere", cgroup_root="/nowhere", clock=lambda: now[0], cpu_clock=lambda: work[0])
    gauge.look(mapped=0, resident=0, extent_bytes=MIB, floor=2 * MIB)
    now[0] += 0.101
    assert gauge.due()


class Looking(Dataset[tuple[int, int, int]]):
    """What a worker finds at addresses of its parent: how many of the pool's and of the control's hold ``marker``; and its size."""

    def __init__(self, pool: list[int], control: list[int], marker: bytes) -> None:
        self.pool, self.control, self.marker = pool, control, marker

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return self._found(self.pool), self._found(self.control), anonymous()

    def _found(self, addresses: list[int]) -> int:
        count = 0
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        for address in addresses:
            with contextlib.suppress(OSError):  # nothing is mapped there
                count += os.pread(memory, len(self.marker), address) == self.marker
        os.close(memory)
        return count


def anonymous() -> int:
    """Resident anonymous memory of this process."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def test_the_pool_does_not_enter_the_forks_of_a_data_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B037: workers that are started during a save have neither the staged bytes nor the memory for them."""
    marker = b"staged by the engine, not for forks. "[:32]
    state = {"t": torch.frombuffer(bytearray(marker * (48 * MIB // 32)), dtype=torch.uint8)}
    control = mmap.mmap(-1, MIB)
    control.write(marker * (MIB // 32))
    control_at = torch.frombuffer(control, dtype=torch.uint8).data_ptr()
    config = EngineConfig(staging_budget=64 * MIB, extent_bytes=4 * MIB, commit_timeout=60.0)
    with CheckpointEngine(tmp_path, config) as engine, blocked_writes(monkeypatch) as gate:
        handle = engine.save(state, 1)
        extents = list(engine._workers.pool._in_use.values())
        assert sum(extent.nbytes for extent in extents) >= 48 * MIB
        starts = []
        for extent in extents:  # where a marker begins depends on what stands before it
            found = extent.view[:128].tobytes().find(marker)
            starts += [extent.address + found] * (found >= 0)
        assert len(starts) >= 11
        parent = anonymous()
        loader = DataLoader(
            Looking(starts, [control_at], marker), batch_size=1, num_workers=2, multiprocessing_context="fork"
        )
        seen = [tuple(int(value) for value in item) for item in loader]
        gate.open()
        handle.result(60)
    assert [pool for pool, _, _ in seen] == [0] * 8
    assert [found for _, found, _ in seen] == [1] * 8, "the workers would have seen it"
    assert max(size for _, _, size in seen) <= parent - 48 * MIB + 16 * MIB


def two_on_a_node(rank: int, world: int, directory: str, group: str, room: int) -> tuple[int, list[tuple[float, int]]]:
    with open(os.path.join(group, "cgroup.procs"), "w") as procs:
        procs.write(str(os.getpid()))
    os.environ.pop("LOCAL_WORLD_SIZE")  # as under Ray: they find out by themselves
    state = {f"r{rank}.{i}": torch.full((4 * MIB,), rank * 10 + i, dtype=torch.int32) for i in range(8)}
    config = EngineConfig(staging_budget=GIB, extent_bytes=4 * MIB, commit_timeout=60.0, keep_last=2)
    with CheckpointEngine(directory, dataclasses.replace(config, staging_budget=8 * MIB)) as engine:
        engine.save(state, 0).result(60)
    torch.distributed.barrier()
    if rank == 0:
        mine = MemoryGroup(Path(group), 1 if os.path.exists(f"{group}/memory.limit_in_bytes") else 2)
        mine.limit(mine.usage().working_set + room)
        mine.close()
    torch.distributed.barrier()
    mapped: list[tuple[float, int]] = []
    over = threading.Event()
    with CheckpointEngine(directory, config) as engine:

        def watch() -> None:
            while not over.wait(0.005):
                mapped.append((time.monotonic(), engine._workers.pool.stats().mapped))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for step in range(1, 5):
                engine.save(state, step)
                for tensor in state.values():
                    tensor += 100
            engine.wait(60)
        finally:
            over.set()
            watcher.join()
        ranks = engine.memory().local_ranks
        engine.restore(state, step=4)
    assert all((tensor == rank * 10 + i + 300).all() for i, tensor in enumerate(state.values()))
    return ranks, mapped


def test_two_ranks_on_a_node_never_hold_more_than_its_budget_together(group: MemoryGroup, tmp_path: Path) -> None:
    """B010: each asks for a GiB; the group that both are in has 120 MiB left, and each state is 128 MiB."""
    room = 120 * MIB
    results = run_ranks(2, two_on_a_node, str(tmp_path), str(group.directory), room, timeout=120)
    assert [ranks for ranks, _ in results] == [2, 2]
    (_, first), (_, second) = results
    times = [at for at, _ in second]
    together = [held + second[max(bisect.bisect(times, at) - 1, 0)][1] for at, held in first]
    assert 40 * MIB < max(together) <= 0.9 * room
    assert (group.deaths().out_of_memory, group.deaths().killed) == (0, 0)
    assert group.peak_charged() > 0


# -- a setting of the whole machine ------------------------------------------------------------------------------------

_VM = Path("/proc/sys/vm")


@contextlib.contextmanager
def commit_room(size: int) -> Iterator[None]:
    """``vm.overcommit_memory=2`` with so much left to promise, for everybody on this machine. Put back at the end."""
    before = {name: (_VM / name).read_text() for name in ("overcommit_memory", "overcommit_kbytes", "overcommit_ratio")}
    memory = {
        line.split(":")[0]: int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if "kB" in line
    }
    try:
        (_VM / "overcommit_kbytes").write_text(str(memory["Committed_AS"] - memory["SwapTotal"] + size // 1024))
        (_VM / "overcommit_memory").write_text("2")
        yield
    finally:
        (_VM / "overcommit_memory").write_text(before["overcommit_memory"])
        # Setting one of these clears the other.
        name = "overcommit_kbytes" if int(before["overcommit_kbytes"]) else "overcommit_ratio"
        (_VM / name).write_text(before[name])


def test_with_less_commit_room_than_the_state_saves_work(tmp_path: Path) -> None:
    """B020, B040: under ``vm.overcommit_memory=2`` everything that is mapped counts, touched or not."""
    if os.environ.get("CKPT_ENGINE_SYSCTL") != "1":
        pytest.skip(
            "vm.overcommit_memory is a setting of the whole machine: set CKPT_ENGINE_SYSCTL=1 to have it changed"
        )
    if not os.access(_VM / "overcommit_memory", os.W_OK):
        pytest.skip("this user may not set vm.overcommit_memory")
    plan = campaign.Plan(saves=6, state_bytes=512 * MIB, budget="auto", restore_every=3, deadline=150.0)
    order = Order(str(tmp_path / "told"), "", plan.state_bytes, str(tmp_path / "saves"))
    tells = Tells(tmp_path / "told")
    words = json.dumps(dataclasses.asdict(order))
    with campaign.started("tests.soak.trainer", words, log=tmp_path / "log") as trainer:
        campaign.wait_for(tells, "ready", trainer, tmp_path / "log")
        with commit_room(256 * MIB):
            ended = campaign.drive(trainer, tells, campaign.told(order, plan), plan)
    assert ended == "", (tmp_path / "log").read_text()[-1000:]
    assert sum("end" not in line for line in tells.all("restored")) == 3
    assert {line["ruled_by"] for line in tells.all("ruled_by")} == {"vm.overcommit_memory=2"}
