"""Promise: who uses Megatron's own writer goes on doing so after ``install()``: its Manager process is started then, and only then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests import megatron_wheels
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(150)


def act(rank: int, world: int, folder: str, root: str) -> Any:
    """A save of a plain state dict, as the ``torch_dcp`` format makes it: planned, written and finalised by Megatron's functions."""
    import psutil
    import torch
    import torch.distributed.checkpoint as dcp

    from tests import megatron_ranks, megatron_shims

    megatron_shims.use(folder)
    import ckpt_engine
    import ckpt_engine.megatron

    ckpt_engine.megatron.install(ckpt_engine.EngineConfig(**megatron_ranks.CONFIG))
    from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

    megatron_ranks.save(megatron_ranks.state(), os.path.join(root, "ours"))
    before = len(psutil.Process().children(recursive=True))
    os.makedirs(os.path.join(root, "stock"), exist_ok=True)
    state = {"w": torch.full((5, 3), 7.0)}
    writer = filesystem_async.FileSystemWriterAsync(os.path.join(root, "stock"), thread_count=1)
    plan = state_dict_saver.save_state_dict_async_plan(state, writer, None, 0, planner=dcp.DefaultSavePlanner())
    function, preload, args = writer.get_save_function_and_args()
    finalize = lambda: state_dict_saver.save_state_dict_async_finalize(*plan[0])  # noqa: E731
    calls = AsyncCallsQueue()
    calls.schedule_async_request(AsyncRequest(function, args, [finalize], preload_fn=preload))
    calls.maybe_finalize_async_calls(blocking=True)
    loaded = {"w": torch.zeros(5, 3)}
    dcp.load(loaded, checkpoint_id=os.path.join(root, "stock"), no_dist=True)
    return before, loaded["w"].unique().tolist()


@pytest.mark.parametrize("version", megatron_wheels.versions())
def test_megatrons_own_writer_still_works(version: str, tmp_path: Path) -> None:
    folder = megatron_wheels.unpacked("megatron-core", version)
    assert run_ranks(1, act, folder, str(tmp_path), timeout=120.0) == [(0, [7.0])]
