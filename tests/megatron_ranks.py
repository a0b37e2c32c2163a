"""What the ranks of the Megatron tests share: states, saves, what is wrong with a checkpoint, faults, and acts around installing.

:mod:`tests.megatron_acts` and the ranks of the other tests are made of these.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

MIB = 1 << 20

#: Room for staging: less than :func:`~tests.megatron_acts.act_larger_than_the_budget` saves.
BUDGET = 8 * MIB

CONFIG: dict[str, Any] = {"staging_budget": BUDGET, "commit_timeout": 20.0, "extent_bytes": MIB, "retries": 0}


def _outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except BaseException as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def _framework() -> Any:
    """A module that has imported a function by name before the engine is installed, as frameworks do."""
    import sys
    import types

    from megatron.core import dist_checkpointing

    module: Any = types.ModuleType("some_framework")
    original = module.save = dist_checkpointing.save
    module.is_changed = lambda: module.save is not original and module.save is dist_checkpointing.save
    sys.modules[module.__name__] = module
    return module


def _forbid_processes() -> None:
    """B040, B058: as on a machine or in an actor where no process can be started."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory: the test forbids processes")

    os.fork = os.forkpty = os.posix_spawn = refuse  # type: ignore[assignment]
    subprocess.Popen.__init__ = refuse  # type: ignore[method-assign]
    multiprocessing.process.BaseProcess.start = refuse  # type: ignore[method-assign]


def _surface() -> dict[str, Any]:
    """Everything that install() may change, as it is now."""
    from ckpt_engine.integrations.megatron import seams

    return {
        f"{place[0]}.{place[1]}": vars(place[0]).get(place[1])
        for seam in seams.MCORE
        if not isinstance(place := seam.find(), str)
    }


# -- states --------------------------------------------------------------------------------------------------------------


def state(scale: float = 1.0, *, blank: bool = False) -> dict[str, Any]:
    """Tensors of many kinds, sharded over the ranks or held by one; objects; and plain values for the common state."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8):
        local = (torch.arange(40).reshape(8, 5) * scale + rank).to(dtype)
        found[f"{dtype}"] = ShardedTensor.from_rank_offsets(f"{dtype}", _blank(local, blank), (0, rank, world))
    columns = (torch.arange(60, dtype=torch.float32).reshape(10, 6) * scale + rank).t()  # strided
    found["columns"] = ShardedTensor.from_rank_offsets("columns", _blank(columns, blank), (1, rank, world))
    replica = torch.arange(3000, dtype=torch.float32) * scale
    found["replica"] = ShardedTensor.from_rank_offsets("replica", _blank(replica, blank), replica_id=rank)
    one = {"rank": rank, "scale": scale}
    found["object"] = ShardedObject("object", None if blank else one, (world,), (rank,))
    if not blank:
        found["iteration"] = int(scale)
    return found


def _blank(tensor: torch.Tensor, blank: bool) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if blank else tensor


def big_state(count: int = 24) -> dict[str, Any]:
    """MiBs of float32, three times what may be staged."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    rank, world = dist.get_rank(), dist.get_world_size()
    fill = torch.arange(MIB // 4, dtype=torch.float32)
    return {
        f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", fill * (n + 1) + rank, (0, rank, world)) for n in range(count)
    }


def data_of(sharded: dict[str, Any]) -> dict[str, Any]:
    """Copies of what is in it."""
    return {
        key: value.data.clone()
        if isinstance(getattr(value, "data", None), torch.Tensor)
        else getattr(value, "data", value)
        for key, value in sharded.items()
    }


def problems(directory: str, wanted: dict[str, Any], blank: dict[str, Any] | None = None) -> list[str]:
    """What is wrong with a checkpoint: as stock's loader reads it, and as our verification finds it."""
    from megatron.core import dist_checkpointing

    from ckpt_engine.restore.verify import verify_checkpoint

    found = []
    loaded = dist_checkpointing.load(blank if blank is not None else state(blank=True), directory)
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            if loaded[key].dtype != value.dtype or not torch.equal(loaded[key], value):
                found.append(f"{key} differs")
        elif loaded[key] != value:
            found.append(f"{key} is {loaded[key]!r}, expected {value!r}")
    report = verify_checkpoint(directory)
    return found + list(report.problems) + ([] if report.ok else ["verification failed"])


def save(sharded: dict[str, Any], directory: str, *, asynchronous: bool = False, **options: Any) -> Any:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    os.makedirs(directory, exist_ok=True)
    strategy = options.pop("strategy", None) or TorchDistSaveShardedStrategy("torch_dist", 1, **options)
    return dist_checkpointing.save(sharded, directory, strategy, async_sharded_save=asynchronous)


def queue(**options: Any) -> Any:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    return AsyncCallsQueue(**options)


def published(directory: str) -> list[str]:
    """Which of the files are there that say "complete", and which temporary ones."""
    names = [name for _, _, files in os.walk(directory) for name in files]
    return sorted(n for n in names if n in (".metadata", "metadata.json", "commit.json") or ".tmp" in n)


@contextlib.contextmanager
def writes(before: Callable[[], None]) -> Iterator[None]:
    """Calls ``before`` in front of each ``pwrite`` of this process."""
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        before()
        return real(fd, data, offset)

    os.pwrite = pwrite
    try:
        yield
    finally:
        os.pwrite = real


def _error_of(call: Callable[[], Any]) -> str:
    """What stock's exception says, with how long it took."""
    start = time.monotonic()
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__} {error}" if time.monotonic() - start < 15 else "raised too late"
    return "no error"


def _keep_busy(stop: threading.Event) -> None:
    import zlib

    data = os.urandom(100_000)
    while not stop.wait(0.001):
        zlib.crc32(data)


def _change_everything(sharded: dict[str, Any]) -> None:
    for value in sharded.values():
        if isinstance(getattr(value, "data", None), torch.Tensor):
            value.data.zero_()


def _async_act(directory: str, calls: Any) -> Any:
    """Three saves in a row, each changed right after it was scheduled."""
    found = []
    for number in (1, 2, 3):
        path = os.path.join(directory, "..", os.path.basename(directory), f"iter_{number:07d}")
        sharded = state(float(number + 1))
        wanted = data_of(sharded)
        calls.schedule_async_request(save(sharded, path, asynchronous=True))
        _change_everything(sharded)
        found.append(calls.maybe_finalize_async_calls(blocking=True))
        found += problems(path, wanted)
    calls.close()
    return found


# -- installing --------------------------------------------------------------------------------------------------------


def missing_seam(adapter: Any) -> dict[str, Any]:
    """An install that finds a seam that isn't what it has to be."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy as Strategy

    before, original = _surface(), Strategy.async_save
    Strategy.async_save = lambda self, something_else: None
    try:
        error = _error_of(adapter.install)
    finally:
        Strategy.async_save = original
    return {"error": error, "unchanged": _surface() == before}


def uninstalled_meanwhile(adapter: Any, directory: str) -> Any:
    """The engine is uninstalled, twice, while a save is on its way."""
    from megatron.core import dist_checkpointing

    calls = queue()
    sharded = state(8.0)
    wanted = data_of(sharded)
    calls.schedule_async_request(save(sharded, directory, asynchronous=True))
    adapter.uninstall()
    adapter.uninstall()
    dist.barrier()
    calls.maybe_finalize_async_calls(blocking=True)
    loaded = dist_checkpointing.load(state(blank=True), directory)
    return {"same": torch.equal(loaded["replica"], wanted["replica"]), "published": published(directory)}
