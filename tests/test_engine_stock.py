"""Promise: stock loaders are the oracle (design invariant 8). They read what we write, we read what they write, bit for bit."""

from __future__ import annotations

import datetime
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_engine import CheckpointEngine, EngineConfig, KeyMismatchError, RngState, TrainState
from tests.test_layout import DTYPES, example, raw

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"staging_budget": 64 * MIB, "commit_timeout": 30.0, **options})


def rich_state() -> dict[str, Any]:
    """Every dtype in every odd shape and stride, and values of many kinds."""
    tensors: dict[str, Any] = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        base = example((6, 8), dtype, 1)
        tensors[name] = {
            "scalar": example((), dtype, 2),
            "one": example((1,), dtype, 3),
            "empty": example((0,), dtype),
            "empty2": example((0, 4), dtype),
            "matrix": base,
            "transposed": base.t(),
            "strided": base[::2, 1::3],
            "expanded": base[:1].expand(5, 8),
            "channels": example((2, 3, 4, 5), dtype, 4).to(memory_format=torch.channels_last),
        }
    tensors["conj"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    tensors["parameter"] = torch.nn.Parameter(torch.ones(3))
    return {
        "tensors": tensors,
        "values": {
            "int": 3,
            "float": 0.1,
            "none": None,
            "text": "ä",
            "flag": True,
            "bytes": b"\0\1",
            "tuple": (1, "x"),
        },
        "list": [{"a": 1}, {"b": torch.ones(2)}],
        "plain": [1, 2, 3],
        "when": datetime.datetime(2026, 1, 2),
        "set": {1, 2},
        "e": {},
        "empty_list": [],
        "by_id": {0: torch.zeros(2), 3: {"step": torch.tensor(5.0)}},
    }


def blank(value: Any) -> Any:
    """The same structure with nothing in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    if isinstance(value, list) and any(isinstance(v, (dict, torch.Tensor)) for v in value):
        return [blank(v) for v in value]
    return type(value)() if isinstance(value, (list, set)) else None


def assert_same(found: Any, wanted: Any, path: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor), path
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, path
        assert raw(found.detach().resolve_conj()) == raw(wanted.detach().resolve_conj()), path
    elif isinstance(wanted, dict):
        assert set(found) == set(wanted), path
        for key, value in wanted.items():
            assert_same(found[key], value, f"{path}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), path
        for number, value in enumerate(wanted):
            assert_same(found[number], value, f"{path}.{number}")
    else:
        assert type(found) is type(wanted) and found == wanted, path


@pytest.mark.parametrize(
    "options", [{}, {"staging_budget": 2 * MIB}, {"writers": 1}, {"writers": 5}, {"direct_io": False}], ids=str
)
def test_everything_round_trips(tmp_path: Path, options: dict[str, Any]) -> None:
    """B043, B068: dtypes, 0-d, empty, views, containers, into a blank copy and into nothing at all."""
    state = rich_state()
    with CheckpointEngine(tmp_path, config(**options)) as engine:
        info = engine.save(state, 1).result(30)
        found = blank(state)
        engine.restore(found)
        assert_same(found, state)
        nothing: dict[str, Any] = {}
        engine.restore(nothing)
        assert_same({k: nothing[k] for k in state}, state)
        assert engine.verify(1).ok
    for shard in Path(info.path).glob("*.distcp"):
        with zipfile.ZipFile(
            io.BytesIO(shard.read_bytes())
        ) as archive:  # the last record; the others are checked below
            assert archive.testzip() is None


def test_stock_dcp_loads_it(tmp_path: Path) -> None:
    state = rich_state()
    with CheckpointEngine(tmp_path, config()) as engine:
        path = engine.save(state, 1, TrainState(step=1)).result(30).path
    found = blank(state)
    for key in ("int", "float", "text", "flag", "bytes", "tuple"):
        found["values"][key] = 0
    dcp.load(found, checkpoint_id=path, no_dist=True)
    assert_same(found["tensors"], state["tensors"])
    assert_same(found["values"], state["values"])
    assert_same(found["list"], state["list"])
    assert_same(found["by_id"], state["by_id"])


def test_stock_dcp_to_torch_save_converts_it(tmp_path: Path) -> None:
    state = {"model": {"w": torch.rand(30, 40), "h": torch.rand(7).bfloat16()}, "n": 3, "list": [{"t": torch.ones(2)}]}
    with CheckpointEngine(tmp_path, config()) as engine:
        path = engine.save(state, 1).result(30).path
    dcp_to_torch_save(path, tmp_path / "all.pt")
    assert_same(torch.load(tmp_path / "all.pt", weights_only=False), state)


def test_every_record_passes_zipfile(tmp_path: Path) -> None:
    with CheckpointEngine(tmp_path, config()) as engine:
        path = Path(engine.save(rich_state(), 1).result(30).path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    assert len(metadata.storage_data) == len(metadata.state_dict_metadata) > 100
    for info in metadata.storage_data.values():
        with open(path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            with zipfile.ZipFile(io.BytesIO(file.read(info.length))) as archive:
                assert archive.testzip() is None


def test_metadata_is_that_of_stock_dcp(tmp_path: Path) -> None:
    """B079: planner data, state metadata and version equal what dcp.save writes for the same state; offsets are ours."""
    state = {"m": {"w": torch.ones(4, 4), "b": torch.ones(4)}, "n": 1}
    with CheckpointEngine(tmp_path / "ours", config()) as engine:
        path = Path(engine.save(state, 1).result(30).path)
    dcp.save(dict(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    ours = pickle.loads((path / ".metadata").read_bytes())
    stock = pickle.loads((tmp_path / "stock" / ".metadata").read_bytes())
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert set(ours.storage_data) == set(stock.storage_data)
    assert getattr(ours, "version", None) == getattr(stock, "version", None)


def test_what_stock_dcp_wrote_is_restored(tmp_path: Path) -> None:
    state = rich_state()
    state["tensors"].pop("conj")
    target = tmp_path / "iter_0000005"
    dcp.save(dict(state), checkpoint_id=target, no_dist=True)
    with CheckpointEngine(tmp_path, config()) as engine:
        assert engine.restore(blank(state)) is None  # unverified, and so never chosen by itself
        found = blank(state)
        restored = engine.restore(found, step=5)
        assert restored is not None and restored.train_state is None
        assert_same(found, state)
        other = blank(state)
        assert engine.restore(other, path=str(target)) is not None
        assert_same(other, state)


def test_an_optimizer_of_a_stock_checkpoint_gets_its_state_back(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    dcp.save(
        {"model": model.state_dict(), "optim": optimizer.state_dict()},
        checkpoint_id=tmp_path / "iter_0000001",
        no_dist=True,
    )
    fresh = torch.nn.Linear(4, 4)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.restore({"model": fresh, "optim": fresh_optimizer}, step=1)
    assert_same(fresh_optimizer.state_dict(), optimizer.state_dict())


def test_legacy_fields_rebuild_the_train_state(tmp_path: Path) -> None:
    import argparse

    args = argparse.Namespace(iteration=1, consumed_train_samples=80, skipped_train_samples=1, consumed_valid_samples=6)
    state = {"w": torch.ones(2), "iteration": 40, "args": args, "num_floating_point_operations_so_far": 2.0}
    dcp.save(dict(state), checkpoint_id=tmp_path / "iter_0000040", no_dist=True)
    with CheckpointEngine(tmp_path, config()) as engine:
        restored = engine.restore(dict(state), step=40)
        assert restored is not None
        legacy = TrainState(40, 80, 1, 6, 2.0)
        assert restored.train_state == legacy
        sidecar = TrainState(41, 81)
        engine.save(dict(state), 41, sidecar).result(30)
        restored = engine.restore(dict(state))
        assert restored is not None and restored.train_state == sidecar  # wins over the legacy fields


def test_missing_and_unexpected_keys_are_an_error_or_a_report(tmp_path: Path) -> None:
    """B104"""
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save({"a": torch.ones(2), "moments": {"m": torch.ones(3)}}, 1).result(30)
        kept = torch.full((4,), 5.0)
        found = {"a": torch.zeros(2), "new": kept}
        with pytest.raises(KeyMismatchError) as caught:
            engine.restore(found)
        assert caught.value.missing == ("new",) and caught.value.unexpected == ("moments.m",)
        assert found["a"].sum() == 0
        restored = engine.restore(found, strict=False)
        assert restored is not None
        assert restored.report.missing == ("new",) and restored.report.unexpected == ("moments.m",)
        assert found["a"].sum() == 2 and (kept == 5).all()


def test_shapes_and_dtypes_are_compared_before_anything_is_loaded(tmp_path: Path) -> None:
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save({"a": torch.ones(2, 3), "b": torch.ones(2)}, 1).result(30)
        for strict in (True, False):
            b = torch.zeros(2)
            with pytest.raises(KeyMismatchError, match=r"'a'.*\(3, 2\).*\(2, 3\)"):
                engine.restore({"a": torch.zeros(3, 2), "b": b}, strict=strict)
            assert b.sum() == 0
        half = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(2)}
        with pytest.raises(KeyMismatchError, match="bfloat16"):
            engine.restore(half)
        engine.restore(half, strict=False)
        assert half["a"].sum() == 6


def test_optimizer_state_survives_gradients_being_present(tmp_path: Path) -> None:
    """B074: with .grad set, before and after the first step, into a fresh pair."""
    for steps in (0, 1):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        for _ in range(steps):
            optimizer.step()
        fresh = torch.nn.Linear(4, 4)
        fresh_optimizer = torch.optim.AdamW(fresh.parameters())
        fresh(torch.ones(1, 4)).sum().backward()
        with CheckpointEngine(tmp_path / str(steps), config()) as engine:
            engine.save({"model": model, "optim": optimizer}, 1).result(30)
            engine.restore({"model": fresh, "optim": fresh_optimizer})
        assert_same(fresh_optimizer.state_dict(), optimizer.state_dict())
        assert len(fresh_optimizer.state) == 2 * steps


def test_a_state_without_tensors_is_whole(tmp_path: Path) -> None:
    """B110: RNG, scheduler and scalars alone; and nothing at all."""
    with CheckpointEngine(tmp_path, config()) as engine:
        state = {"rng": RngState(), "sched": {"last": 3}, "n": 1}
        engine.save(state, 1).result(30)
        wanted = torch.rand(4)
        torch.rand(100)
        found = {"rng": RngState(), "sched": {"last": 0}, "n": 0}
        engine.restore(found)
        assert torch.equal(torch.rand(4), wanted) and found["n"] == 1 and found["sched"] == {"last": 3}
        engine.save({}, 2).result(30)
        assert engine.restore({}, step=2) is not None and engine.verify(2).ok


def test_a_resumed_run_repeats_the_losses_bit_for_bit(tmp_path: Path) -> None:
    """B067: asynchronous and synchronous saves hold the same bits, and training goes on exactly."""
    torch.manual_seed(3)

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            optimizer.zero_grad()
            loss = (model(torch.rand(8, 16)) - 1).square().mean() + 0.01 * torch.rand(())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = fresh()
    state = {"model": model, "optim": optimizer, "rng": RngState()}
    with CheckpointEngine(tmp_path / "async", config()) as ours, CheckpointEngine(tmp_path / "sync", config()) as sync:
        train(model, optimizer, 10)
        sync.save(state, 10).result(30)
        ours.save(state, 10)
        losses = train(model, optimizer, 10)
        ours.wait(30)
        for engine in (ours, sync):
            model, optimizer = fresh()
            engine.restore({"model": model, "optim": optimizer, "rng": RngState()})
            assert train(model, optimizer, 10) == losses
    shards = [
        [p.read_bytes() for p in sorted((tmp_path / d / "iter_0000010").glob("*.distcp"))] for d in ("async", "sync")
    ]
    assert shards[0] == shards[1]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    structure=st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False),
            st.text(max_size=5),
            st.binary(max_size=5),
            st.tuples(st.integers()),
            st.builds(
                lambda shape, dtype, seed: example(tuple(shape), dtype, seed),
                st.lists(st.integers(0, 5), max_size=3),
                st.sampled_from(DTYPES),
                st.integers(0, 9),
            ),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.text(alphabet="abc", min_size=1, max_size=2), inner, max_size=3),
            st.dictionaries(st.integers(0, 20), inner, max_size=3),
        ),
        max_leaves=12,
    )
)
def test_any_nested_state_round_trips(tmp_path_factory: pytest.TempPathFactory, structure: Any) -> None:
    with CheckpointEngine(tmp_path_factory.mktemp("any"), config()) as engine:
        engine.save({"s": structure}, 1).result(30)
        found: dict[str, Any] = {}
        engine.restore(found)
    assert_same(found, {"s": structure})
