"""Promises under hostile use: missed calls, interrupts, callbacks, signal handlers, forks, dropped engines."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt_engine import (
    CheckpointEngine,
    CheckpointError,
    CommitTimeoutError,
    EngineConfig,
    KeyMismatchError,
    PerRank,
    StateError,
)
from tests.ranks import run_ranks
from tests.sinks import blocked_writes

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"staging_budget": 16 * MIB, "commit_timeout": 20.0, **options})


def empty_on_one_rank(rank: int, world: int, directory: str) -> list[int]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    if rank == 0:  # the others have no gradients yet: a frozen stage, an expert that nobody asked
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    with CheckpointEngine(directory, config()) as engine:
        engine.save({"optim": optimizer}, 1).result(30)
        fresh = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
        engine.restore({"optim": fresh})
        empty: dict[str, Any] = {"optim": {}}
        engine.restore(empty)
        return [len(fresh.state), len(empty["optim"]["state"])]


def test_a_mapping_that_is_empty_on_one_rank_only_is_not_lost(tmp_path: Path) -> None:
    assert run_ranks(2, empty_on_one_rank, str(tmp_path)) == [[2, 2], [2, 2]]


def test_only_an_empty_state_takes_everything(tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.content: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.content

        def load_state_dict(self, content: dict[str, Any]) -> None:
            self.content = content

    full, blank = Holder(), Holder()
    full.content = {"w": torch.ones(2)}
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save({"o": full, "k": 1}, 1).result(30)
        with pytest.raises(KeyMismatchError, match="'k'"):
            engine.restore({"o": blank})
        state: dict[str, Any] = {"o": blank}
        engine.restore(state, strict=False)
    assert state == {"o": blank} and torch.equal(blank.content["w"], torch.ones(2))


def test_after_going_back_latest_is_the_branch_that_lives(tmp_path: Path) -> None:
    with CheckpointEngine(tmp_path, config()) as engine:
        for step in (10, 20, 30, 40):
            engine.save({"t": torch.tensor(float(step))}, step).result(30)
        engine.restore({"t": torch.tensor(0.0)}, step=30)
        engine.save({"t": torch.tensor(35.5)}, 35).result(30)
        found = {"t": torch.tensor(0.0)}
        restored = engine.restore(found)
        assert restored is not None and restored.step == 35 and found["t"] == 35.5
        assert engine.latest() == 35 and engine.steps() == [10, 20, 30, 35, 40]


def missed_call(rank: int, world: int, directory: str) -> list[str]:
    told = []
    with CheckpointEngine(directory, config(commit_timeout=2.0)) as engine:
        for step in range(1, 6):
            if step == 2 and rank == 1:
                time.sleep(3)
                continue
            try:
                engine.save({"t": torch.ones(3) * step}, step).result(20)
                told.append(f"{step} ok")
            except CheckpointError as error:
                told.append(f"{step} {type(error).__name__}")
    return told


def test_a_rank_that_missed_a_call_is_back_in_step_at_the_next(tmp_path: Path) -> None:
    first, second = run_ranks(2, missed_call, str(tmp_path))
    assert first == ["1 ok", "2 CommitTimeoutError", "3 ok", "4 ok", "5 ok"]
    assert second == ["1 ok", "3 ok", "4 ok", "5 ok"]


def fails_after_the_agreement(rank: int, world: int, directory: str) -> list[str]:
    import ckpt_engine.engine as module

    told = []
    with CheckpointEngine(directory, config()) as engine:
        real = module.RankLayout
        if rank == 1:

            def broken(*args: Any, **kwargs: Any) -> Any:
                raise ValueError("no layout today")

            module.RankLayout = broken  # type: ignore[assignment, misc]
        begin = time.monotonic()
        try:
            engine.save({"p": PerRank(torch.ones(3) * rank)}, 1).result(30)
        except CheckpointError as error:
            told.append(f"{error.rank} {'no layout today' in str(error)} {time.monotonic() - begin < 10}")
        module.RankLayout = real  # type: ignore[misc]
        engine.save({"p": PerRank(torch.ones(3) * rank)}, 2).result(30)
        dist.barrier()
        told += [name for name in os.listdir(directory) if ".tmp-" in name]
    return told


def test_a_failure_between_agreement_and_staging_is_told_to_every_rank(tmp_path: Path) -> None:
    assert run_ranks(2, fails_after_the_agreement, str(tmp_path)) == [["1 True True"], ["1 True True"]]


def test_no_more_threads_to_be_had_costs_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a save needs were started with the engine."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with CheckpointEngine(tmp_path, config()) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            engine.save({"t": torch.ones(3)}, 1).result(30)
        engine.save({"t": torch.ones(3)}, 2).result(30)
        assert engine.steps() == [1, 2]


def test_a_callback_cannot_wait_for_itself(tmp_path: Path) -> None:
    told: list[str] = []
    with CheckpointEngine(tmp_path, config()) as engine:

        def callback(info: Any) -> None:
            for call in (engine.wait, engine.close, lambda: engine.save({}, 9), lambda: engine.restore({})):
                try:
                    call()
                except CheckpointError as error:
                    told.append(str(error))
            raise SystemExit(3)

        engine.on_committed(callback)
        begin = time.monotonic()
        for step in (1, 2):
            engine.save({"t": torch.ones(3)}, step)
        engine.wait(20)
        assert time.monotonic() - begin < 15 and len(told) == 8 and all("callback" in text for text in told)
        assert engine.steps() == [1, 2]


def test_a_signal_handler_in_the_middle_of_a_save_is_told_so(tmp_path: Path) -> None:
    told: list[str] = []

    class Interrupting:
        def state_dict(self) -> dict[str, Any]:
            try:
                engine.close(1)
            except CheckpointError as error:
                told.append(str(error))
            return {"n": 1}

        def load_state_dict(self, state: Any) -> None:
            pass

    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save({"x": Interrupting()}, 1).result(30)
    assert len(told) == 1 and "within another call" in told[0]


def test_close_has_a_deadline_while_another_thread_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CheckpointEngine(tmp_path, config(staging_budget=4 * MIB))
    with blocked_writes(monkeypatch) as gate:
        thread = threading.Thread(target=lambda: engine.save({"t": torch.ones(8 * MIB)}, 1))
        thread.start()
        assert gate.entered.wait(10)
        begin = time.monotonic()
        with pytest.raises(CommitTimeoutError):
            engine.close(0.5)
        assert time.monotonic() - begin < 10
        gate.open()
        thread.join(30)
    engine.close(30)
    assert engine.steps() == [1]


def test_close_comes_back_from_storage_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CheckpointEngine(tmp_path, config(commit_timeout=0.5))
    with blocked_writes(monkeypatch) as gate:
        handle = engine.save({"t": torch.ones(8)}, 1)
        assert isinstance(handle.exception(20), CommitTimeoutError)
        begin = time.monotonic()
        with pytest.raises(CommitTimeoutError, match="stuck"):
            engine.close(1)
        assert time.monotonic() - begin < 10
        gate.open()
    engine.close()


FORKED = """
import os, sys, time, torch
from ckpt_engine import CheckpointEngine, EngineConfig
real = os.pwrite
def slow(fd, data, offset):
    time.sleep(1.5)
    return real(fd, data, offset)
os.pwrite = slow
engine = CheckpointEngine(sys.argv[1], EngineConfig(staging_budget=16 << 20, commit_timeout=40))
handle = engine.save({"t": torch.ones(100)}, 1)
begin = time.monotonic()
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
assert time.monotonic() - begin < 20, time.monotonic() - begin   # not the commit timeout
handle.result(30)
engine.save({"t": torch.ones(100)}, 2).result(30)
assert engine.steps() == [1, 2]
"""


def test_a_forked_child_leaves_the_saves_to_its_parent(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], timeout=60, check=True)


def test_a_dropped_engine_frees_its_directory(tmp_path: Path) -> None:
    def run(step: int) -> None:
        engine = CheckpointEngine(tmp_path, config())
        engine.save({"t": torch.ones(3)}, step).result(30)
        raise ValueError

    for step in (1, 2, 3):
        with pytest.raises(ValueError):
            run(step)
        gc.collect()
    with CheckpointEngine(tmp_path, config()) as engine:
        assert engine.steps() == [1, 2, 3]


def test_a_directory_that_can_only_be_read_is_good_for_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save({"t": torch.ones(3)}, 1).result(30)
    real = os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) and str(tmp_path) in os.fspath(path):
            raise OSError(30, "Read-only file system", path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    found = {"t": torch.zeros(3)}
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.restore(found)
        with pytest.raises(CheckpointError):
            engine.save(found, 2)
    assert found["t"].sum() == 3


def sets(rank: int, world: int, directory: str) -> None:
    with CheckpointEngine(directory, config()) as engine:
        state = {"vocab": {"a", "b", "c", "d"}, "frozen": (frozenset("xyz"), torch.ones(4)[: 2 + rank][:2])}
        engine.save(state, 1).result(30)
        with pytest.raises(StateError, match="vocab"):
            engine.save({**state, "vocab": {"a", str(rank)}}, 2)


def test_equal_sets_are_equal_on_every_rank(tmp_path: Path) -> None:
    """Each process has a hash seed of its own, and so its own order of the items."""
    run_ranks(2, sets, str(tmp_path))


def test_a_dotted_neighbour_is_no_part_of_an_empty_container(tmp_path: Path) -> None:
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save({"a": {}, "a.b": 5}, 1).result(30)
        state: dict[str, Any] = {"a": {}, "a.b": 0}
        engine.restore(state)
        assert state == {"a": {}, "a.b": 5}
