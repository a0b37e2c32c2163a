"""Promises between ranks: one outcome for all, no collective off the caller's thread, resharding, bounded waits."""

from __future__ import annotations

import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_engine import (
    CheckpointEngine,
    CheckpointError,
    CommitTimeoutError,
    EngineConfig,
    KeyMismatchError,
    PerRank,
    StateError,
    TrainState,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(150)

MIB = 1 << 20


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"staging_budget": 16 * MIB, "commit_timeout": 20.0, **options})


def sharded(world: int, scale: float = 1.0) -> dict[str, Any]:
    """Tensors whose content tells their position: sharded by rows, by columns, unevenly, replicated; and plain ones."""
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(30 * 8, dtype=torch.float32).reshape(30, 8) * scale
    return {
        "rows": distribute_tensor(full, mesh, [Shard(0)]),
        "columns": distribute_tensor(full, mesh, [Shard(1)]),
        "uneven": distribute_tensor(full[:3], mesh, [Shard(0)]),
        "replicated": distribute_tensor(full, mesh, [Replicate()]),
        "plain": full.clone(),
        "value": {"n": scale},
    }


def check(state: dict[str, Any], scale: float) -> None:
    full = torch.arange(30 * 8, dtype=torch.float32).reshape(30, 8) * scale
    for key in ("rows", "columns", "replicated"):
        assert torch.equal(state[key].full_tensor(), full), key
    assert torch.equal(state["uneven"].full_tensor(), full[:3])
    assert torch.equal(state["plain"], full) and state["value"] == {"n": scale}


def save_sharded(rank: int, world: int, directory: str) -> list[str]:
    with CheckpointEngine(directory, config()) as engine:
        state = sharded(world, 2.0) | {"mine": PerRank({"rank": rank})}
        info = engine.save(state, 1, TrainState(step=1, consumed_train_samples=9)).result(30)
        again = engine.save(state, 2, TrainState(step=2)).result(30)
        assert not info.stats.reused_plan and again.stats.reused_plan
        engine.verify(2)
        return sorted(os.listdir(info.path))


def restore_sharded(rank: int, world: int, directory: str) -> tuple[Any, ...]:
    state = sharded(world, 0.0) | {"mine": PerRank({"rank": -1})}
    with CheckpointEngine(directory, config()) as engine:
        restored = engine.restore(state, step=1)
        assert restored is not None
        check(state, 2.0)
        assert engine.latest() == 2
    return state["mine"].value["rank"], restored.train_state, len(restored.report.notes)


def test_a_save_of_two_ranks_restores_at_one_three_and_four(tmp_path: Path) -> None:
    names = run_ranks(2, save_sharded, str(tmp_path))[0]
    assert {n for n in names if n.endswith(".distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    for world in (1, 2, 3, 4):
        results = run_ranks(world, restore_sharded, str(tmp_path))
        assert [r[0] for r in results] == [rank % 2 for rank in range(world)]
        assert {r[1] for r in results} == {TrainState(step=1, consumed_train_samples=9)}
        assert [r[2] for r in results] == [int(rank >= 2) for rank in range(world)]


def fail_on_rank_one(rank: int, world: int, directory: str) -> list[str]:
    told = []
    with CheckpointEngine(directory, config()) as engine:
        engine.save(sharded(world, 1.0), 1).result(30)
        real = os.pwrite
        if rank == 1:

            def broken(fd: int, data: Any, offset: int) -> int:
                raise ValueError("x1")

            os.pwrite = broken
        begin = time.monotonic()
        handle = engine.save(sharded(world, 2.0), 2)
        try:
            engine.wait(30)
        except CheckpointError as error:
            told.append(f"{type(error).__name__} rank {error.rank} step {error.step} {error.phase}")
            told.append("x1" in str(error) and "Traceback" in str(error))
        assert time.monotonic() - begin < 10 and handle.done()
        os.pwrite = real
        assert engine.steps() == [1] and [info.step for info in engine.poll()] == [1]
        engine.save(sharded(world, 3.0), 3).result(30)
        state = sharded(world, 0.0)
        engine.restore(state)
        check(state, 3.0)
        assert Path(directory, "latest_checkpointed_iteration.txt").read_text() == "3"
    return told


def test_a_failing_rank_raises_on_every_rank(tmp_path: Path) -> None:
    """B004: the same error, naming rank 1 with its traceback; the tracker is unchanged; the next save works."""
    first, second = run_ranks(2, fail_on_rank_one, str(tmp_path))
    assert first == second == ["CheckpointError rank 1 step 2 write", True]


def refuse_on_one_rank(rank: int, world: int, directory: str) -> list[Any]:
    found: list[Any] = []
    with CheckpointEngine(directory, config()) as engine:
        bad: dict[str, Any] = {"lock": threading.Lock()} if rank == 1 else {}
        for state, step in ((sharded(world) | bad, 1), (sharded(world), 1 + rank)):
            try:
                engine.save(state, step)
            except StateError as error:
                found.append((type(error).__name__, error.key, error.rank if rank != 1 else 1))
        for key in ("value", "shape"):
            differing = sharded(world) | (
                {"value": {"n": rank}} if key == "value" else {"plain": torch.zeros(2 + rank)}
            )
            try:
                engine.save(differing, 1)
            except StateError as error:
                found.append(error.key)
        assert not list(Path(directory).glob("iter_*"))
        engine.save(sharded(world), 1).result(30)
    return found


def test_what_one_rank_refuses_no_rank_saves(tmp_path: Path) -> None:
    """B085, B089: unpicklable values, differing steps, replicated values and shapes that differ: one error for all."""
    results = run_ranks(2, refuse_on_one_rank, str(tmp_path))
    for found in results:
        assert found[0][:2] == ("StateError", "lock") and found[1][0] == "StateError"
        assert found[2:] == ["value.n", "plain"]


def differing_tensors(rank: int, world: int, directory: str) -> Any:
    state = {"replica": torch.full((1000,), float(rank)), "same": torch.ones(3)}
    with CheckpointEngine(directory + "/all", config(verify_replicas="all")) as engine:
        with pytest.raises(StateError, match=r"'replica'.*\[0\].*\[1\]"):
            engine.save(state, 1)
        equal = {"replica": torch.ones(1000), "same": torch.ones(3)}
        engine.save(equal, 1).result(30)
        equal["same"] += rank  # the structure is unchanged, the plan is in the cache
        with pytest.raises(StateError, match="'same'"):
            engine.save(equal, 2)
    values = []
    for run in ("one", "two"):
        with CheckpointEngine(f"{directory}/{run}", config(verify_replicas="off")) as engine:
            engine.save(state, 1).result(30)
            found = {"replica": torch.zeros(1000), "same": torch.zeros(3)}
            engine.restore(found)
            values.append(found["replica"][0].item())
    return values


def test_differing_replicas_are_found_or_have_one_owner(tmp_path: Path) -> None:
    """B089"""
    first, second = run_ranks(2, differing_tensors, str(tmp_path))
    assert first == second and first[0] == first[1]


def busy_default_group(rank: int, world: int, directory: str) -> int:
    issued: list[str] = []
    real = {
        name: getattr(dist, name) for name in ("all_reduce", "barrier", "all_gather_object", "broadcast_object_list")
    }
    for name, function in real.items():

        def spy(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                issued.append(_name)
            return _function(*args, **kwargs)

        setattr(dist, name, spy)
    wrong = 0
    with CheckpointEngine(directory, config(max_in_flight=4)) as engine:
        state = sharded(world, 1.0)
        for turn in range(500):
            if turn % 100 == 0:
                engine.save(state, turn)
            tensor = torch.tensor([float(rank + turn)])
            dist.all_reduce(tensor)
            wrong += tensor.item() != sum(r + turn for r in range(world))
        engine.wait(60)
        assert engine.steps() == [0, 100, 200, 300, 400]
    return wrong + len(issued)


def test_collectives_of_the_trainer_never_mix_with_saves(tmp_path: Path) -> None:
    """B008"""
    assert run_ranks(2, busy_default_group, str(tmp_path)) == [0, 0]


def uneven_ranks(rank: int, world: int, directory: str) -> list[int]:
    if rank == 1:
        real = os.pwrite

        def slow(fd: int, data: Any, offset: int) -> int:
            time.sleep(1)
            return real(fd, data, offset)

        os.pwrite = slow
    seen: list[int] = []
    with CheckpointEngine(directory, config()) as engine:
        engine.save(sharded(world), 1)
        for _ in range(5):
            seen += [info.step for info in engine.poll()]
            time.sleep(0.1)
        if rank == 0:  # the other rank only polls
            seen += [info.step for info in engine.wait(30)]
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            seen += [info.step for info in engine.poll()]
            time.sleep(0.01)
        assert Path(
            directory, "iter_0000001", "ckpt_engine", "commit.json"
        ).exists()  # B041: nobody hears of it earlier
    return seen


def test_ranks_may_ask_in_any_way_and_hear_the_same(tmp_path: Path) -> None:
    """B022, B035, B041"""
    assert run_ranks(2, uneven_ranks, str(tmp_path)) == [[1], [1]]


def leftover(rank: int, world: int, directory: str) -> list[str]:
    with CheckpointEngine(directory, config()) as engine:
        engine.save(sharded(world), 10).result(30)
        assert engine.verify(10).ok
        return sorted(os.listdir(directory))


def test_leftovers_of_a_dead_run_are_cleared_by_agreement(tmp_path: Path) -> None:
    """B016, B061: partial directories under the final and under a temporary name."""
    for name in ("iter_0000010", "iter_0000010.tmp-0123", "iter_0000011.tmp-4567/ckpt_engine"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__0_0.distcp").write_bytes(b"short")
    for found in run_ranks(2, leftover, str(tmp_path)):
        assert [n for n in found if n.startswith("iter")] == ["iter_0000010"]


def blind_rank(rank: int, world: int, directory: str) -> int:
    state = sharded(world, 0.0)
    with CheckpointEngine(directory, config()) as engine:
        if rank == 1:
            os.path.exists = lambda path: False  # type: ignore[assignment]
        restored = engine.restore(state, step="latest", strict=False)
    assert restored is not None
    check(state, 2.0)
    return restored.step


def test_one_rank_decides_what_is_restored(tmp_path: Path) -> None:
    """B041: ranks that see the directory differently still load the same step."""
    run_ranks(2, save_sharded, str(tmp_path))
    assert run_ranks(2, blind_rank, str(tmp_path)) == [2, 2]


def subgroups(rank: int, world: int, directory: str) -> list[str]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    time.sleep(mine * 0.5)
    with CheckpointEngine(f"{directory}/{mine}", config(), process_group=groups[mine]) as engine:
        assert engine.rank == rank % 2 and engine.world_size == 2
        engine.save({"w": torch.full((1000,), float(mine)), "mine": PerRank(rank)}, 1).result(30)
        found = {"w": torch.zeros(1000), "mine": PerRank(0)}
        engine.restore(found)
        assert (found["w"] == mine).all() and found["mine"].value == rank
    return sorted(n for n in os.listdir(f"{directory}/{mine}/iter_0000001") if n.endswith(".distcp"))


def test_subgroups_save_independently(tmp_path: Path) -> None:
    """B109"""
    results = run_ranks(4, subgroups, str(tmp_path))
    assert all(names and all(n.startswith(("__0_", "__1_")) for n in names) for names in results)


def silent_rank(rank: int, world: int, directory: str) -> Any:
    engine = CheckpointEngine(directory, config(commit_timeout=2.0))
    if rank == 1:
        time.sleep(4)
        return None
    begin = time.monotonic()
    with pytest.raises(CommitTimeoutError) as caught:
        engine.save({"w": torch.ones(3)}, 1)
    assert time.monotonic() - begin < 10
    return caught.value.silent_ranks, caught.value.phase, caught.value.step, "1" in str(caught.value)


def test_a_silent_rank_is_named_by_the_deadline(tmp_path: Path) -> None:
    """B004, B016"""
    assert run_ranks(2, silent_rank, str(tmp_path))[0] == ((1,), "plan", 1, True)


def damaged_on_one_rank(rank: int, world: int, directory: str) -> tuple[int, int]:
    with CheckpointEngine(directory, config()) as engine:
        for step in (1, 2):
            engine.save(sharded(world, float(step)), step).result(30)
        dist.barrier()
        if rank == 0:
            shard = Path(directory, "iter_0000002", "__1_0.distcp")
            content = bytearray(shard.read_bytes())
            for position in range(0, len(content), 64):
                content[position] ^= 4
            shard.write_bytes(bytes(content))
        dist.barrier()
        state = sharded(world, 0.0)
        restored = engine.restore(state)
        assert restored is not None
        check(state, float(restored.step))
        return restored.step, restored.report.skipped[0][0] if restored.report.skipped else -1


def test_a_checkpoint_that_is_damaged_for_any_rank_is_left_by_all(tmp_path: Path) -> None:
    assert run_ranks(2, damaged_on_one_rank, str(tmp_path)) == [(1, 2), (1, 2)]


def fsdp_and_ddp(rank: int, world: int, directory: str) -> list[str]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def build(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Linear(9, 4))
        if kind == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        else:
            model = DistributedDataParallel(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    keys: list[str] = []
    for kind in ("fsdp", "ddp"):
        model, optimizer = build(kind)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
        with CheckpointEngine(f"{directory}/{kind}", config()) as engine:
            engine.save({"model": model, "optim": optimizer}, 2).result(30)
            fresh, fresh_optimizer = build(kind)
            engine.restore({"model": fresh, "optim": fresh_optimizer})  # an optimizer that has no state yet
        for (name, wanted), found in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
            local = [t.to_local() if isinstance(t, DTensor) else t for t in (wanted, found)]
            assert torch.equal(*local), name
        for wanted, found in zip(optimizer.state.values(), fresh_optimizer.state.values(), strict=True):
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert type(found[key]) is type(wanted[key])
                local = [t.to_local() if isinstance(t, DTensor) else t for t in (wanted[key], found[key])]
                assert torch.equal(*local), key
        metadata = pickle.loads(Path(f"{directory}/{kind}/iter_0000002/.metadata").read_bytes())
        keys.append(next(iter(metadata.state_dict_metadata)))
    return keys


def test_fsdp2_and_ddp_restore_into_fresh_models_and_optimizers(tmp_path: Path) -> None:
    assert run_ranks(2, fsdp_and_ddp, str(tmp_path))[0] == ["model.0.weight", "model.0.weight"]


def pipeline(rank: int, world: int, directory: str) -> bool:
    """Each rank has keys of its own, as pipeline stages do, and one has nothing at all."""
    state: dict[str, Any] = {} if rank == 2 else {f"stage{rank}": {"w": torch.full((50,), float(rank))}}
    with CheckpointEngine(directory, config()) as engine:
        engine.save(state, 1).result(30)
        again = engine.save(state, 2).result(30)
        found: dict[str, Any] = {} if rank == 2 else {f"stage{rank}": {"w": torch.zeros(50)}}
        if rank == 2:
            found["stage0"] = {"w": torch.zeros(50)}
        engine.restore(found)
        assert all((t["w"] == float(key[5:])).all() for key, t in found.items())
        with pytest.raises(KeyMismatchError):
            engine.restore({"stage0": {"w": torch.zeros(50)}})
        return again.stats.reused_plan


def test_ranks_with_different_keys_are_whole_together(tmp_path: Path) -> None:
    """B110: an entirely empty rank next to full ones."""
    assert run_ranks(3, pipeline, str(tmp_path)) == [True, True, True]
