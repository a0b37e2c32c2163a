"""Promises of the state: what is flattened comes back as it was, or is refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ckpt_engine.errors import ConfigError, StateError
from ckpt_engine.state import PerRank, RngState, assign, build_nested, check_tensor, flatten
from ckpt_engine.train_state import TrainState

pytestmark = pytest.mark.timeout(60)


def test_flat_keys_are_those_of_stock_dcp() -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    t = torch.ones(2)
    state = {
        "a": {"b": t, "c": [t, {"d": 1}]},
        "n": [1, 2],
        "s": "x",
        "i": {0: t, 7: {"x": t}},
        "dotted.key": t,
        "t": (1, t),
    }
    flat = flatten(state)
    stock, paths = flatten_state_dict(state)
    assert list(flat.values) == list(stock)
    assert flat.paths == paths
    assert flat.int_keys == {"i"}


def test_an_empty_mapping_is_kept() -> None:
    flat = flatten({"e": {}, "x": {"f": {}}, "l": [{}]})
    assert flat.values == {} and flat.empties == {"e": ("e",), "x.f": ("x", "f"), "l.0": ("l", 0)}


@pytest.mark.parametrize("key", [(1, 2), 1.5, None, True, b"x"], ids=repr)
def test_a_key_that_cannot_be_flattened_is_refused_by_name(key: Any) -> None:
    with pytest.raises(StateError, match="can't be flattened") as caught:
        flatten({"outer": {key: torch.ones(1)}})
    assert caught.value.key == f"outer.{key}"


def test_colliding_keys_are_refused_by_name() -> None:
    """B068: 'a.b' and a -> b would silently become one."""
    with pytest.raises(StateError, match=r"'a\.b'"):
        flatten({"a.b": 1, "a": {"b": 2}})
    with pytest.raises(StateError):
        flatten({"a": {0: 1, "0": 2}})


def test_mixed_key_types_are_refused() -> None:
    with pytest.raises(StateError, match="mixed"):
        flatten({"a": {0: 1, "x": 2}})


def test_objects_are_opened_at_any_depth_and_wrappers_leave_no_trace() -> None:
    model = torch.nn.Linear(2, 3)
    flat = flatten({"parts": [{"model": model}], "compiled": torch.compile(model)})
    assert set(flat.values) == {"parts.0.model.weight", "parts.0.model.bias", "compiled.weight", "compiled.bias"}


def test_an_optimizer_round_trips_through_flat_values() -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    flat = flatten({"optim": optimizer})
    assert "optim.state.0.exp_avg" in flat.values and flat.int_keys == {"optim.state"}
    fresh = torch.optim.AdamW(model.parameters(), lr=5.0)
    state = {"optim": fresh}
    target = flatten(state)
    assert target.empties == {"optim.state": ("optim", "state")}
    target.paths.update(target.empties)
    children = {k: v for k, v in flat.values.items() if k.startswith("optim.state.")}
    nested = build_nested(children, flat.paths, flat.int_keys, 2)
    assert set(nested) == {0, 1} and set(nested[0]) == {"step", "exp_avg", "exp_avg_sq"}
    assign(state, target, {"optim.state": nested, "optim.param_groups.0.lr": 0.25})
    assert fresh.param_groups[0]["lr"] == 0.25
    assert torch.equal(fresh.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_values_go_back_into_dicts_lists_and_per_rank_wrappers() -> None:
    state: dict[str, Any] = {"a": [{"x": 1}, {"x": 2}], "p": PerRank({"seed": 1}), "q": PerRank(3), 5: {"y": 0}}
    with pytest.raises(StateError):
        flatten(state)  # str and int at the top
    state["i"] = {5: state.pop(5)}
    flat = flatten(state, rank=4)
    assert flat.values == {"a.0.x": 1, "a.1.x": 2, "p.rank4.seed": 1, "q.rank4": 3, "i.5.y": 0}
    assign(state, flat, {"a.1.x": 9, "p.rank4.seed": 8, "q.rank4": 7, "i.5.y": 6})
    assert (
        state["a"][1]["x"] == 9
        and state["p"].value == {"seed": 8}
        and state["q"].value == 7
        and state["i"] == {5: {"y": 6}}
    )


def test_rng_state_repeats_python_numpy_and_torch() -> None:
    numpy = pytest.importorskip("numpy")
    rng = RngState()
    saved = rng.state_dict()
    first = (random.random(), numpy.random.rand(), torch.rand(3))
    rng.load_state_dict(saved)
    again = (random.random(), numpy.random.rand(), torch.rand(3))
    assert first[:2] == again[:2] and torch.equal(first[2], again[2])


class Wrapped(torch.Tensor):
    """A quantised tensor as Transformer Engine has it: an empty storage of its own, the payload in attributes."""

    @staticmethod
    def __new__(cls, payload: torch.Tensor, scale: float) -> Wrapped:
        self = torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=torch.float32)
        self.payload, self.scale = payload, scale
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def odd_tensors() -> dict[str, torch.Tensor]:
    return {
        "wrapper": Wrapped(torch.ones(4, dtype=torch.uint8), 2.0),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(3, device="meta"),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }


@pytest.mark.parametrize("kind", list(odd_tensors()))
def test_a_tensor_that_cannot_be_saved_exactly_is_refused_by_name(kind: str) -> None:
    """B026: a wrapper subclass was staged as garbage without an error."""
    with pytest.raises(StateError, match=r"model\.weight") as caught:
        check_tensor("model.weight", odd_tensors()[kind])
    assert caught.value.key == "model.weight" and caught.value.hint


def test_train_state_is_frozen_and_exact() -> None:
    counter = torch.tensor(7)
    state = TrainState(step=25, consumed_train_samples=counter, floating_point_operations_so_far=1e21, do_train=True)  # type: ignore[arg-type]
    counter += 1
    assert state.consumed_train_samples == 7
    with pytest.raises(AttributeError):
        state.step = 26  # type: ignore[misc]
    assert TrainState.from_bytes(state.to_bytes()) == state
    dtypes = {k: v.dtype for k, v in state.state_dict().items()}
    assert dtypes == {
        "step": torch.int64,
        "consumed_train_samples": torch.int64,
        "skipped_train_samples": torch.int64,
        "consumed_valid_samples": torch.int64,
        "floating_point_operations_so_far": torch.float64,
        "do_train": torch.bool,
        "do_valid": torch.bool,
        "do_test": torch.bool,
    }
    assert all(v.shape == () for v in state.state_dict().values())


def test_train_state_mirrors_megatron_args() -> None:
    import argparse

    args = argparse.Namespace(
        iteration=9, consumed_train_samples=72, num_floating_point_operations_so_far=3.5, do_train=1
    )
    state = TrainState.from_args(args, skipped_train_samples=2)
    assert (state.step, state.consumed_train_samples, state.skipped_train_samples) == (9, 72, 2)
    back = argparse.Namespace()
    state.apply_to_args(back)
    assert TrainState.from_args(back) == state


@pytest.mark.parametrize(
    "bad", [{"step": -1}, {"step": 1.5}, {"consumed_train_samples": "x"}, {"step": 2**63}], ids=repr
)
def test_train_state_refuses_what_it_cannot_hold(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        TrainState(**bad)
