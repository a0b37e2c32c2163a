"""Promises of ``engine.plan``: it says what the save will do, to the byte; it fails as the save would; and it leaves nothing behind."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt_engine import (
    CheckpointEngine,
    CheckpointError,
    MemoryBudgetError,
    PerRank,
    TrainState,
)
from ckpt_engine.commit.names import PROBE_PREFIX
from ckpt_engine.preflight import SavePlanReport
from ckpt_engine.preflight.judging import needed_bytes
from ckpt_engine.preflight.probe import COPY_BYTES, WRITE_BYTES
from tests.preflight_tools import MIB, config, file_sizes, planned_sizes
from tests.sinks import blocked_writes

pytestmark = pytest.mark.timeout(60)


def odd_state() -> dict[str, Any]:
    tied = torch.randn(100, 7)
    return {
        "model": {
            "tied": tied,
            "tied_too": tied,
            "half": torch.randn(513, 129).to(torch.bfloat16),
            "strided": torch.randn(64, 33).t(),
            "scalar": torch.tensor(3),
            "empty": torch.empty(0, 4),
            "large": torch.randn(MIB),
        },
        "lr": 0.1,
        "names": ["a", "b"],
        "long": "x" * (3 * MIB),
        "mine": PerRank({"seed": 1}),
    }


def only_problem(report: SavePlanReport, what: str) -> Any:
    assert report.verdict == "does not fit" and [problem.what for problem in report.problems] == [what], str(report)
    return report.problems[0]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CheckpointEngine]:
    with CheckpointEngine(tmp_path, config()) as made:
        yield made


# -- it says what the save does ------------------------------------------------------------------------------------------


def test_the_bytes_of_every_file_are_those_that_the_save_writes(engine: CheckpointEngine, tmp_path: Path) -> None:
    state = odd_state()
    report = engine.plan(state)
    info = engine.save(state, 7, TrainState(step=7)).result(20)
    assert planned_sizes(report) == file_sizes(info.path)
    assert report.bytes == info.bytes
    rank = report.ranks[0]
    assert (rank.tensors, rank.values) == (7, 4)
    assert (rank.largest, rank.largest_bytes) == ("model.large", 4 * MIB)
    assert rank.value_bytes > 3 * MIB
    part = os.path.getsize(os.path.join(info.path, "ckpt_engine", "rank-00000.json"))
    assert rank.other_bytes == part  # steps 0 and 7 are equally long


def test_the_disk_space_of_a_checkpoint_is_told_within_a_few_blocks(engine: CheckpointEngine) -> None:
    state = {"t": [torch.randn(1000) for _ in range(500)]}
    report = engine.plan(state, probe=False)
    path = engine.save(state, 1, TrainState(step=1)).result(20).path
    used = sum(os.lstat(os.path.join(base, name)).st_blocks * 512 for base, _, names in os.walk(path) for name in names)
    assert used <= report.disk.checkpoint <= used * 1.1 + 64 * 1024
    assert report.disk.inodes_needed >= sum(1 + len(names) for _, _, names in os.walk(path))


def test_the_plan_is_used_by_the_first_save(engine: CheckpointEngine) -> None:
    state = odd_state()
    engine.plan(state, probe=False)
    assert engine.save(state, 1).result(20).stats.reused_plan


def test_planning_another_state_does_not_disturb_the_saves(engine: CheckpointEngine) -> None:
    state = odd_state()
    first = engine.save(state, 1).result(20)
    other = engine.plan({"w": torch.randn(3 * MIB)}, probe=False)
    second = engine.save(state, 2).result(20)
    assert other.bytes > first.bytes
    assert file_sizes(first.path) == file_sizes(second.path) and engine.verify(2).ok


def test_the_estimates_are_of_the_right_size(tmp_path: Path) -> None:
    state = {f"t{number}": torch.randn(2 * MIB) for number in range(16)}
    with CheckpointEngine(tmp_path, config(staging_budget=256 * MIB, extent_bytes=16 * MIB)) as engine:
        report = engine.plan(state)
        seconds = [engine.save(state, step).result(20).stats for step in range(1, 5)]
    assert (
        report.stall_seconds is not None
        and report.durable_seconds is not None
        and report.first_stall_seconds is not None
    )
    assert report.stall_seconds < report.durable_seconds
    fastest = min(stats.durable_seconds for stats in seconds)
    assert fastest / 20 < report.durable_seconds < fastest * 20  # a shared machine: the order of magnitude


def test_without_a_probe_no_times_are_guessed(engine: CheckpointEngine) -> None:
    report = engine.plan({"w": torch.zeros(10)}, probe=False)
    assert (report.stall_seconds, report.durable_seconds, report.ranks[0].speeds) == (None, None, None)
    assert "not measured" in str(report)


def test_the_report_is_a_short_table_and_plain_json(engine: CheckpointEngine, tmp_path: Path) -> None:
    report = engine.plan(odd_state())
    lines = str(report).splitlines()
    assert lines[0] == f"save to {tmp_path}: fits" and len(lines) <= 12
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert found["verdict"] == "fits" and found["bytes"] == report.bytes
    assert found["ranks"][0]["files"][0] == {"name": "__0_0.distcp", "bytes": report.ranks[0].files[0].bytes}
    assert found["disk"]["quota"] == "not checked"  # nobody looked, and it doesn't pretend


# -- verdicts turn at the limits -----------------------------------------------------------------------------------------


def test_one_extent_more_than_the_budget_streams(tmp_path: Path) -> None:
    with CheckpointEngine(tmp_path, config(staging_budget=8 * MIB, writers=1)) as engine:
        fits = engine.plan({"w": torch.zeros(8 * MIB - 64 * 1024, dtype=torch.uint8)}, probe=False)
        streams = engine.plan({"w": torch.zeros(8 * MIB, dtype=torch.uint8)}, probe=False)
    assert (fits.verdict, fits.ranks[0].memory.extents_needed, fits.ranks[0].memory.extents) == ("fits", 8, 8)
    assert (streams.verdict, streams.ranks[0].memory.extents_needed) == ("fits by streaming", 9)
    assert streams.ranks[0].memory.bytes == 8 * MIB and streams.ranks[0].memory.ruled_by == "staging_budget"


def faked_statvfs(monkeypatch: pytest.MonkeyPatch, free: int, inodes: int = 10**6) -> None:
    real = os.statvfs

    def statvfs(path: Any) -> Any:
        facts = real(path)
        return SimpleNamespace(
            f_bavail=free // 512, f_frsize=512, f_blocks=facts.f_blocks, f_favail=inodes, f_files=10**6
        )

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_a_full_disk_does_not_fit_and_the_missing_bytes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(4 * MIB, dtype=torch.uint8)}
    with CheckpointEngine(tmp_path, config(keep_last=3, max_in_flight=1)) as engine:
        faked_statvfs(monkeypatch, 10**9)
        disk = engine.plan(state, probe=False).disk
        assert disk.held == 4 and disk.needed == 4 * disk.checkpoint
        faked_statvfs(monkeypatch, disk.needed)
        assert engine.plan(state, probe=False).verdict == "fits"
        faked_statvfs(monkeypatch, disk.needed - 512)
        report = engine.plan(state, probe=False)
        problem = only_problem(report, "disk")
        assert (problem.missing, report.missing_bytes) == (512, 512) and "512 bytes" in problem.message
        faked_statvfs(monkeypatch, 10**9, inodes=7)
        assert only_problem(engine.plan(state, probe=False), "inodes").missing == disk.inodes_needed - 7


def test_checkpoints_that_are_there_count_as_far_as_retention_removes_them(tmp_path: Path) -> None:
    state = {"w": torch.zeros(4 * MIB, dtype=torch.uint8)}
    with CheckpointEngine(tmp_path, config(keep_last=1)) as engine:
        empty = engine.plan(state, probe=False).disk
        engine.save(state, 1).result(20)
        used = engine.plan(state, probe=False).disk
    assert empty.needed == 2 * empty.checkpoint
    assert (
        used.existing >= 4 * MIB and used.needed < 1.1 * used.checkpoint
    )  # the one there goes when the next is committed


def test_the_needed_bytes_are_those_of_a_disk_that_sees_save_after_save() -> None:
    draw = random.Random(5)
    for keep_last, keep_every, count in itertools.product((1, 2, 3, 7), (None, 10), (0, 1, 2, 5, 9)):
        one = draw.randint(1, 50)
        existing = [(draw.choice((10, 11, 12, 13)), draw.randint(1, 100)) for _ in range(count)]
        there = [(step, nbytes, True) for step, nbytes in existing]  # the newest first
        before = used = peak = sum(nbytes for _, nbytes in existing)
        for step in range(101, 110 + keep_last):
            if keep_every is not None and step % keep_every == 0:
                continue  # what is kept for ever is not in the sum
            peak = max(peak, used + one)
            there.insert(0, (step, one, False))
            there = [
                entry
                for place, entry in enumerate(there)
                if place < keep_last or (keep_every is not None and entry[0] % keep_every == 0)
            ]
            used = sum(nbytes for _, nbytes, _ in there)
        assert needed_bytes(one, existing, keep_last, keep_every) == peak - before, (keep_last, keep_every, existing)


def test_what_is_needed_is_found_at_once_for_any_number_of_checkpoints_to_keep() -> None:
    assert needed_bytes(10, [(1, 5)], 10**12, None) == 10 * (10**12 + 1) - 5


def test_a_limit_on_file_sizes_does_not_fit_and_the_save_would_have_failed(
    engine: CheckpointEngine, tmp_path: Path
) -> None:
    state = {"w": torch.zeros(4 * MIB, dtype=torch.uint8)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
    try:
        report = engine.plan(state)
        problem = only_problem(report, "file size")
        assert problem.missing == -(-report.ranks[0].files[0].bytes // 4096) * 4096 - 2 * MIB
        with pytest.raises(CheckpointError) as failed:
            engine.save(state, 1).result(20)
        assert failed.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert engine.plan(state).verdict == "fits"


def test_too_few_descriptors_do_not_fit(engine: CheckpointEngine) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 3, hard))
    try:
        report = engine.plan({"w": torch.zeros(100)}, probe=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    problem = only_problem(report, "descriptors")
    assert problem.unit == "descriptors" and 0 < problem.missing <= 3 and report.missing_bytes == 0


def test_no_memory_does_not_fit(engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit() -> None:
        raise MemoryBudgetError("the system refuses memory", phase="stage")

    monkeypatch.setattr(engine._workers, "fit", fit)
    assert "refuses memory" in only_problem(engine.plan({"w": torch.zeros(100)}), "memory").message


# -- it leaves nothing behind ----------------------------------------------------------------------------------------------


def test_nothing_is_left_in_the_directory_and_it_is_not_locked(engine: CheckpointEngine, tmp_path: Path) -> None:
    state = odd_state()
    engine.plan(state)
    assert os.listdir(tmp_path) == []
    with CheckpointEngine(tmp_path, config()) as other:  # would be told that the directory is busy
        other.save(state, 1).result(20)
        before = sorted(os.listdir(tmp_path))
        engine.plan(state)
        assert sorted(os.listdir(tmp_path)) == before
        other.save(state, 2).result(20)


def probe_descriptor(fd: int) -> bool:
    return PROBE_PREFIX in os.readlink(f"/proc/self/fd/{fd}")


@pytest.mark.faults
@pytest.mark.parametrize("call", ["pwrite", "fsync", "open"])
def test_a_storage_that_refuses_the_trial_is_a_problem_and_keeps_nothing(
    engine: CheckpointEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = getattr(os, call)

    def refuse(what: Any, *rest: Any, **options: Any) -> Any:
        if PROBE_PREFIX in str(what) if call == "open" else probe_descriptor(what):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(what, *rest, **options)

    state = {"w": torch.zeros(4 * MIB, dtype=torch.uint8)}
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        report = engine.plan(state)
    assert "EDQUOT" in only_problem(report, "storage").message
    assert os.listdir(tmp_path) == [] and engine._workers.pool.stats().in_use == 0
    assert engine.plan(state).verdict == "fits"  # and a later plan is as good as new
    engine.save(state, 1).result(20)


@pytest.mark.faults
def test_an_interrupt_of_the_trial_keeps_nothing(
    engine: CheckpointEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import concurrent.futures

    real, calls = concurrent.futures.wait, []

    def wait(*arguments: Any, **options: Any) -> Any:
        if len(arguments[0]) == 3 and not calls:  # two lanes and the small file
            calls.append(1)
            raise KeyboardInterrupt
        return real(*arguments, **options)

    state = {"w": torch.zeros(16 * MIB, dtype=torch.uint8), "v": torch.zeros(16 * MIB, dtype=torch.uint8)}
    with monkeypatch.context() as patch:
        patch.setattr(concurrent.futures, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            engine.plan(state)
    assert calls and os.listdir(tmp_path) == []
    assert engine._workers.pool.stats().in_use == 0
    engine.save(state, 1).result(20)


def test_the_trial_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"t{number}": torch.zeros(16 * MIB, dtype=torch.uint8) for number in range(24)}
    longest: list[int] = []
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if probe_descriptor(fd):
            longest.append(len(data))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with CheckpointEngine(tmp_path, config(staging_budget=64 * MIB, extent_bytes=8 * MIB)) as engine:
        speeds = engine.plan(state).ranks[0].speeds
        assert speeds is not None and 0 < sum(longest) == speeds.written <= WRITE_BYTES
        assert 0 < speeds.copied <= 2 * COPY_BYTES
        longest.clear()
        faked_statvfs(monkeypatch, 40 * MIB)  # a disk that is nearly full: a quarter of it at most
        engine.plan(state)
        assert 0 < sum(longest) <= 10 * MIB


@pytest.mark.faults
def test_the_trial_is_bounded_in_time_on_a_slow_storage(
    engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(200 * MIB, dtype=torch.uint8)}
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        time.sleep(0.2)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    begin = time.monotonic()
    report = engine.plan(state)
    assert time.monotonic() - begin < 4.0
    assert report.verdict == "fits by streaming"
    assert report.durable_seconds is not None and report.durable_seconds > 10  # 200 MiB at about 10 MiB/s
    assert report.stall_seconds is not None and report.stall_seconds > 10  # and the trainer waits for most of it


@pytest.mark.faults
def test_a_storage_that_hangs_is_a_problem_by_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if probe_descriptor(fd):
            release.wait(30)
        return real(fd, data, offset)

    with CheckpointEngine(tmp_path, config(commit_timeout=2.0)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            try:
                begin = time.monotonic()
                report = engine.plan({"w": torch.zeros(4 * MIB, dtype=torch.uint8)})
                assert time.monotonic() - begin < 8.0
                assert "answer" in only_problem(report, "storage").message
            finally:
                release.set()
            end = time.monotonic() + 10
            while os.listdir(tmp_path) and time.monotonic() < end:
                time.sleep(0.02)
        assert os.listdir(tmp_path) == []  # gone as soon as the storage answers


def test_a_save_on_its_way_is_not_held_up_and_the_trial_is_left_out(
    engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(4 * MIB, dtype=torch.uint8)}
    with blocked_writes(monkeypatch) as gate:
        handle = engine.save(state, 1)
        report = engine.plan(state)
        assert not handle.done()
        gate.open()
        handle.result(20)
    assert report.verdict == "fits" and report.durable_seconds is None
    assert any("on its way" in note for note in report.notes)
