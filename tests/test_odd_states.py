"""Promise: a state that can't be saved exactly is refused by the name of its key before a byte is written; an odd one that can be is."""

from __future__ import annotations

import collections
import io
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from ckpt_engine import CheckpointEngine, EngineConfig, PerRank, StateError
from ckpt_engine.commit.manifest import parse_commit
from ckpt_engine.layout.records import _stand_in, make_template
from ckpt_engine.planning import Planner, pickle_value, value_digest
from ckpt_engine.state import flatten
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"staging_budget": 16 * MIB, "commit_timeout": 20.0, **options})


def refused(directory: Path, state: dict[str, Any]) -> StateError:
    """The error of a save of ``state``; nothing may have been written for it."""
    with CheckpointEngine(directory, config()) as engine:
        with pytest.raises(StateError) as caught:
            engine.save(state, 1)
    assert not [name for name in os.listdir(directory) if name.startswith("iter_")]
    return caught.value


def judged(*states: dict[str, Any]) -> Planner:
    """Rank 0's planner after it has judged the plans of one rank per state."""
    planners = [Planner(rank) for rank in range(len(states))]
    payloads = []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        flat = flatten(state, rank=rank)
        blobs = {key: pickle_value(key, v) for key, v in flat.values.items() if not isinstance(v, torch.Tensor)}
        payloads.append(planner.local_plan(flat, blobs))
    planners[0].judge_plan(payloads)
    return planners[0]


def merged_empties(*states: dict[str, Any]) -> set[tuple[str | int, ...]]:
    return set(judged(*states)._global[3])


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": {}, "a": {"b": 5}},
        {"a": {"b": 5}, "a.b": {}},
        {"a.b": {}, "a": {"b": {}}},
        {"a.b": {}, "a": {"b": {"c": 5}}},
        {"a": {"b": {"c": 5}}, "a.b": {}},
        {"l": [{}], "l.0": 3},
        {"a.b": {1: "x"}, "a": {"b": {"2": "y"}}},
        {"a.b": {"2": "y"}, "a": {"b": {1: "x"}}},
    ],
    ids=repr,
)
def test_containers_that_flatten_to_one_key_are_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    """B068, for empty mappings and for those with int keys: one of the two would come back as the other."""
    error = refused(tmp_path, state)
    assert error.key in ("a.b", "l.0") and "two values flatten to the key" in str(error)


def test_a_mapping_without_name_may_not_have_int_keys() -> None:
    assert flatten({"": {"x": 1}}).values == {".x": 1}
    with pytest.raises(StateError, match="int keys"):
        flatten({"": {1: "x"}})


def test_dots_in_keys_that_collide_with_nothing_are_fine(tmp_path: Path) -> None:
    state = {"a.b": 1, "a": {"c": 2}, "w.x": {"y": {}}, "w": {"z": {1: torch.ones(2)}}}
    flat = flatten(state)
    assert flat.values.keys() == {"a.b", "a.c", "w.z.1"} and flat.empties == {"w.x.y": ("w.x", "y")}


def test_what_is_empty_on_one_rank_only_is_not_recorded_as_empty() -> None:
    full = {"optim": {"state": {0: {"step": 1}}}, "e": {}, "v": 3}
    assert merged_empties({"optim": {"state": {}}, "e": {}}, full) == {("e",)}
    assert merged_empties(full, {"optim": {"state": {}}, "e": {}, "v": {}}) == {("e",)}
    assert merged_empties({"a": {}}, {"a": {"b": {}}}) == {("a", "b")}
    assert merged_empties({"a": {}, "a-b": 1, "a.b": {}, "ab": 2}) == {("a",), ("a.b",)}


def test_a_key_with_two_paths_on_two_ranks_is_refused() -> None:
    with pytest.raises(StateError, match=r"'a\.b'") as caught:
        merged_empties({"a.b": 1}, {"x": 2, "a": {"b": 1}})
    assert caught.value.key == "a.b"


def optimizer_on_one_rank(rank: int, world: int, directory: str) -> list[str]:
    def state(filled: bool) -> dict[str, Any]:
        content = {n: {"m": torch.full((4,), float(n + 1))} for n in range(2)} if filled else {}
        return {"optim": {"state": content}, "n": 1}

    with CheckpointEngine(directory, config()) as engine:
        engine.save(state(rank == 0), 1).result(30)
        found = state(False)
        found["n"] = 0
        engine.restore(found)
    return [f"{key}: {value['m'].tolist()}" for key, value in found["optim"]["state"].items()]


def test_optimizer_state_that_one_rank_has_comes_back(tmp_path: Path) -> None:
    expected = ["0: [1.0, 1.0, 1.0, 1.0]", "1: [2.0, 2.0, 2.0, 2.0]"]
    assert run_ranks(2, optimizer_on_one_rank, str(tmp_path)) == [expected, expected]
    record = tmp_path / "iter_0000001" / "ckpt_engine" / "commit.json"
    assert parse_commit(record.read_bytes(), path=str(record)).empty == ()


def cyclic_states() -> dict[str, tuple[dict[str, Any], str]]:
    one: dict[str, Any] = {"x": {"w": torch.ones(1)}}
    one["x"]["me"] = one["x"]
    root: dict[str, Any] = {"w": 1}
    root["r"] = root
    items: list[Any] = [1]
    items.append(items)
    mixed: dict[str, Any] = {"l": [{"w": 1}]}
    mixed["l"][0]["up"] = mixed["l"]
    wrapped: dict[str, Any] = {}
    wrapped["p"] = PerRank(wrapped)
    return {
        "dict": (one, "x.me"),
        "root": (root, "r"),
        "list": ({"items": items}, "items.1"),
        "mixed": (mixed, "l.0.up"),
        "per rank": (wrapped, "p.rank0"),
    }


@pytest.mark.parametrize("kind", list(cyclic_states()))
def test_a_state_that_contains_itself_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    state, key = cyclic_states()[kind]
    error = refused(tmp_path, state)
    assert error.key == key and "contain itself" in str(error)


# -- tensors ---------------------------------------------------------------------------------------------------------


def test_a_tensor_without_its_memory_is_refused_at_every_save(tmp_path: Path) -> None:
    """The off-load idiom of RL trainers and FSDP1: reading such a tensor ends the process."""
    weight = torch.ones(1000)
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save({"w": weight, "p": PerRank({"v": weight})}, 1).result(30)
        weight.untyped_storage().resize_(0)
        with pytest.raises(StateError, match="0 of the 4000 bytes") as caught:
            engine.save({"w": weight, "p": PerRank({"v": weight})}, 2)
        assert caught.value.key == "w"
        with pytest.raises(StateError) as caught:
            engine.save({"p": PerRank({"v": weight})}, 2)
        assert caught.value.key == "p.rank0.v"
        with pytest.raises(StateError, match=r"'in\.tuple'.*0 of the 4000 bytes"):
            engine.save({"in": {"tuple": (weight,)}}, 2)
    assert sorted(n for n in os.listdir(tmp_path) if n.startswith("iter_")) == ["iter_0000001"]


@pytest.mark.parametrize("cut", ["contiguous", "offset", "strided", "transposed", "parameter"])
def test_a_tensor_with_a_part_of_its_memory_is_refused(tmp_path: Path, cut: str) -> None:
    base = torch.ones(64, 4)
    tensor = {
        "contiguous": base,
        "offset": base[32:],
        "strided": base[:, 1],
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(base),
    }[cut]
    base.untyped_storage().resize_(64 * 4 * 4 - 4 * 4)
    assert refused(tmp_path, {"model": {"w": tensor}}).key == "model.w"


def test_views_that_need_no_more_than_there_is_are_saved(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = {
        "column": base[:, 5],
        "last": base[3:, 5:],
        "transposed": base.t(),
        "expanded": base[:1].expand(9, 6),
        "lone": torch.ones(1).expand(50),
        "nothing": base[4:],
        "scalar": base[3, 5],
    }
    expected = {name: view.clone() for name, view in views.items()}
    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save(dict(views), 1).result(30)
        found = {name: torch.zeros(view.shape) for name, view in views.items()}
        engine.restore(found)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("name", ["uint4", "int3", "bits8", "bits16", "bits1x8"])
def test_a_dtype_that_torch_cannot_save_is_refused_by_key(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"no torch.{name} in this version")
    error = refused(tmp_path, {"model": {"w": torch.empty((8, 8), dtype=dtype), "b": torch.ones(2)}})
    assert error.key == "model.w" and f"torch.{name}" in str(error)


def odd_dtensors(rank: int, world: int, directory: str) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    local = torch.ones(8)
    freed = torch.ones(8)
    good = DTensor.from_local(freed, mesh, [Shard(0)])
    errors = []
    with CheckpointEngine(directory, config()) as engine:
        engine.save({"ok": {"w": good}}, 1).result(30)
        freed.untyped_storage().resize_(0)
        for state in ({"ok": {"w": good}}, {"part": {"w": DTensor.from_local(local, mesh, [Partial()])}}):
            with pytest.raises(StateError) as caught:
                engine.save(state, 2)
            errors.append(f"{caught.value.key}")
    return errors


def test_a_dtensor_without_its_value_is_refused_by_key(tmp_path: Path) -> None:
    assert run_ranks(1, odd_dtensors, str(tmp_path)) == [["ok.w", "part.w"]]


def test_what_dcp_cannot_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    original = DefaultSavePlanner.create_local_plan

    def failing(self: Any) -> Any:
        if "bad" in self.state_dict:
            raise ValueError("no such thing")
        return original(self)

    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", failing)
    with pytest.raises(StateError, match="no such thing") as caught:
        judged({"good": torch.ones(1), "bad": torch.ones(1)})
    assert caught.value.key == "bad"


# -- values ----------------------------------------------------------------------------------------------------------


def test_equal_sets_have_equal_digests_whatever_their_order() -> None:
    """On ranks with different hash seeds a set of strings is in another order; these ints are so in one process."""
    one, other = (set(order) for order in ([0, 8, 16], [16, 8, 0]))
    assert list(one) != list(other) and pickle.dumps(one) != pickle.dumps(other)
    for wrap in (lambda s: s, frozenset, lambda s: {"x": (1, s)}, lambda s: {frozenset(s), 3}):
        assert value_digest(wrap(one), b"1") == value_digest(wrap(other), b"2")
        assert value_digest(wrap(one), b"") != value_digest(wrap({0, 8, 17}), b"")
    assert value_digest({1}, b"") != value_digest(frozenset({1}), b"")


def test_equal_tensors_in_values_have_equal_digests_whatever_their_storage() -> None:
    base = torch.arange(100.0)
    same = ((1, base[10:20]), (1, base[10:20].clone()), (1, torch.stack([base[10:20]] * 2, 1)[:, 0]))
    assert len({value_digest(value, str(n).encode()) for n, value in enumerate(same)}) == 1
    different = (base[10:21], base[11:21], base[10:20].double(), base[10:20].reshape(2, 5), torch.ones(0))
    assert len({value_digest((1, value), b"") for value in (base[10:20], *different)}) == 6


def test_values_of_other_kinds_are_told_apart() -> None:
    class Loop(list):  # type: ignore[type-arg]
        pass

    cycle: Any = ([],)
    cycle[0].append(cycle)
    assert value_digest(cycle, b"1") == value_digest(cycle, b"1") != value_digest(cycle, b"2")
    assert value_digest((1, Loop()), b"1") != value_digest((1, Loop()), b"2")  # can't be pickled: the whole counts
    counts = [(collections.Counter(text),) for text in ("aab", "abb")]
    assert value_digest(counts[0], b"") != value_digest(counts[1], b"")


class Pair(NamedTuple):
    left: Any
    right: Any


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_a_tensor_in_a_value_costs_what_it_shows(tmp_path: Path) -> None:
    base = torch.arange(4 * MIB, dtype=torch.float32)
    part = base[100:110]
    value = Pair(
        (part, [base[100:110]], base[::1024][:5]), {"p": torch.nn.Parameter(part), "o": Holder(part), "s": {1}}
    )
    data = pickle_value("k", value)
    assert len(data) < 8192
    found = torch.load(io.BytesIO(data), weights_only=False)
    assert type(found) is Pair and found.right["s"] == {1} and type(found.right["p"]) is torch.nn.Parameter
    views = [found.left[0], found.left[1][0], found.right["p"], found.right["o"].tensor]
    assert all(torch.equal(view, part) for view in views)
    assert len({view.data_ptr() for view in views}) == 1 and found.left[0] is found.right["o"].tensor
    assert torch.equal(found.left[2], base[::1024][:5]) and not found.left[2].requires_grad

    with CheckpointEngine(tmp_path, config()) as engine:
        engine.save({"k": (1, part)}, 1).result(30)
        state: dict[str, Any] = {"k": None}
        engine.restore(state)
    assert state["k"][0] == 1 and torch.equal(state["k"][1], part)


def test_odd_tensors_in_values_stay_what_they_are() -> None:
    base = torch.randn(1000, dtype=torch.complex64)
    leaf = torch.ones(1000, requires_grad=True)
    matrix = torch.randn(50, 40)
    value = (
        base[:7].conj(),
        base[:7],
        leaf[:3],
        matrix[:3].t(),
        torch.eye(3).to_sparse(),
        torch.empty(2, device="meta"),
    )
    found = torch.load(io.BytesIO(pickle_value("k", value)), weights_only=True)
    assert torch.equal(found[0], value[0]) and torch.equal(found[1], value[1])
    assert found[2].requires_grad and torch.equal(found[2], leaf[:3])
    assert torch.equal(found[3], value[3]) and found[3].stride() == (1, 40)
    assert torch.equal(found[4].to_dense(), torch.eye(3)) and found[5].is_meta


def test_a_whole_tensor_in_a_value_is_written_as_stock_writes_it() -> None:
    whole = torch.arange(10.0)
    value = (whole, whole.view(2, 5), torch.ones(1).expand(20), {"x": "y"})
    stock = io.BytesIO()
    torch.save(value, stock)
    assert pickle_value("k", value) == stock.getvalue()


# -- modes of torch --------------------------------------------------------------------------------------------------


@pytest.fixture
def deterministic() -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_planning_touches_no_memory_in_deterministic_mode(deterministic: None) -> None:
    """``torch.empty`` fills what it makes there: as much memory as the largest tensor, next to the budget."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    before = resident()
    tensor = _stand_in((64 * MIB, 3), torch.float32)
    assert tensor.shape == (64 * MIB, 3) and tensor.is_contiguous() and tensor.is_cpu
    assert resident() - before < 64 * MIB


@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5), (2, 1, 7)], ids=str)
def test_records_are_the_same_in_every_mode(shape: tuple[int, ...], deterministic: None) -> None:
    template = make_template(shape, torch.bfloat16)
    torch.use_deterministic_algorithms(False)
    assert make_template(shape, torch.bfloat16) == template
    with torch.device("meta"):
        assert make_template(shape, torch.bfloat16) == template
    torch.set_default_device("meta")
    try:
        assert make_template(shape, torch.bfloat16) == template
    finally:
        torch.set_default_device(None)


def test_a_save_in_deterministic_mode_on_a_default_device_is_whole(tmp_path: Path, deterministic: None) -> None:
    state = {"w": torch.randn(300, 70), "t": (1, torch.ones(2)), "n": {"v": torch.arange(9).reshape(3, 3).t()}}
    with CheckpointEngine(tmp_path, config()) as engine:
        with torch.device("meta"):
            engine.save(state, 1).result(30)
            engine.save(state, 2).result(30)
        found = {"w": torch.zeros(300, 70), "t": None, "n": {"v": torch.zeros(3, 3, dtype=torch.int64)}}
        engine.restore(found)
    assert torch.equal(found["w"], state["w"]) and torch.equal(found["n"]["v"], state["n"]["v"])  # type: ignore[arg-type,index,call-overload]
