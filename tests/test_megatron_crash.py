"""Promise: a Megatron save that is killed is invisible, the one before it is whole, and the next one cleans up after it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import megatron_wheels
from tests.ranks import Died, run_ranks

pytestmark = [pytest.mark.timeout(120), pytest.mark.crash]

VERSION = megatron_wheels.versions()[-1]


def start(folder: str) -> None:
    from tests import megatron_ranks, megatron_shims

    megatron_shims.use(folder)
    import ckpt_engine
    import ckpt_engine.megatron

    ckpt_engine.megatron.install(ckpt_engine.EngineConfig(**megatron_ranks.CONFIG))


def save_and_die(rank: int, world: int, folder: str, root: str) -> None:
    """One save that ends well; in the second, every rank is killed after its third write."""
    from tests import megatron_ranks

    start(folder)
    megatron_ranks.save(megatron_ranks.state(4.0), os.path.join(root, "iter_0000001"))
    writes = []

    def killing() -> None:
        writes.append(1)
        if len(writes) > 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with megatron_ranks.writes(killing):
        megatron_ranks.save(megatron_ranks.big_state(), os.path.join(root, "iter_0000002"))


def save_again(rank: int, world: int, folder: str, root: str) -> Any:
    from tests import megatron_ranks

    start(folder)
    path = os.path.join(root, "iter_0000002")
    sharded = megatron_ranks.state(5.0)
    wanted = megatron_ranks.data_of(sharded)
    megatron_ranks.save(sharded, path)
    return megatron_ranks.problems(path, wanted)


def test_a_killed_save_is_invisible_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    """Every rank dies in the middle of its writes."""
    from ckpt_engine import CheckpointEngine
    from ckpt_engine.restore.verify import verify_checkpoint

    folder = megatron_wheels.unpacked("megatron-core", VERSION)
    assert run_ranks(2, save_and_die, folder, str(tmp_path), timeout=60.0, dies=(0, 1)) == [Died(-9), Died(-9)]
    killed = tmp_path / "iter_0000002"
    left = sorted(path.name for path in killed.iterdir())
    assert any(".tmp-" in name for name in left) and not any(name.endswith(".distcp") for name in left), left
    with CheckpointEngine(tmp_path) as engine:
        assert engine.steps() == [1]
    assert verify_checkpoint(tmp_path / "iter_0000001").ok
    assert run_ranks(2, save_again, folder, str(tmp_path), timeout=60.0) == [[], []]
    assert not [path.name for path in killed.iterdir() if ".tmp-" in path.name]
    with CheckpointEngine(tmp_path) as engine:
        assert engine.steps() == [1, 2]
