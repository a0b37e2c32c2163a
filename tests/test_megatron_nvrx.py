"""Promise: with nvidia-resiliency-ext installed, its queue is changed as well, and no process of it is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import megatron_wheels
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(200)

VERSIONS = ("0.6.0", "0.7.0") if os.environ.get("CKPT_ENGINE_MEGATRON") == "all" else ("0.7.0",)


def on_nvrx_queues(rank: int, world: int, megatron: str, nvrx: str, root: str) -> Any:
    """Saves with the default strategy, "nvrx", on NVRx's queue in all ways that it can be made."""
    import torch.distributed as dist

    from tests import megatron_ranks, megatron_shims

    megatron_shims.use(megatron)
    sys.path.insert(0, nvrx)
    megatron_ranks._forbid_processes()
    import ckpt_engine
    import ckpt_engine.megatron

    checks = ckpt_engine.megatron.install(ckpt_engine.EngineConfig(**megatron_ranks.CONFIG))
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    queue: Any = get_async_strategy("nvrx")[1]["AsyncCallsQueue"]
    found: dict[str, Any] = {"module": queue.__module__, "missing": [check.missing for check in checks]}
    for name, options in (("persistent", {}), ("temporal", {"persistent": False})):
        directory = os.path.join(root, name)
        if rank == 0:
            os.mkdir(directory)
        dist.barrier()
        queue.warmup_persistent_caller(rank)
        found[name] = megatron_ranks._async_act(directory, queue(**options))
    calls = queue()
    directory = os.path.join(root, "closed")
    sharded = megatron_ranks.state(3.0)
    wanted = megatron_ranks.data_of(sharded)
    calls.schedule_async_request(megatron_ranks.save(sharded, directory, asynchronous=True))
    calls.close()
    found["closed"] = megatron_ranks.problems(directory, wanted)
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_saves_on_nvrx_queues_are_whole_and_close_finalises_them(version: str, tmp_path: Path) -> None:
    """NVRx's own close() forgets requests if it has started no worker."""
    megatron = megatron_wheels.unpacked("megatron-core", "0.19.2")
    nvrx = megatron_wheels.unpacked("nvidia-resiliency-ext", version, "--platform", "manylinux_2_39_x86_64")
    for found in run_ranks(2, on_nvrx_queues, megatron, nvrx, str(tmp_path), timeout=150.0):
        assert found["module"].startswith("nvidia_resiliency_ext")
        assert found["missing"] == [(), ()]
        assert found["persistent"] == found["temporal"] == [[0], [1], [2]]
        assert found["closed"] == []
