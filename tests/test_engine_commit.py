"""Promises: committed or invisible, in order; no failure is lost; the engine can be used again (design invariants 5 and 6)."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import (
    CheckpointEngine,
    CheckpointError,
    CommitTimeoutError,
    ConfigError,
    DirectoryBusyError,
    EngineClosedError,
    EngineConfig,
    NotCommittedError,
    StepExistsError,
    StorageError,
    TrainState,
)
from tests.sinks import blocked_writes, failing_writes

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"staging_budget": 64 * MIB, "commit_timeout": 30.0, **options})


def state(value: float = 1.0, count: int = 4) -> dict[str, Any]:
    return {f"t{i}": torch.full((1000,), float(value)) for i in range(count)}


def value_of(engine: CheckpointEngine, step: int | str) -> float:
    found = state(-1.0)
    engine.restore(found, step=step)  # type: ignore[arg-type]
    values = {t.unique().item() for t in found.values()}
    assert len(values) == 1
    return float(values.pop())


def test_nothing_is_published_before_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B005, B025, B070: tracker, directory name, steps(), callbacks and the log line all wait for the commit."""
    with CheckpointEngine(tmp_path, config()) as engine:
        called: list[int] = []
        engine.on_committed(lambda info: called.append(info.step))
        engine.save(state(1), 1).result(30)
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("ckpt_engine")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            with blocked_writes(monkeypatch) as gate:
                engine.save(state(2), 2)
                for _ in range(100):
                    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
                    assert engine.steps() == [1] and engine.latest() == 1
                assert called == [1] and not (tmp_path / "iter_0000002").exists()
                assert any("step 2 staged" in r for r in records)
                assert not any("committed" in r or "saved" in r for r in records)
                gate.open()
            engine.wait(30)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
        assert sum("step 2 committed" in r for r in records) == 1
        assert called == [1, 2] and engine.steps() == [1, 2]


def test_retention_keeps_the_last_good_one_until_the_next_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B002"""
    with CheckpointEngine(tmp_path, config(keep_last=1)) as engine:
        engine.save(state(5), 500).result(30)
        with blocked_writes(monkeypatch) as gate:
            engine.save(state(6), 1000)
            time.sleep(0.2)
            assert engine.steps() == [500]
            with CheckpointEngine(tmp_path, config()) as reader:
                assert value_of(reader, "latest") == 5
            gate.open()
        engine.wait(30)
        assert engine.steps() == [1000] and value_of(engine, "latest") == 6
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1000"


def test_keep_every_keeps_its_multiples(tmp_path: Path) -> None:
    with CheckpointEngine(tmp_path, config(keep_last=2, keep_every=4)) as engine:
        for step in range(1, 10):
            engine.save(state(step), step)
        engine.wait(60)
        assert engine.steps() == [4, 8, 9]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("iter_")) == [
        "iter_0000004",
        "iter_0000008",
        "iter_0000009",
    ]


def test_saves_commit_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B028, B047: a save that is waited for at once comes after the pending one, and callbacks come in save order."""
    order: list[int] = []
    with CheckpointEngine(tmp_path, config(max_in_flight=3)) as engine:
        engine.on_committed(lambda info: order.append(info.step))
        with blocked_writes(monkeypatch) as gate:
            engine.save({"big": torch.ones(4 * MIB)}, 1)
            timer = threading.Timer(0.5, gate.open)
            timer.start()
            engine.save(state(2), 2).result(60)
            timer.join()
        engine.wait(30)
    assert order == [1, 2]
    assert not list(tmp_path.glob("*tmp*"))


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(lambda: OSError(28, "No space left on device"), id="ENOSPC"),
        pytest.param(lambda: ValueError("x1"), id="ValueError"),
        pytest.param(lambda: SystemExit(3), id="SystemExit"),
        pytest.param(lambda: KeyboardInterrupt(), id="KeyboardInterrupt"),
        pytest.param(lambda: MemoryError(), id="MemoryError"),
    ],
)
def test_a_failure_in_a_writer_thread_is_told_once_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    """B004, B031, B097: of any kind, BaseException included; nothing is published and nothing is left over."""
    with CheckpointEngine(tmp_path, config(keep_last=1)) as engine:
        engine.save(state(1), 1).result(30)
        with failing_writes(monkeypatch, error):
            handle = engine.save(state(2), 2)
            with pytest.raises(CheckpointError) as caught:
                handle.result(30)
        assert caught.value.step == 2 and caught.value.phase == "write" and caught.value.rank == 0
        assert handle.done() and engine.steps() == [1]
        assert engine.poll() == [] or engine.poll() == []  # result() has told it already
        assert not list(tmp_path.glob("*tmp*"))
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
        engine.save(state(3), 3).result(30)
        assert engine.steps() == [3] and value_of(engine, 3) == 3


def test_a_failed_save_is_raised_by_the_next_save_before_it_does_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B031"""
    with CheckpointEngine(tmp_path, config(keep_last=1, max_in_flight=1)) as engine:
        engine.save(state(1), 1).result(30)
        with failing_writes(monkeypatch, lambda: OSError(5, "Input/output error")):
            engine.save(state(2), 2)
            while engine._background.waiting():
                time.sleep(0.01)
        with pytest.raises(StorageError) as caught:
            engine.save(state(3), 3)
        assert caught.value.step == 2 and caught.value.errno == 5
        assert engine.steps() == [1]
        engine.save(state(3), 3).result(30)
        assert engine.steps() == [3]


@pytest.mark.parametrize("how", ["poll", "wait", "close"])
def test_every_way_to_ask_raises_the_failure_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    engine = CheckpointEngine(tmp_path, config())
    with failing_writes(monkeypatch, lambda: OSError(5, "Input/output error")):
        handle = engine.save(state(1), 1)
        while not handle.done():
            time.sleep(0.01)
    with pytest.raises(StorageError):
        getattr(engine, how)()
    engine.wait(10)
    engine.close()


def test_warn_logs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointEngine(tmp_path, config(on_error="warn")) as engine:
        with failing_writes(monkeypatch, lambda: OSError(5, "Input/output error")):
            engine.save(state(1), 1)
            engine.wait(30)
        engine.save(state(2), 2)
        engine.wait(30)
        assert engine.steps() == [2]
    assert "step 1 failed" in caplog.text


def test_the_first_copy_that_fails_fails_the_save_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B049"""
    import ckpt_engine.staging.stager as stager

    def broken(*args: Any) -> None:
        raise RuntimeError("device lost")

    with CheckpointEngine(tmp_path, config()) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(stager, "copy_part", broken)
            with pytest.raises(CheckpointError, match="device lost"):
                engine.save(state(1), 1).result(5)
        engine.save(state(2), 2).result(30)
        assert engine.steps() == [2]


def test_a_full_disk_names_step_path_and_bytes_and_leaves_the_previous_step(tmp_path: Path) -> None:
    """B106: RLIMIT_FSIZE stands in for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save(state(1), 1).result(30)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        try:
            with pytest.raises(StorageError) as caught:
                engine.save({"big": torch.ones(2 * MIB)}, 2).result(30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.step == 2 and ".distcp" in (caught.value.path or "") and caught.value.errno == 27
        assert any(ch.isdigit() for ch in caught.value.message) and "bytes" in str(caught.value)
        assert engine.steps() == [1] and value_of(engine, "latest") == 1
        assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("iter")) == ["iter_0000001"]
        engine.save({"big": torch.ones(2 * MIB)}, 2).result(30)
        assert engine.steps() == [1, 2]


def test_a_full_disk_is_foretold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B106: statvfs says less than the plan needs."""
    import ckpt_engine.engine as module

    monkeypatch.setattr(module, "free_bytes", lambda path: 10)
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save(state(1), 1).result(30)
    assert "has 10 free" in caplog.text


def test_a_dropped_handle_still_commits(tmp_path: Path) -> None:
    """B046"""
    engine = CheckpointEngine(tmp_path, config())
    engine.save(state(1), 1)
    engine.close()
    assert engine.steps() == [1]


def test_load_right_after_save_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B038, B065: the same engine waits; another one says that it isn't committed."""
    with CheckpointEngine(tmp_path, config()) as engine, CheckpointEngine(tmp_path, config()) as other:
        with blocked_writes(monkeypatch) as gate:
            live = state(3)
            engine.save(live, 3)
            for tensor in live.values():
                tensor.zero_()
            with pytest.raises(NotCommittedError):
                other.restore(state(), step=3)
            threading.Timer(0.3, gate.open).start()
            assert value_of(engine, 3) == 3


def test_one_engine_serves_many_saves_and_a_closed_one_says_so(tmp_path: Path) -> None:
    """B034, B086: alternating wait and no wait; then a new engine on the same directory."""
    before = threading.active_count()
    engine = CheckpointEngine(tmp_path, config())
    for step in range(5):
        engine.save(state(step), step)
        if step % 2:
            engine.wait(30)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.save(state(9), 9)
    assert threading.active_count() == before
    with CheckpointEngine(tmp_path, config()) as again:
        for step in (5, 6):
            again.save(state(step), step)
        again.wait(30)
        assert [value_of(again, step) for step in range(7)] == [float(step) for step in range(7)]


def test_saving_a_committed_step_again_replaces_it_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B098: the old one stays loadable until the new one is committed, also when the new one fails."""
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save(state(1), 7).result(30)
        with failing_writes(monkeypatch, lambda: OSError(28, "No space left on device")):
            assert engine.save(state(2), 7).exception(30) is not None
        assert value_of(engine, 7) == 1
        with blocked_writes(monkeypatch) as gate:
            engine.save(state(3), 7)
            with CheckpointEngine(tmp_path, config()) as reader:
                assert value_of(reader, 7) == 1
            gate.open()
        engine.wait(30)
        assert value_of(engine, 7) == 3
        with pytest.raises(StepExistsError, match="another structure"):
            engine.save({"other": torch.ones(3)}, 7)
        assert value_of(engine, 7) == 3
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("iter")] == ["iter_0000007"]


def test_a_step_in_flight_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointEngine(tmp_path, config()) as engine:
        with blocked_writes(monkeypatch) as gate:
            engine.save(state(1), 1)
            with pytest.raises(StepExistsError, match="being written"):
                engine.save(state(2), 1)
            gate.open()
        engine.wait(30)
        assert value_of(engine, 1) == 1


def test_two_engines_cannot_save_into_one_directory(tmp_path: Path) -> None:
    with CheckpointEngine(tmp_path, config()) as first, CheckpointEngine(tmp_path, config()) as second:
        first.save(state(1), 1).result(30)
        with pytest.raises(DirectoryBusyError):
            second.save(state(2), 2)
        assert value_of(second, 1) == 1  # reading is fine
        first.close()
        second.save(state(2), 2).result(30)


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, None, 2**63], ids=repr)
def test_a_bad_step_is_refused(tmp_path: Path, step: Any) -> None:
    with CheckpointEngine(tmp_path, config()) as engine:
        with pytest.raises(ConfigError, match="step"):
            engine.save(state(), step)
        with pytest.raises(ConfigError, match="train_state"):
            engine.save(state(), 1, TrainState(step=2))
    assert not list(tmp_path.glob("iter*"))


def test_a_bad_directory_or_budget_is_refused_at_construction(tmp_path: Path) -> None:
    """B092"""
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError):
        CheckpointEngine(file)
    with pytest.raises(ConfigError):
        CheckpointEngine(file / "below")
    with pytest.raises(ConfigError):
        CheckpointEngine("gs://bucket/run")
    assert not os.path.exists("gs:")
    for option in (
        {"staging_budget": MIB},
        {"keep_last": 0},
        {"writers": 0},
        {"commit_timeout": 0},
        {"extent_bytes": 5000},
    ):
        with pytest.raises(ConfigError, match=next(iter(option))):
            EngineConfig(**option)


def test_a_vanished_directory_fails_the_save_and_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B064"""
    import shutil

    target = tmp_path / "work"
    engine = CheckpointEngine(target, config())
    with blocked_writes(monkeypatch) as gate:
        handle = engine.save(state(1), 1)
        assert gate.entered.wait(10)
        shutil.rmtree(target)
        gate.open()
        error = handle.exception(30)
    assert isinstance(error, CheckpointError) and str(target) in str(error)
    assert not target.exists()
    target.mkdir()
    engine.save(state(2), 2).result(30)
    engine.close()


def test_waiting_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointEngine(tmp_path, config(max_in_flight=1)) as engine:
        with blocked_writes(monkeypatch) as gate:
            handle = engine.save(state(1), 1)
            for wait in (lambda: handle.result(0.2), lambda: engine.wait(0.2), lambda: engine.close(0.2)):
                begin = time.monotonic()
                with pytest.raises(CommitTimeoutError) as caught:
                    wait()
                assert time.monotonic() - begin < 8 and caught.value.step == 1
            gate.open()
        assert handle.result(30).step == 1


def test_hung_storage_fails_the_save_by_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that streams waits for the disk inside save(): that wait has a deadline, too."""
    big = {"big": torch.ones(8 * MIB)}
    engine = CheckpointEngine(tmp_path, config(staging_budget=8 * MIB, commit_timeout=1.0))
    with blocked_writes(monkeypatch) as gate:
        begin = time.monotonic()
        handle = engine.save(big, 1)
        assert time.monotonic() - begin < 10
        gate.open()
        with pytest.raises(CommitTimeoutError, match="step 1"):
            handle.result(30)
    engine.save(big, 2).result(30)
    engine.close()


def test_the_interpreter_drains_at_exit(tmp_path: Path) -> None:
    """B028, B046: whoever forgets close() gets the checkpoint all the same; after an exception, too."""
    script = (
        "import sys, torch\n"
        "from ckpt_engine import CheckpointEngine, EngineConfig\n"
        f"engine = CheckpointEngine({str(tmp_path)!r}, EngineConfig(staging_budget=64 << 20))\n"
        "engine.save({'t': torch.ones(8 << 20)}, 1)\n"
        "if len(sys.argv) > 1: raise ValueError('the trainer broke')\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
    with CheckpointEngine(tmp_path, config()) as engine:
        assert engine.steps() == [1]
    again = subprocess.run([sys.executable, "-c", script, "x"], timeout=60, check=False, capture_output=True, text=True)
    assert again.returncode == 1 and "the trainer broke" in again.stderr
    with CheckpointEngine(tmp_path, config()) as engine:
        assert engine.steps() == [1] and engine.verify(1).ok


def test_the_trainers_own_exception_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        failing_writes(monkeypatch, lambda: OSError(5, "Input/output error")),
        pytest.raises(ZeroDivisionError),
        CheckpointEngine(tmp_path, config()) as engine,
    ):
        engine.save(state(1), 1)
        raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["str", "Path", "bytes", "relative", "space", "slash", "symlink"])
def test_every_kind_of_path_means_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """B094"""
    real = tmp_path / "checkpöints of run 1"
    real.mkdir()
    link = tmp_path / "link"
    link.symlink_to(real)
    monkeypatch.chdir(tmp_path)
    given: Any = {
        "str": str(real),
        "Path": real,
        "bytes": os.fsencode(real),
        "relative": real.name,
        "space": real,
        "slash": f"{real}/",
        "symlink": link,
    }[kind]
    with CheckpointEngine(given, config()) as engine:
        monkeypatch.chdir("/")
        engine.save(state(1), 1).result(30)
    assert (real / "iter_0000001" / "ckpt_engine" / "commit.json").exists()
