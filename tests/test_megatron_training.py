"""Promise: Megatron-LM's own ``save_checkpoint`` and queue, unmodified, save on threads: sync, and async with everything on.

Async means ``--async-save --use-persistent-ckpt-worker`` with the default strategy, fully parallel, with retention, which stock
does with a worker process, a Manager process and a forked process for each deletion.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import TrainState
from tests import megatron_wheels
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

ALL = ("0.17.1", "0.18.2", "0.19.2", "0.19.2+nvrx0.6.0", "0.19.2+nvrx0.7.0")

VERSIONS = ALL if os.environ.get("CKPT_ENGINE_MEGATRON") == "all" else ("0.19.2", "0.19.2+nvrx0.7.0")

STEPS = (5, 6, 7)


def train(rank: int, world: int, folders: list[str], root: str, asynchronous: bool) -> Any:
    """Three checkpoints of a tiny model, which changes, as its counters do, as soon as each save has returned."""
    import torch
    import torch.distributed as dist

    from tests import megatron_ranks, megatron_shims

    megatron_shims.use(folders[0])
    sys.path[:0] = folders[1:]
    if not hasattr(typing, "override"):  # Python 3.11; the wheels are for 3.12
        typing.override = lambda function: function  # type: ignore[attr-defined]
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[assignment]
    megatron_ranks._forbid_processes()
    import ckpt_engine
    import ckpt_engine.megatron

    ckpt_engine.megatron.install(ckpt_engine.EngineConfig(**megatron_ranks.CONFIG))
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.rerun_state_machine import initialize_rerun_state_machine
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.training import async_utils, checkpointing, global_vars

    class Model(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((8, 4), value))

        def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"w": ShardedTensor.from_rank_offsets("w", self.w.data, replica_id=dist.get_rank())}

    parallel_state.initialize_model_parallel(1, 1)
    initialize_rerun_state_machine()
    initialize_rng_tracker()
    args = _arguments(root, asynchronous, rank, world, [checkpointing, async_utils])
    global_vars._GLOBAL_ARGS = args
    if asynchronous:
        async_utils.init_persistent_async_worker(rank)
    context: dict[str, Any] = {}
    for step in STEPS:
        model = Model(float(step))
        args.iteration, args.consumed_train_samples = step, step * 8
        checkpointing.save_checkpoint(step, [model], None, None, 1e20 * step, checkpointing_context=context)
        model.w.data.zero_()
        args.consumed_train_samples = -1
        async_utils.maybe_finalize_async_save(blocking=True)
    async_utils.maybe_finalize_async_save(blocking=True, terminate=True)
    dist.barrier()
    blank = {"model": {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8, 4), replica_id=rank)}}
    loaded = dist_checkpointing.load(blank, os.path.join(root, f"iter_{STEPS[-1]:07d}"))
    return loaded["model"]["w"].unique().tolist()


def _arguments(root: str, asynchronous: bool, rank: int, world: int, modules: list[Any]) -> argparse.Namespace:
    """All that the modules ask of args, None unless it matters."""
    names = {name: None for module in modules for name in re.findall(r"args\.(\w+)", inspect.getsource(module))}
    matters = {
        "save": root,
        "load": root,
        "use_dist_ckpt": True,
        "ckpt_format": "torch_dist",
        "async_save": asynchronous,
        "async_strategy": "nvrx",
        "use_persistent_ckpt_worker": True,
        "ckpt_fully_parallel_save": True,
        "ckpt_fully_parallel_save_process_group": "dp",
        "save_retain_interval": 100,
        "async_ckpt_cpu_priority": 10,
        "no_save_optim": True,
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 5,
        "do_train": True,
        "rank": rank,
        "world_size": world,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    return argparse.Namespace(**{**names, **matters})


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("version", VERSIONS)
def test_megatron_lm_saves_on_threads(version: str, asynchronous: bool, tmp_path: Path) -> None:
    """B011: the counters next to the weights are those of the step. B040, B058: every way to start a process raises."""
    from ckpt_engine.restore.verify import verify_checkpoint

    megatron, _, nvrx = version.partition("+nvrx")
    folders = [megatron_wheels.unpacked("megatron-core", megatron)]
    if nvrx:
        folders.append(megatron_wheels.unpacked("nvidia-resiliency-ext", nvrx, "--platform", "manylinux_2_39_x86_64"))
    assert run_ranks(2, train, folders, str(tmp_path), asynchronous, timeout=100.0) == [[7.0], [7.0]]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000007"]  # the others were retired
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"
    wanted = TrainState(
        step=7,
        consumed_train_samples=56,
        consumed_valid_samples=5,
        floating_point_operations_so_far=7e20,
        do_train=True,
    )
    for file in (tmp_path / "latest_train_state.pt", tmp_path / "iter_0000007" / "train_state.pt"):
        assert TrainState.from_bytes(file.read_bytes()) == wanted
    report = verify_checkpoint(tmp_path / "iter_0000007")
    assert report.ok and report.step == 7, report.problems
