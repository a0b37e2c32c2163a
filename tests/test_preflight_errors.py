"""Promises of ``engine.plan``: a state that can't be saved is refused at step 0 with the save's own error, on every rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckpt_engine import CheckpointEngine, CheckpointError, CommitTimeoutError, PerRank, StateError
from tests.preflight_tools import config, file_sizes, planned_sizes
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CheckpointEngine]:
    with CheckpointEngine(tmp_path, config()) as made:
        yield made


# -- it fails as the save would --------------------------------------------------------------------------------------------


def itself() -> dict[str, Any]:
    state: dict[str, Any] = {"inner": {}}
    state["inner"]["outer"] = state
    return state


BAD_STATES = {
    "unpicklable": lambda: {"a": torch.zeros(2), "lock": threading.Lock()},
    "sparse": lambda: {"s": torch.zeros(4, 4).to_sparse()},
    "meta": lambda: {"m": torch.zeros(4, device="meta")},
    "same key": lambda: {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}},
    "odd key": lambda: {("a", 1): torch.zeros(1)},
    "itself": itself,
    "no mapping": lambda: [torch.zeros(1)],
}


@pytest.mark.parametrize("kind", list(BAD_STATES))
def test_a_state_that_cannot_be_saved_raises_what_the_save_raises(
    engine: CheckpointEngine, tmp_path: Path, kind: str
) -> None:
    """B112: told at step 0, not at the first checkpoint."""
    state: Any = BAD_STATES[kind]()
    with pytest.raises(StateError) as planned:
        engine.plan(state)
    assert os.listdir(tmp_path) == []
    with pytest.raises(StateError) as saved:
        engine.save(state, 1)
    assert (planned.value.message, planned.value.key, planned.value.phase) == (
        saved.value.message,
        saved.value.key,
        saved.value.phase,
    )
    good = {"w": torch.zeros(3)}
    assert engine.plan(good, probe=False).verdict == "fits"
    engine.save(good, 2).result(20)


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    engine = CheckpointEngine(tmp_path, config())
    engine.close()
    with pytest.raises(CheckpointError, match="closed"):
        engine.plan({})


# -- several ranks -----------------------------------------------------------------------------------------------------------


def bad_state(rank: int, world: int, kind: str) -> dict[str, Any]:
    full = torch.arange(24.0).reshape(6, 4)
    if kind == "shape":
        return {"w": torch.zeros(4 + rank)}
    if kind == "value":
        return {"lr": 0.1 * (rank + 1)}
    mesh = init_device_mesh("cpu", (world,))
    if kind == "hole":  # rank 1's rows are on no rank
        rows = distribute_tensor(full, mesh, [Shard(0)])
        return {"rows": rows} if rank == 0 else {"other": 1}
    if kind == "short":  # both ranks have a row less than their placement says
        return {"rows": DTensor.from_local(full[:2], mesh, [Shard(0)], run_check=False, shape=(6, 4), stride=(4, 1))}
    return {"lock": threading.Lock()} if rank else {"lock": 1}  # "one rank"


def rehearse(rank: int, world: int, directory: str) -> dict[str, Any]:
    """Everything that two ranks are asked here, in one go: starting them takes longer than all of it."""
    found: dict[str, Any] = {"bad": {}}
    mesh = init_device_mesh("cpu", (world,))
    state = {
        "rows": distribute_tensor(torch.randn(64, 128), mesh, [Shard(0)]),
        "replicated": torch.arange(1000.0),
        "mine": PerRank({"rank": rank}),
        "lr": 0.5,
    }
    with CheckpointEngine(directory, config(commit_timeout=3.0, keep_last=2)) as engine:
        for kind in ("shape", "value", "hole", "short", "one rank"):
            outcome = []
            for call in (engine.plan, lambda bad: engine.save(bad, 1)):
                try:
                    call(bad_state(rank, world, kind))
                    outcome.append(None)
                except CheckpointError as error:
                    outcome.append((type(error).__name__, error.message, error.rank))
            found["bad"][kind] = outcome
        before = set(os.listdir(directory))
        found["report"] = engine.plan(state)
        found["left"] = set(os.listdir(directory)) - before
        info = engine.save(state, 1).result(20)
        found["reused"] = info.stats.reused_plan
        found["files"] = file_sizes(info.path)
        if rank == 0:  # rank 1 misses a rehearsal, and both are in step again at the next one
            with pytest.raises(CommitTimeoutError) as late:
                engine.plan(state)
            found["silent"] = late.value.silent_ranks
            Path(directory + "-late").touch()
        while not os.path.exists(directory + "-late"):
            time.sleep(0.01)
        found["again"] = engine.plan(state)
        found["second"] = engine.save(state, 2).result(20).bytes
        engine.verify(2)
    return found


def test_two_ranks_rehearse_together_and_their_saves_stay_in_step(tmp_path: Path) -> None:
    """B112: shards that don't cover, ranks that disagree: at step 0, the error of a save, the same on both ranks."""
    zero, one = run_ranks(2, rehearse, str(tmp_path / "checkpoints"))
    for kind, (planned, saved) in zero["bad"].items():
        assert planned is not None and saved is not None, kind
        assert planned[:2] == saved[:2], kind
        assert one["bad"][kind][0][:2] == planned[:2], kind
        assert planned[0] == "StateError", (kind, planned)
    assert zero["bad"]["one rank"][0][2] == 1
    report = zero["report"]
    assert report == one["report"] and report.verdict == "fits"
    assert planned_sizes(report) == zero["files"] and {rank.rank for rank in report.ranks} == {0, 1}
    assert zero["left"] == one["left"] == set()
    assert zero["reused"] and one["reused"]
    assert report.disk.held == 3 and report.ranks[0].memory.local_ranks == 2
    assert all(rank.speeds.write is not None for rank in report.ranks)
    assert zero["silent"] == (1,)
    assert zero["again"] == one["again"] and zero["second"] == one["second"] == report.bytes
