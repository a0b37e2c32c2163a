"""The benchmark measures what it says: a real run of the command line with tiny sizes, and each instrument on its own.

No figure is held to a speed here; machines that run tests are busy.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest
import torch

from benchmarks import measure, megatron, megatron_report, megatron_versions, report, save
from benchmarks.megatron_report import PeerName
from benchmarks.peers import PEERS, Peer, Pending, RawPeer
from benchmarks.states import State, make_state

MIB = 1 << 20
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.timeout(110)
def test_the_command_line_measures_every_peer_in_every_case(tmp_path: pathlib.Path) -> None:
    work, output = tmp_path / "work", tmp_path / "samples.json"
    sizes = ["--size-gib", "0.02", "--single-gib", "0.03", "--small-count", "150"]
    rounds = ["--repeats", "2", "--busy-repeats", "1", "--pause", "0"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.save", *sizes, *rounds, "--dir", str(work), "--json", str(output)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(work.iterdir()) == [], "what was written was not removed"
    cases = {case["case"]: case for case in json.loads(output.read_text())["cases"]}
    assert list(cases) == ["gpt", "small", "single"]
    assert cases["small"]["items"] == 150
    assert cases["single"]["bytes"] == int(0.03 * (1 << 30)) // 4 * 4
    for name, case in cases.items():
        table = run.stdout.split(f"== {name}:")[1].split("== ")[0]
        assert not case["failures"]
        for peer in PEERS:
            rows = {row["run"]: row for row in case["rows"] if row["peer"] == peer}
            assert list(rows) == ["first", "later"], f"{name} {peer}"
            assert f"\n{peer:9}  first " in table and f"\n{peer:9}  later 1" in table
            for row in rows.values():
                assert 0 < row["stall"] <= row["durable"] < 100
                assert row["gbps"] == pytest.approx(case["bytes"] / row["durable"] / 1e9)
                assert row["cpu_per_gib"] > 0 and row["copy_cpu_per_gib"] > 0 and row["x_raw"] > 0
                assert row["extra_rss"] >= 0 and row["cache_percent"] >= 0
            assert all(sample["written"] >= case["bytes"] for sample in case["samples"][peer])
            background = peer in ("dcp_async", "engine")
            assert (rows["later"]["slowdown"] is not None) == background
            assert (rows["later"]["beyond_copy"] is not None) == background
            if peer == "raw":
                assert rows["first"]["x_raw"] == rows["later"]["x_raw"] == 1.0
    copied = next(row for row in cases["single"]["rows"] if row["peer"] == "dcp_async" and row["run"] == "first")
    assert copied["extra_rss"] > 0.8 * cases["single"]["bytes"], "async_save holds a copy of everything"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case, size", [("gpt", 5 * MIB), ("gpt", 90 * MIB), ("small", 8 * MIB), ("single", 3 * MIB)])
def test_a_state_has_the_size_asked_for_and_no_two_equal_pages(case: str, size: int) -> None:
    state = make_state(case, size, small_count=600)
    assert state.bytes == pytest.approx(size, rel=0.03)
    assert state.bytes == sum(tensor.nbytes for tensor in state.tensors())
    content = b"".join(bytes(tensor.view(-1).view(torch.uint8).numpy()) for tensor in state.tensors())
    pages = [content[at : at + 4096] for at in range(0, len(content) - 4095, 4096)]
    assert len(set(pages)) == len(pages)


@pytest.mark.timeout(60)
def test_the_memory_sampler_sees_a_peak_that_is_gone_at_the_end() -> None:
    with measure.RssSampler() as memory:
        block = mmap.mmap(-1, 64 * MIB)
        for at in range(0, len(block), mmap.PAGESIZE):
            block[at] = 1
        time.sleep(0.05)
        block.close()
        time.sleep(0.05)
    assert 60 * MIB < memory.extra < 90 * MIB
    assert 0 < memory.cpu_seconds < 1


@pytest.mark.timeout(60)
def test_cached_bytes_follow_what_is_in_the_page_cache(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "file")
    size = 8 * MIB + 777
    with open(path, "wb") as file:
        file.write(os.urandom(size))
    assert measure.cached_bytes(path) == size
    measure.drop_cache([path])
    left = measure.cached_bytes(path)
    if left == size and pathlib.Path(path).read_bytes():
        pytest.skip("this file system lives in the page cache")
    assert left < size / 10
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        file.read(MIB)
    assert MIB <= measure.cached_bytes(path) < 6 * MIB


@pytest.mark.timeout(60)
def test_the_compute_loop_feels_a_thread_that_holds_the_interpreter() -> None:
    loop = measure.ComputeLoop()
    loop.calibrate(0.2)
    stop = threading.Event()

    def hold() -> None:
        data = bytes(80 * MIB)
        while not stop.is_set():
            data.count(b"xy")  # one C call that keeps the GIL for tens of milliseconds
            time.sleep(0.02)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        deadline = time.perf_counter() + 0.7
        run = loop.run_until(lambda: time.perf_counter() > deadline)
    finally:
        stop.set()
        thread.join()
    assert run.slowdown > 1.1
    assert run.hiccup > 0.004
    assert run.turns >= 2 and run.seconds == pytest.approx(0.7, abs=0.3)


@pytest.mark.timeout(60)
def test_the_machines_cpu_time_contains_this_process() -> None:
    machine, mine = measure.machine_cpu_seconds(), time.process_time()
    if machine == 0.0:
        pytest.skip("this kernel doesn't tell")
    while time.process_time() - mine < 0.3:
        pass
    assert measure.machine_cpu_seconds() - machine > 0.2


@pytest.mark.timeout(60)
def test_the_plain_copy_copies_everything_and_counts_its_cpu() -> None:
    state = make_state("gpt", 48 * MIB)
    cost = measure.plain_copy(state.tensors(), 16 * MIB)
    assert 0 < cost.cpu_seconds <= cost.seconds * 1.5 + 0.02
    assert state.bytes / cost.cpu_seconds < 200e9, "faster than any memory: it can't have copied all of it"


# -- failures and goals ----------------------------------------------------------------------------------------------


class _HalfPeer(Peer):
    """Forgets half of the bytes."""

    name = "torch"

    def save(self, state: State, step: int) -> Pending:
        path = pathlib.Path(self._path(step))
        path.mkdir()
        (path / "half").write_bytes(bytes(state.bytes // 2))
        return Pending.finished({})


@pytest.mark.timeout(60)
def test_a_peer_that_writes_too_little_is_reported_and_the_others_go_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str, root: str, budget: int | None, writers: int | None) -> Peer:
        return RawPeer(root) if name == "raw" else _HalfPeer(root)

    monkeypatch.setattr(save, "make_peer", make)
    options = ["--peer", "torch", "--peer", "raw", "--repeats", "3", "--pause", "0", "--dir", str(tmp_path)]
    result = save._run_case(make_state("single", MIB), save.parse_arguments(options))
    assert "bytes are on disk after a save of" in result.failures["torch"]
    assert result.samples["torch"] == []
    assert len(result.samples["raw"]) == 3
    assert "torch FAILED: RuntimeError in round 1" in report.render(result)
    assert os.listdir(tmp_path) == []


def _result(case: str, engine: report.Sample) -> report.CaseResult:
    later = dataclasses.replace(engine, round=1)
    raw = dataclasses.replace(engine, durable=1.0, stall=1.0, figures={})
    dcp = dataclasses.replace(raw, durable=2.0, stall=2.0)
    return report.CaseResult(
        case=case,
        bytes=1 << 30,
        items=3,
        budget=100 * MIB,
        samples={
            "raw": [raw, dataclasses.replace(raw, round=1)],
            "dcp": [dcp, dataclasses.replace(dcp, round=1)],
            "engine": [engine, later],
        },
        busy={},
        background=frozenset(["engine"]),
        failures={},
        load_before=0.0,
    )


_GOOD = report.Sample(
    round=0,
    stall=0.1,
    durable=1.1,
    cpu=0.35,
    copy_cpu=0.10,
    copy_seconds=0.1,
    other_cpu=0.0,
    extra_rss=120 * MIB,
    cached=MIB,
    written=1 << 30,
    figures={"budget_bytes": 100 * MIB, "direct_io": True},
)


@pytest.mark.parametrize(
    "case, change, missed",
    [
        ("gpt", {}, set()),
        ("gpt", {"durable": 1.2}, {"x raw"}),
        ("gpt", {"durable": 1.5}, {"x raw", "x dcp.save"}),
        ("gpt", {"cpu": 0.41}, {"CPU s/GiB"}),
        ("gpt", {"extra_rss": 133 * MIB}, {"memory"}),
        ("gpt", {"cached": 60 * MIB}, {"page cache"}),
        ("small", {"durable": 0.9}, set()),
        ("small", {"durable": 1.1}, {"seconds until durable"}),
        ("single", {"durable": 9.0, "extra_rss": 133 * MIB}, {"memory"}),
    ],
)
def test_a_goal_is_missed_exactly_when_its_figure_is_beyond_the_limit(
    case: str, change: dict[str, float], missed: set[str]
) -> None:
    goals = _result(case, dataclasses.replace(_GOOD, **change)).goals()
    assert all(goal.met is not None for goal in goals)
    found = [goal.text for goal in goals if goal.met is False]
    assert len(found) == len(missed)
    for text in missed:
        assert any(text in goal for goal in found)


def test_a_goal_without_its_peer_is_neither_met_nor_missed() -> None:
    result = _result("gpt", _GOOD)
    del result.samples["dcp"]
    del result.samples["engine"]
    assert [goal.met for goal in result.goals()] == [None] * 5
    assert "not measured" in report.render(result)


@pytest.mark.parametrize("options", [["--budget", "much"], ["--repeats", "1"], ["--case", "huge"], ["--peer", "cp"]])
def test_options_that_make_no_sense_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        save.parse_arguments(options)
    assert refused.value.code == 2
    assert options[0] in capsys.readouterr().err


# -- megatron --------------------------------------------------------------------------------------------------------

MEGATRON = "0.16.0"  # forks a process per bucket and starts a manager, so that there is something to count


@pytest.mark.timeout(240)
def test_the_megatron_benchmark_measures_stock_and_engine_side_by_side(tmp_path: pathlib.Path) -> None:
    try:
        megatron_versions.folder(MEGATRON)
    except LookupError as error:
        pytest.skip(str(error))
    work, output = tmp_path / "work", tmp_path / "samples.json"
    sizes = ["--case", "small", "--size-gib", "0.01", "--small-count", "120", "--version", MEGATRON]
    rounds = ["--repeats", "2", "--pause", "0"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.megatron", *sizes, *rounds, "--dir", str(work), "--json", str(output)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(work.iterdir()) == [], "what was written was not removed"
    (case,) = json.loads(output.read_text())["cases"]
    assert not case["failures"] and case["items"] == 120
    modes = ["stock sync", "stock async (temporal queue)", "threads sync", "threads async"]
    peers = ["raw O_DIRECT", *(f"mcore {MEGATRON} {mode}" for mode in modes)]
    assert list(case["samples"]) == peers
    for peer in peers:
        rows = {row["run"]: row for row in case["rows"] if row["peer"] == peer}
        assert list(rows) == ["first", "later"], peer
        assert f"\n| {peer} " in run.stdout
        for row in rows.values():
            assert 0 < row["stall"] <= row["durable"] < 100
            assert row["gbps"] == pytest.approx(case["bytes"] / row["durable"] / 1e9)
            assert row["cpu_per_gib"] > 0 and row["x_raw"] > 0
        assert all(sample["written"] >= case["bytes"] for sample in case["samples"][peer])
        started = [sample["processes"] for sample in case["samples"][peer]]
        if "stock" in peer:
            # Two buckets; around them, an asynchronous save has a fork of the trainer.
            forks = 3 if "async" in peer else 2
            assert started[1] == forks and started[0] > forks, "the first save starts the manager, too"
            assert rows["later"]["memory"] > 50 * MIB, "the manager stays"
        else:
            assert started == [0, 0]
        if "sync" in peer.split() and "mcore" in peer:
            assert all(row["stall"] == row["durable"] for row in rows.values())
    assert [goal["met"] for goal in case["goals"]].count(None) == 0


@pytest.mark.timeout(60)
def test_what_forks_of_forks_do_is_counted() -> None:
    script = """
import os, time
from benchmarks.megatron_worker import ProcessCounter, tree_cpu_seconds

counter, before = ProcessCounter(), tree_cpu_seconds()
here, there = os.pipe()
child = os.fork()
if child == 0:
    if os.fork() == 0:
        while time.process_time() < 0.3:
            pass
        os._exit(0)
    os.wait()
    os.write(there, b".")
    time.sleep(60)
    os._exit(0)
os.read(here, 1)
alive = tree_cpu_seconds() - before
os.kill(child, 9)
os.wait()
print(counter.take(), counter.take(), alive, tree_cpu_seconds() - before)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=50, check=True
    )
    started, again, alive, ended = (float(field) for field in run.stdout.split())
    assert (started, again) == (2, 0)
    assert 0.28 < alive < 5, "in the children that live, and in those that these have waited for"
    assert alive - 0.02 < ended < 5, "and still, when they have ended"


def _megatron_result(case: str, seconds: float, cpu: float) -> megatron_report.CaseResult:
    def samples(seconds: float, cpu: float) -> list[megatron_report.Sample]:
        return [megatron_report.Sample(number, seconds, seconds, cpu, 0.0, 0, 0, 1 << 30) for number in range(3)]

    engines = [PeerName(version, True, mode) for version in ("0.16.0", "0.19.2") for mode in (False, True)]
    return megatron_report.CaseResult(
        case=case,
        bytes=1 << 30,
        items=3,
        ranks=1,
        budget=None,
        samples={
            PeerName(): samples(1.0, 0.1),
            **{peer.stock(asynchronous=peer.asynchronous): samples(10.0, 3.0) for peer in engines},
            **{peer: samples(seconds, cpu) for peer in engines},
        },
        memory={},
        failures={},
        load_before=0.0,
    )


@pytest.mark.parametrize(
    "case, seconds, cpu, missed",
    [
        ("gpt", 5.0, 1.0, 0),
        ("gpt", 5.1, 1.0, 4),
        ("gpt", 5.1, 1.1, 8),
        ("small", 2.0, 9.0, 0),
        ("small", 2.1, 0.0, 4),
    ],
)
def test_a_goal_against_stock_is_missed_exactly_beyond_its_limit(
    case: str, seconds: float, cpu: float, missed: int
) -> None:
    result = _megatron_result(case, seconds, cpu)
    assert [goal.met for goal in result.goals()].count(False) == missed
    assert megatron_report.render(result).count("MISSED") == missed
    for peer in [peer for peer in result.samples if peer.version and not peer.engine]:
        del result.samples[peer]
    assert {goal.met for goal in result.goals()} == {None}


@pytest.mark.parametrize("options", [["--budget", "much"], ["--repeats", "1"], ["--ranks", "0"], ["--peer", "nvrx"]])
def test_megatron_options_that_make_no_sense_are_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        megatron.parse_arguments(options)
    assert refused.value.code == 2
    assert options[0] in capsys.readouterr().err
