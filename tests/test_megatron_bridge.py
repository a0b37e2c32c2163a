"""Promises of the manager for Megatron-Bridge's ``custom_manager_class``.

The Bridge that has this hook isn't on the package registry. What stands for it here does what its documentation says of
``DefaultCheckpointManager`` (a context that keeps ``save_strategy``, a queue on the state), on a real megatron-core; the train state is
written and read with Bridge's keys and dtypes.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests import megatron_wheels
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(150)


def _stand_in() -> None:
    """``megatron.bridge.training.checkpointing``, as far as the manager needs it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class DefaultCheckpointManager:
        def __init__(self, checkpoint_config: Any) -> None:
            self.checkpoint_config = checkpoint_config
            self.checkpointing_context: dict[str, Any] = {}

        def save(self, ctx: Any, callback_manager: Any) -> None:
            context = self.checkpointing_context
            if "save_strategy" not in context:
                context["save_strategy"] = TorchDistSaveShardedStrategy("torch_dist", 1)
            path = os.path.join(self.checkpoint_config.save, f"iter_{ctx.state.step:07d}")
            os.makedirs(path, exist_ok=True)
            request = dist_checkpointing.save(
                ctx.model, path, context["save_strategy"], async_sharded_save=self.checkpoint_config.async_save
            )
            if request is not None:
                ctx.state._async_calls_queue.schedule_async_request(request)

        def load(self, ctx: Any) -> tuple[int, int]:
            return 7, 8

        def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
            state.finalized += state._async_calls_queue.maybe_finalize_async_calls(blocking)
            if terminate:
                state._async_calls_queue.close()

    names = ["megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.checkpointing"]
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[-1]].DefaultCheckpointManager = DefaultCheckpointManager  # type: ignore[attr-defined]


def act(rank: int, world: int, folder: str, root: str) -> Any:
    """Two saves of a run with async_save and fully_parallel_save, and what the manager answers."""
    import torch.distributed as dist

    from tests import megatron_ranks, megatron_shims

    megatron_shims.use(folder)
    os.environ["CKPT_ENGINE_STAGING_BUDGET"] = "8M"
    megatron_ranks._forbid_processes()
    from ckpt_engine.errors import ConfigError
    from ckpt_engine.megatron.bridge import ThreadedCheckpointManager

    config = types.SimpleNamespace(
        save=root,
        async_save=True,
        fully_parallel_save=True,
        storage_writers_per_rank=2,
        ckpt_assume_constant_structure=True,
    )
    sys.modules["megatron.bridge.training.checkpointing"] = types.ModuleType("older")
    try:
        found: dict[str, Any] = {"older": str(ThreadedCheckpointManager(config))}
    except ConfigError as error:
        found = {"older": str(error)}
    _stand_in()
    state = types.SimpleNamespace(step=0, finalized=[], _async_calls_queue=megatron_ranks.queue())
    manager = ThreadedCheckpointManager(config)
    found["problems"] = []
    for step in (5, 6):
        state.step = step
        sharded = megatron_ranks.state(float(step))
        wanted = megatron_ranks.data_of(sharded)
        group = types.SimpleNamespace(dp_cp=dist.group.WORLD)
        manager.save(types.SimpleNamespace(state=state, model=sharded, pg_collection=group), None)
        megatron_ranks._change_everything(sharded)
        manager.finalize_async_saves(state, blocking=True, terminate=step == 6)
        found["problems"] += megatron_ranks.problems(os.path.join(root, f"iter_{step:07d}"), wanted)
    found["finalized"] = state.finalized
    found["queue"] = type(state._async_calls_queue).__name__
    found["strategy"] = type(manager.checkpointing_context["save_strategy"].base_strategy).__name__
    found["load"] = manager.load(None)
    return found


def test_a_manager_by_name_saves_on_threads_and_patches_nothing(tmp_path: Path) -> None:
    folder = megatron_wheels.unpacked("megatron-core", "0.19.2")
    for found in run_ranks(2, act, folder, str(tmp_path), timeout=120.0):
        assert "has no checkpoint managers" in found["older"]
        assert found["problems"] == []
        assert found["finalized"] == [0, 1]
        assert found["queue"] == "ThreadAsyncCallsQueue" and found["strategy"] == "ThreadedSaveStrategy"
        assert found["load"] == (7, 8)
