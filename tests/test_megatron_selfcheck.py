"""Promise: ``install()`` tells at once, and in full, whether this Megatron can be changed; nothing shows up at the first save only."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import megatron_wheels
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


def checks(rank: int, world: int, folder: str, root: str) -> dict[str, Any]:
    """What install() says of Megatrons that differ from what it knows, and whether they are left alone."""
    from tests import megatron_ranks, megatron_shims

    found: dict[str, Any] = {}
    import ckpt_engine.megatron as adapter

    found["no megatron"] = megatron_ranks._error_of(adapter.install)
    megatron_shims.use(folder)
    sys.modules["nvidia_resiliency_ext"] = None  # type: ignore[assignment]
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import async_utils
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    def attempt(owner: Any, name: str, value: Any = None) -> tuple[str, bool]:
        before = megatron_ranks._surface()
        kept = vars(owner)[name]
        delattr(owner, name) if value is None else setattr(owner, name, value)
        try:
            changed = megatron_ranks._surface()
            return megatron_ranks._error_of(adapter.install), megatron_ranks._surface() == changed
        finally:
            setattr(owner, name, kept)
            assert megatron_ranks._surface() == before

    strategy, queue = strategies.TorchDistSaveShardedStrategy, async_utils.AsyncCallsQueue
    found["missing"] = attempt(serialization, "save_config")
    found["renamed"] = attempt(strategies, "TorchDistSaveShardedStrategy")
    found["parameters"] = attempt(queue, "schedule_async_request", lambda self, job: None)
    found["fields"] = attempt(async_utils, "_ActiveAsyncRequest")

    real = strategy.async_save

    def with_more(self: Any, sharded_state_dict: Any, checkpoint_dir: Any, *rest: Any, brand_new: int = 1) -> Any:
        return real(self, sharded_state_dict, checkpoint_dir)

    strategy.async_save = with_more
    found["checks"] = [str(check) for check in adapter.install()]
    megatron_ranks.save(megatron_ranks.state(), root)
    found["saved"] = megatron_ranks.published(root)
    adapter.uninstall()
    found["restored"] = strategy.async_save is with_more
    return found


def test_what_is_missing_is_named_at_install_and_stock_is_left_alone(tmp_path: Path) -> None:
    """B076: a missing function, a renamed class, other parameters, other fields; an added keyword is no reason to refuse.

    B088: without NVRx, and without Megatron.
    """
    folder = megatron_wheels.unpacked("megatron-core", "0.19.2")
    found = run_ranks(1, checks, folder, str(tmp_path), timeout=90.0)[0]
    assert found["no megatron"].startswith("ConfigError") and "megatron-core: not installed" in found["no megatron"]
    for name, text in {
        "missing": "serialization.save_config: not there",
        "renamed": "has no TorchDistSaveShardedStrategy",
        "parameters": "schedule_async_request: takes (self, job), expected async_request too",
        "fields": "_ActiveAsyncRequest: lacks the fields",
    }.items():
        error, untouched = found[name]
        assert error.startswith("ConfigError") and text in error, error
        assert untouched
    assert "nvidia-resiliency-ext: not installed" in found["checks"]
    assert found["saved"] == [".metadata", "commit.json", "metadata.json"]
    assert found["restored"]
    assert os.listdir(tmp_path)
