"""What two gloo ranks do with ``msc://`` directories, on a profile of type "file" and on an S3-compatible server.

Each act runs once per profile, with the engine installed and with the strategy and the queue that change nothing of Megatron.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests import s3_server
from tests.megatron_ranks import (
    CONFIG,
    MIB,
    _change_everything,
    _error_of,
    _forbid_processes,
    _outcome,
    data_of,
    queue,
    state,
)

#: Smallest that S3 allows.
PART_BYTES = 5 * MIB

#: Far more than budget and parts together.
LARGE_BYTES = 56 * MIB

#: What the client may hold of one file: two parts.
HELD_BYTES = 2 * PART_BYTES


def configuration(folder: str, url: str) -> dict[str, Any]:
    """MSC's configuration: ``disk`` is a folder, ``s3`` the bucket at ``url``."""
    options = {"base_path": s3_server.BUCKET, "endpoint_url": url, "region_name": "us-east-1"}
    sizes = {"multipart_threshold": PART_BYTES, "multipart_chunksize": PART_BYTES}
    keys = {"type": "S3Credentials", "options": {"access_key": "test", "secret_key": "test"}}
    return {
        "profiles": {
            "disk": {"storage_provider": {"type": "file", "options": {"base_path": folder}}},
            "s3": {
                "storage_provider": {"type": "s3", "options": {**options, **sizes}},
                "credentials_provider": keys,
            },
        },
        "path_mapping": {os.path.join(folder, "mapped") + "/": "msc://s3/"},
    }


def play(rank: int, world: int, folder: str, root: str, url: str) -> dict[str, Any]:
    """Runs all acts; for each of them its result, or the text of what it raised."""
    from tests import megatron_shims

    path = os.path.join(root, f"msc-{rank}.json")
    with open(path, "w") as file:
        json.dump(configuration(root, url), file)
    os.environ["MSC_CONFIG"] = path
    megatron_shims.use(folder)
    _forbid_processes()
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("fork"))
    from megatron.core.msc_utils import MultiStorageClientFeature

    import ckpt_engine
    import ckpt_engine.megatron as adapter

    MultiStorageClientFeature.enable()
    _let_it_load()
    config = ckpt_engine.EngineConfig(**CONFIG)
    found: dict[str, Any] = {}
    for name in ("objects_sync", "objects_async"):
        for profile in ("disk", "s3"):
            act = ACTS[name]
            directory = f"msc://{profile}/{name}/iter_0000004"
            found[f"{name} {profile}"] = _outcome(lambda act=act, directory=directory: act(rank, directory))  # type: ignore[misc]
            dist.barrier()
    adapter.install(config)
    for name, act in ACTS.items():
        if name.startswith("objects"):
            continue
        for profile in ("disk", "s3"):
            directory = f"msc://{profile}/{name}/iter_0000004"
            found[f"{name} {profile}"] = _outcome(lambda act=act, directory=directory: act(rank, directory))  # type: ignore[misc]
            dist.barrier()
    found["mapped"] = _outcome(lambda: act_sync(rank, os.path.join(root, "mapped", "iter_0000004")))
    found["forks"] = forks
    return found


def _let_it_load() -> None:
    """0.17 looks for the directory with ``pathlib``, MSC or not, and so never loads from there; its loader could."""
    import inspect

    from megatron.core.dist_checkpointing import serialization, validation

    check = getattr(validation, "verify_checkpoint", None)
    if check is not None and "Path(checkpoint_dir).exists()" in inspect.getsource(check):
        for module in (serialization, validation):
            module.verify_checkpoint = lambda directory: None


def save(sharded: dict[str, Any], directory: str, *, asynchronous: bool = False, **options: Any) -> Any:
    """As Megatron-LM does it: the directory is made through MSC."""
    import multistorageclient as msc
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    msc.os.makedirs(directory, exist_ok=True)
    strategy = options.pop("strategy", None) or TorchDistSaveShardedStrategy("torch_dist", 1, **options)
    return dist_checkpointing.save(sharded, directory, strategy, async_sharded_save=asynchronous)


def listing(directory: str) -> list[str]:
    """Names below a directory, wherever it is."""
    from ckpt_engine.integrations.megatron.places import place_of

    place = place_of(directory)
    try:
        top = place.names()
    except FileNotFoundError:
        return []
    return sorted(
        top + [f"ckpt_engine/{name}" for name in (place.names("ckpt_engine") if "ckpt_engine" in top else [])]
    )


def problems(directory: str, wanted: dict[str, Any], blank: dict[str, Any] | None = None) -> list[str]:
    """What is wrong with a checkpoint: as stock's loader reads it through MSC, and as our verification finds a copy of it."""
    from megatron.core import dist_checkpointing

    found = []
    loaded = dist_checkpointing.load(blank if blank is not None else state(blank=True), directory)
    for key, value in wanted.items():
        same = torch.equal(loaded[key], value) if isinstance(value, torch.Tensor) else loaded[key] == value
        if not same:
            found.append(f"{key} differs")
    dist.barrier()
    return found + damage(directory)


def damage(directory: str) -> list[str]:
    """What our verification finds wrong with a copy of it, made on rank 0."""
    from ckpt_engine.integrations.megatron.places import place_of
    from ckpt_engine.restore.verify import verify_checkpoint

    if dist.get_rank() > 0:
        return []
    place = place_of(directory)
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, os.path.basename(directory))
        os.makedirs(os.path.join(copy, "ckpt_engine"))
        for name in listing(directory):
            if name != "ckpt_engine":
                with open(os.path.join(copy, name), "wb") as file:
                    file.write(place.read(name))
        report = verify_checkpoint(copy)
        return list(report.problems) + ([] if report.ok else ["verification failed"])


def _whole(directory: str, sharded: dict[str, Any], calls: Any = None, **options: Any) -> list[str]:
    """Saves; what is wrong with the result."""
    wanted = data_of(sharded)
    if calls is None:
        save(sharded, directory, **options)
    else:
        calls.schedule_async_request(save(sharded, directory, asynchronous=True, **options))
        _change_everything(sharded)
        calls.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    return problems(directory, wanted)


# -- acts ----------------------------------------------------------------------------------------------------------------


def act_objects_sync(rank: int, directory: str) -> Any:
    return {"problems": _whole(directory, state(2.0), strategy=_strategy(thread_count=2)), "files": listing(directory)}


def act_objects_async(rank: int, directory: str) -> Any:
    import ckpt_engine.megatron

    calls = ckpt_engine.megatron.ThreadAsyncCallsQueue()
    found = _whole(directory, state(3.0), calls, strategy=_strategy())
    calls.close()
    return found


def _strategy(**options: Any) -> Any:
    import ckpt_engine
    import ckpt_engine.megatron

    return ckpt_engine.megatron.ThreadedSaveStrategy(config=ckpt_engine.EngineConfig(**CONFIG), **options)


def act_sync(rank: int, directory: str) -> Any:
    return {"problems": _whole(directory, state(2.0), thread_count=2), "files": listing(directory)}


def act_mangled(rank: int, directory: str) -> Any:
    """Some callers pass the URL through pathlib, which takes one slash away."""
    return _whole(directory.replace("msc://", "msc:/"), state(2.0))


def act_async(rank: int, directory: str) -> Any:
    calls = queue()
    found = _whole(directory, state(3.0), calls)
    calls.close()
    return found


def act_integrity(rank: int, directory: str) -> Any:
    """Megatron's own manifest of SHA-256 sums, where the version has it: from sums taken while writing."""
    import inspect

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import validation

    if "verify_integrity" not in inspect.signature(dist_checkpointing.save).parameters:
        return "this version has no integrity manifest"

    def read_again(path: str) -> str:
        raise OSError(5, f"{path} is read a second time")

    sharded = state(2.0)
    wanted = data_of(sharded)
    real, validation._compute_file_hash = validation._compute_file_hash, read_again
    try:
        dist_checkpointing.save(sharded, directory, verify_integrity=True)
    finally:
        validation._compute_file_hash = real
    dist.barrier()
    loaded = dist_checkpointing.load(state(blank=True), directory, verify_integrity=True)
    return [] if torch.equal(loaded["replica"], wanted["replica"]) else ["replica differs"]


def act_train_state(rank: int, directory: str) -> Any:
    """The counters go with it, as Megatron-LM's state has them."""
    import types

    from ckpt_engine import TrainState
    from ckpt_engine.integrations.megatron import progress
    from ckpt_engine.integrations.megatron.places import place_of

    sharded = {
        **state(4.0),
        "args": types.SimpleNamespace(
            consumed_train_samples=64, skipped_train_samples=0, consumed_valid_samples=8, iteration=4
        ),
    }
    save(sharded, directory)
    dist.barrier()
    mine = place_of(directory).read("train_state.pt")
    latest = place_of(os.path.dirname(directory)).read("latest_train_state.pt")
    found = progress.read(directory, 4)
    return {
        "same": mine == latest and found == TrainState.from_bytes(mine),
        "samples": found and found.consumed_train_samples,
    }


def act_larger_than_the_budget(rank: int, directory: str) -> Any:
    """On the store only: a directory takes O_DIRECT writes, here as anywhere."""
    from megatron.core import dist_checkpointing

    from ckpt_engine.integrations.megatron.session import core

    if directory.startswith("msc://disk"):
        return None
    sharded = large_state()
    with Memory() as memory:
        save(sharded, directory)
    stats = core().workers.pool.stats()
    loaded = dist_checkpointing.load(large_state(fill=0), directory)
    same = all(torch.equal(loaded[key], value.data) for key, value in sharded.items())
    return {"same": same, "peak": stats.peak_in_use, "mapped": stats.mapped, "grown": memory.grown}


def large_state(fill: int = 1) -> dict[str, Any]:
    """A tensor of :data:`LARGE_BYTES` on rank 0, in one shard file, and a small one on the others."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    rank = dist.get_rank()
    mine = torch.arange(LARGE_BYTES // 8 if rank == 0 else 8, dtype=torch.int64) * fill
    return {"large": ShardedTensor.from_rank_offsets(f"large{rank}", mine)}


class Memory:
    """Inside, watches how far this process grows."""

    def __init__(self) -> None:
        self.grown = 0
        self._end = threading.Event()

    def _watch(self) -> None:
        import psutil

        process = psutil.Process()
        start = process.memory_info().rss
        self._ready.set()
        while not self._end.wait(0.003):
            self.grown = max(self.grown, process.memory_info().rss - start)

    def __enter__(self) -> Memory:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def act_saved_over(rank: int, directory: str) -> Any:
    """Over a committed checkpoint: with a part manifest that fails, which leaves it whole, then once more."""
    from ckpt_engine.integrations.megatron import write

    first = state(2.0)
    wanted = data_of(first)
    found = [_whole(directory, first, thread_count=1)]
    before = listing(directory)

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("x2")

    real, write.ThreadedWrite._publish = write.ThreadedWrite._publish, write.ThreadedWrite._publish
    if rank == 1:
        write.ThreadedWrite._publish = broken  # type: ignore[method-assign]
    try:
        error = _error_of(lambda: save(state(3.0), directory, thread_count=1))
    finally:
        write.ThreadedWrite._publish = real  # type: ignore[method-assign]
    dist.barrier()
    kept = listing(directory) == before
    common = _has_common(directory)
    found.append([] if common else problems(directory, wanted))  # else common.pt has been replaced by Megatron itself
    dist.barrier()
    found.append(_whole(directory, state(5.0), thread_count=1))
    files = [name for name in listing(directory) if name.endswith(".distcp")]
    return {"problems": found, "error": error, "kept": kept, "files": files}


def _has_common(directory: str) -> bool:
    return "common.pt" in listing(directory)


def act_refused(rank: int, directory: str) -> Any:
    """The store refuses a part of rank 1's shard; on a file system, the write does. The test's server knows what by its name."""
    from tests.megatron_ranks import writes

    def broken() -> None:
        raise OSError(28, "No space left on device")

    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    s3 = directory.startswith("msc://s3")
    strategy = _strategy(separation_hint="refused", thread_count=2)
    mine = torch.arange(12 * MIB // 8)
    sharded = {"large": ShardedTensor.from_rank_offsets("refused" if rank == 1 else "fine", mine)}
    found = {}
    for mode in ("sync", "async"):
        calls = queue()
        with contextlib.nullcontext() if s3 or rank == 0 else writes(broken):
            if mode == "sync":
                found[mode] = _error_of(lambda: save(sharded, directory, strategy=strategy))
            else:
                calls.schedule_async_request(save(sharded, directory, asynchronous=True, strategy=strategy))
                found[mode] = _error_of(lambda calls=calls: calls.maybe_finalize_async_calls(blocking=True))  # type: ignore[misc]
        dist.barrier()
    left = [name for name in listing(directory) if name not in ("common.pt", "ckpt_engine")]
    dist.barrier()
    return {"errors": found, "left": left, "again": _whole(directory, state(6.0))}


ACTS: dict[str, Callable[[int, str], Any]] = {
    name.removeprefix("act_"): act for name, act in list(vars(sys.modules[__name__]).items()) if name.startswith("act_")
}
