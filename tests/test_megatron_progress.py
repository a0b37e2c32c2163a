"""Promise: the counters of a checkpoint are taken from where Megatron-LM keeps them, at the moment of the call."""

from __future__ import annotations

import argparse
import sys
import types
from typing import Any

import pytest

from ckpt_engine import TrainState
from ckpt_engine.integrations.megatron.progress import snapshot

pytestmark = pytest.mark.timeout(30)


def state(**more: Any) -> dict[str, Any]:
    args = argparse.Namespace(
        consumed_train_samples=80, skipped_train_samples=1, consumed_valid_samples=5, do_train=True
    )
    return {"args": args, "iteration": 10, "num_floating_point_operations_so_far": 3.0, **more}


def taken(found: bytes | None) -> TrainState:
    assert found is not None
    return TrainState.from_bytes(found)


def test_args_are_the_counters_where_there_is_nothing_else() -> None:
    expected = TrainState(
        step=10,
        consumed_train_samples=80,
        skipped_train_samples=1,
        consumed_valid_samples=5,
        floating_point_operations_so_far=3.0,
        do_train=True,
    )
    assert taken(snapshot(state())) == expected


@pytest.mark.parametrize("place", ["state", "globals"])
def test_a_train_state_object_wins_over_args(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Which megatron.training is going to have; args would hold what was on the command line then."""
    live = types.SimpleNamespace(step=10, consumed_train_samples=160, skipped_train_samples=0, consumed_valid_samples=7)
    given: dict[str, Any] = {"train_state": live} if place == "state" else {}
    if place == "globals":
        module = types.ModuleType("megatron.training.global_vars")
        module.get_train_state = lambda: live  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    bytes_then = snapshot(state(**given))
    live.consumed_train_samples = 999
    assert taken(bytes_then).consumed_train_samples == 160
    assert taken(bytes_then).consumed_valid_samples == 7


def test_a_train_state_that_isnt_ready_leaves_args(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_ready() -> Any:
        raise RuntimeError("train state is not initialized")

    module = types.ModuleType("megatron.training.global_vars")
    module.get_train_state = not_ready  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    assert taken(snapshot(state())).consumed_train_samples == 80


def test_other_states_have_no_counters() -> None:
    assert snapshot({"model": 1}) is None
