"""Promise: a megatron-core without async code, which 0.20 is going to be, saves through the engine: sync, async, and installed.

No such version can be fetched yet. Its stand-in is 0.19.2 without the modules that upstream has removed (``async_utils``,
``filesystem_async``, ``state_dict_saver``) and without the methods of the strategy that need them. NVRx isn't there either.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import megatron_wheels
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(150)

_REMOVED = ("async_utils", "filesystem_async", "state_dict_saver")


def without_async(folder: str, target: Path) -> str:
    """A copy of 0.19.2, of links, with its async code taken out."""
    shutil.copytree(folder, target, copy_function=lambda source, copy: os.symlink(source, copy), dirs_exist_ok=True)
    package = target / "megatron" / "core" / "dist_checkpointing"
    for name in _REMOVED:
        (package / "strategies" / f"{name}.py").unlink()
    for file, line in (
        (package / "strategies" / "torch.py", "from .async_utils import AsyncRequest\n"),
        (package / "serialization.py", "from .strategies.async_utils import AsyncRequest\n"),
    ):
        text = file.read_text()
        assert text.count(line) == 1
        text = text.replace(line, "from typing import Any as AsyncRequest\n")
        if file.name == "torch.py":
            begin = text.index("    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path):\n")
            end = text.index("def _get_filesystem_reader(")
            save = "    def save(self, sharded_state_dict, checkpoint_dir):\n        raise NotImplementedError('stock')\n\n\n"
            text = text[:begin] + save + text[end:]
        file.unlink()
        file.write_text(text)
    return str(target)


def act(rank: int, world: int, folder: str, root: str) -> Any:
    """Saves with the objects, then installs and saves as any framework would."""
    from tests import megatron_objects, megatron_ranks, megatron_shims

    megatron_shims.use(folder)
    megatron_ranks._forbid_processes()
    found: dict[str, Any] = {}
    for name in ("sync", "async", "failing_write"):
        directory = os.path.join(root, name)
        os.makedirs(directory, exist_ok=True)
        found[name] = megatron_objects.ACTS[name](rank, directory)
    import ckpt_engine
    import ckpt_engine.megatron

    found["missing"] = [
        check.missing for check in ckpt_engine.megatron.install(ckpt_engine.EngineConfig(**megatron_ranks.CONFIG))
    ]
    sharded = megatron_ranks.state(3.0)
    wanted = megatron_ranks.data_of(sharded)
    megatron_ranks.save(sharded, os.path.join(root, "installed"))
    found["installed"] = megatron_ranks.problems(os.path.join(root, "installed"), wanted)
    from megatron.core.dist_checkpointing.strategies import base

    found["queue"] = type(base.async_calls).__name__
    ckpt_engine.megatron.uninstall()
    found["stock again"] = megatron_ranks._error_of(lambda: megatron_ranks.save(megatron_ranks.state(), root))
    return found


def test_saves_work_without_megatrons_async_code(tmp_path: Path) -> None:
    folder = without_async(megatron_wheels.unpacked("megatron-core", "0.19.2"), tmp_path / "wheel")
    root = tmp_path / "checkpoints"
    root.mkdir()
    for found in run_ranks(2, act, folder, str(root), timeout=120.0):
        assert found["sync"]["problems"] == []
        assert found["async"] == [[0], [1], [2]]
        assert found["failing_write"]["left"] == [[], []] and found["failing_write"]["again"] == []
        assert found["missing"] == [(), ()]
        assert found["installed"] == []
        assert found["queue"] == "ThreadAsyncCallsQueue"
        assert found["stock again"].startswith("NotImplementedError stock")
