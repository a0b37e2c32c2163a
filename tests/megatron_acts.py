"""What two gloo ranks do with one version of megatron-core and the engine installed; each act returns what a test looks at.

All acts of a version run in one pair of processes (:func:`play`), one after the other, because starting them costs more than most
acts. In these processes no process can be started: every way to do so is patched to raise.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron_large_acts import act_many_tensors  # noqa: F401 - found by its name, below
from tests.megatron_ranks import (
    CONFIG,
    _async_act,
    _change_everything,
    _error_of,
    _forbid_processes,
    _framework,
    _keep_busy,
    _outcome,
    _surface,
    big_state,
    data_of,
    missing_seam,
    problems,
    published,
    queue,
    save,
    state,
    uninstalled_meanwhile,
    writes,
)


def play(rank: int, world: int, folder: str, root: str) -> dict[str, Any]:
    """Runs all acts; for each of them its result, or the text of what it raised."""
    import sys

    import ckpt_engine
    from tests import megatron_shims

    found: dict[str, Any] = {"imported_with_ckpt_engine": [name for name in sys.modules if name.startswith("megatron")]}
    megatron_shims.use(folder)
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("fork"))
    _forbid_processes()
    import ckpt_engine.megatron as adapter

    found["refused"] = _outcome(lambda: missing_seam(adapter))
    before = _surface()
    framework = _framework()
    for _ in range(2):
        found["checks"] = [str(check) for check in adapter.install(ckpt_engine.EngineConfig(**CONFIG))]
    for name, act in ACTS.items():
        directory = os.path.join(root, name)
        if rank == 0:
            os.mkdir(directory)
        dist.barrier()
        found[name] = _outcome(lambda act=act, directory=directory: act(rank, directory))  # type: ignore[misc]
        dist.barrier()
    found["by_name"] = [framework.is_changed()]
    found["uninstalled"] = _outcome(lambda: uninstalled_meanwhile(adapter, os.path.join(root, "uninstalled")))
    found["by_name"].append(framework.is_changed())
    found["restored"] = _surface() == before
    found["forks"] = forks
    return found


# -- acts ----------------------------------------------------------------------------------------------------------------


def act_sync(rank: int, directory: str) -> Any:
    sharded = state(2.0)
    wanted = data_of(sharded)
    save(sharded, directory, thread_count=2)
    return {"problems": problems(directory, wanted), "files": sorted(os.listdir(directory))}


def act_separated(rank: int, directory: str) -> Any:
    sharded = state(3.0)
    wanted = data_of(sharded)
    save(sharded, directory, thread_count=4, separation_hint="torch")
    return {"problems": problems(directory, wanted), "files": sorted(os.listdir(directory))}


def act_fully_parallel(rank: int, directory: str) -> Any:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import fully_parallel
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    from tests.megatron_shims import CudaMeansCpu

    inner = strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
    sharded = state(4.0)
    wanted = data_of(sharded)
    save(sharded, directory, strategy=fully_parallel.FullyParallelSaveStrategyWrapper(inner, dist.group.WORLD, True))
    loader = fully_parallel.FullyParallelLoadStrategyWrapper(
        strategies.TorchDistLoadShardedStrategy(), dist.group.WORLD
    )
    with CudaMeansCpu():
        loaded = dist_checkpointing.load(state(blank=True), directory, loader)
    return [*problems(directory, wanted), *([] if torch.equal(loaded["replica"], wanted["replica"]) else ["replica"])]


def act_temporal(rank: int, directory: str) -> Any:
    return _async_act(directory, queue())


def act_persistent(rank: int, directory: str) -> Any:
    calls = queue(persistent=True)
    warmup = getattr(type(calls), "warmup_persistent_caller", None)
    if warmup is not None:
        warmup(rank)
    return _async_act(directory, calls)


def act_larger_than_the_budget(rank: int, directory: str) -> Any:
    from ckpt_engine.integrations.megatron.session import core

    sharded = big_state()
    wanted = data_of(sharded)
    calls = queue()
    calls.schedule_async_request(save(sharded, directory, asynchronous=True))
    _change_everything(sharded)
    calls.maybe_finalize_async_calls(blocking=True)
    stats = core().workers.pool.stats()
    blank = {key: value for key, value in big_state().items() if value.data.zero_() is not None}
    return {
        "problems": problems(directory, wanted, blank),
        "peak": stats.peak_in_use,
        "mapped": stats.mapped,
        "ranks": core().workers.memory().local_ranks,
    }


def act_two_in_flight(rank: int, directory: str) -> Any:
    calls, found = queue(), []
    first, second = os.path.join(directory, "first"), os.path.join(directory, "second")
    states = {first: big_state(12), second: state(5.0)}
    wanted = {path: data_of(sharded) for path, sharded in states.items()}
    for path, sharded in states.items():
        calls.schedule_async_request(save(sharded, path, asynchronous=True))
    indexes = calls.maybe_finalize_async_calls(blocking=True)
    found += problems(first, wanted[first], big_state(12)) + problems(second, wanted[second])
    return {"indexes": indexes, "problems": found}


def act_failing_write(rank: int, directory: str) -> Any:
    """B004: the write of rank 1 raises something that is no OSError; then all is well again."""

    def broken() -> None:
        raise ValueError("x1")

    found: dict[str, Any] = {}
    for name in ("sync", "async"):
        path = os.path.join(directory, name)
        calls = queue()
        with writes(broken) if rank == 1 else contextlib.nullcontext():
            if name == "sync":
                found[name] = _error_of(lambda path=path: save(state(), path))  # type: ignore[misc]
            else:
                calls.schedule_async_request(save(state(), path, asynchronous=True))
                found[name] = _error_of(lambda calls=calls: calls.maybe_finalize_async_calls(blocking=True))  # type: ignore[misc]
        dist.barrier()
        found[f"{name} published"] = published(path)
        sharded = state(6.0)
        wanted = data_of(sharded)
        save(sharded, path)
        found[f"{name} again"] = problems(path, wanted)
    return found


def act_failing_copy(rank: int, directory: str) -> Any:
    """B049: the first copy on rank 0 raises in a thread of the engine."""
    from ckpt_engine.staging import stager

    real = stager.copy_part

    def broken(*_: Any) -> None:
        raise RuntimeError("copy1")

    calls = queue(persistent=True)
    if rank == 0:
        stager.copy_part = broken  # type: ignore[assignment]
    try:
        request = save(state(), directory, asynchronous=True)
        calls.schedule_async_request(request)
        error = _error_of(lambda: calls.maybe_finalize_async_calls(blocking=True))
    finally:
        stager.copy_part = real
    dist.barrier()
    return {"error": error, "published": published(directory)}


def act_no_memory(rank: int, directory: str) -> Any:
    """Rank 1 gets no staging memory at its first save; the next save looks again."""
    from ckpt_engine import MemoryBudgetError
    from ckpt_engine.integrations.megatron import session

    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryBudgetError("nothing left")

    real, kept = session.Workers, session.core()._workers
    session.core()._workers = None
    if rank == 1:
        session.Workers = refuse  # type: ignore[misc,assignment]
    try:
        error = _error_of(lambda: save(state(), os.path.join(directory, "refused")))
    finally:
        session.Workers = real  # type: ignore[misc]
    sharded = state(2.0)
    wanted = data_of(sharded)
    path = os.path.join(directory, "again")
    save(sharded, path)
    if kept is not None:
        kept.close()
    return {"error": error, "problems": problems(path, wanted)}


def act_failing_finish(rank: int, directory: str) -> Any:
    """Rank 0 can't give a part manifest its name; then it can't write .metadata. Stock leaves the others in a collective."""
    from megatron.core.dist_checkpointing import serialization

    from ckpt_engine.integrations.megatron import finalizing
    from ckpt_engine.storage import place

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    found, real = {}, finalizing._commit
    for name in ("fsync_dir", "write_atomic"):

        def commit(*arguments: Any, name: str = name) -> None:
            kept = getattr(place, name)
            setattr(place, name, broken)
            try:
                real(*arguments)
            finally:
                setattr(place, name, kept)

        for mode in ("sync", "async"):
            path = os.path.join(directory, f"{name}-{mode}")
            finalizing._commit = commit
            calls = queue()
            try:
                if mode == "sync":
                    found[path] = _error_of(lambda path=path: save(state(), path))  # type: ignore[misc]
                else:
                    calls.schedule_async_request(save(state(), path, asynchronous=True))
                    found[path] = _error_of(lambda calls=calls: calls.maybe_finalize_async_calls(blocking=True))  # type: ignore[misc]
            finally:
                finalizing._commit = real
            dist.barrier()
            if "commit.json" in published(path):
                found[path] += " but committed"
    sharded = state(2.0)
    wanted = data_of(sharded)
    serialization.save(sharded, directory)
    found["again"] = problems(directory, wanted) or "fine"
    return found


def act_staged_by_the_caller(rank: int, directory: str) -> Any:
    """As SkyRL stages a request before it schedules it, and as AReaL looks into one and clears it."""
    found: list[Any] = []
    for name in ("skyrl", "areal"):
        path, calls = os.path.join(directory, name), queue()
        sharded = state(7.0)
        wanted = data_of(sharded)
        request = save(sharded, path, asynchronous=True)
        if len(request.async_fn_args) != 3:
            found.append(f"{len(request.async_fn_args)} arguments")
        if name == "skyrl":
            args = list(request.async_fn_args)
            args[1] = request.preload_fn()
            request = request._replace(async_fn_args=tuple(args), preload_fn=None)
            _change_everything(sharded)
            calls.schedule_async_request(request)
        else:
            calls.schedule_async_request(request)
            for _, _, (_, tensors) in request.async_fn_args[1]:
                if not isinstance(tensors, list):
                    found.append("tensors are not in a list")
                tensors.clear()
            _change_everything(sharded)
        calls.maybe_finalize_async_calls(blocking=True)
        found += problems(path, wanted)
    return found


def act_polls(rank: int, directory: str) -> Any:
    """B035: rank 1 writes slowly; both poll, then wait."""
    calls, found = queue(), []
    with writes(lambda: time.sleep(1.0)) if rank == 1 else contextlib.nullcontext():
        calls.schedule_async_request(save(state(), directory, asynchronous=True))
        for _ in range(5):
            found.append(calls.maybe_finalize_async_calls(blocking=False))
            time.sleep(0.05)
        found.append(calls.maybe_finalize_async_calls(blocking=True))
    return found


def act_sync_after_async(rank: int, directory: str) -> Any:
    """B028: a synchronous save while an asynchronous one is on its way."""
    calls = queue()
    one, two = os.path.join(directory, "iter_0000001"), os.path.join(directory, "iter_0000002")
    first, second = state(1.0), state(2.0)
    wanted = data_of(first), data_of(second)
    slow = threading.Event()
    with writes(lambda: slow.is_set() or time.sleep(0.7)):
        calls.schedule_async_request(save(first, one, asynchronous=True))
        slow.set()
        save(second, two)
    finalized = calls.maybe_finalize_async_calls(blocking=True)
    return {"finalized": finalized, "problems": problems(one, wanted[0]) + problems(two, wanted[1])}


def act_abort(rank: int, directory: str) -> Any:
    """B017: a save is aborted after it was written and before it was finalised; the next one knows nothing of it."""
    import inspect

    from torch.distributed.checkpoint import FileSystemReader

    calls = queue()
    if "abort" not in inspect.signature(calls.close).parameters:
        return "this version knows no abort"
    abandoned, kept = os.path.join(directory, "a"), os.path.join(directory, "b")
    calls.schedule_async_request(save(big_state(2), abandoned, asynchronous=True))
    calls.async_calls[0].async_caller.write.wait()
    dist.barrier()
    calls.close(abort=True)
    sharded = state(3.0)
    wanted = data_of(sharded)
    calls.schedule_async_request(save(sharded, kept, asynchronous=True))
    calls.maybe_finalize_async_calls(blocking=True)
    keys = sorted(FileSystemReader(kept).read_metadata().state_dict_metadata)
    return {
        "problems": problems(kept, wanted),
        "foreign keys": [key for key in keys if key.startswith("w")],
        "abandoned": published(abandoned),
    }


def act_same_directory_again(rank: int, directory: str) -> Any:
    found = []
    for scale in (2.0, 3.0):
        sharded = state(scale)
        wanted = data_of(sharded)
        save(sharded, directory)
        found += problems(directory, wanted)
        dist.barrier()
    return found


def act_integrity(rank: int, directory: str) -> Any:
    """Megatron's own manifest of SHA-256 sums, where the version has it."""
    import inspect

    from megatron.core import dist_checkpointing

    if "verify_integrity" not in inspect.signature(dist_checkpointing.save).parameters:
        return "this version has no integrity manifest"
    from megatron.core.dist_checkpointing import validation

    def read_again(path: str) -> str:
        raise OSError(5, f"{path} is read a second time")

    sharded = state(2.0)
    wanted = data_of(sharded)
    real, validation._compute_file_hash = validation._compute_file_hash, read_again
    try:
        dist_checkpointing.save(sharded, directory, verify_integrity=True)
    finally:
        validation._compute_file_hash = real
    loaded = dist_checkpointing.load(state(blank=True), directory, verify_integrity=True)
    found = [] if torch.equal(loaded["replica"], wanted["replica"]) else ["replica differs"]
    return found + problems(directory, wanted)


def act_cached_structure(rank: int, directory: str) -> Any:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from tests.megatron_shims import CudaMeansCpu

    strategy, found = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True), []
    with CudaMeansCpu():
        for number in range(4):
            path = os.path.join(directory, f"iter_{number:07d}")
            sharded = state(number + 2.0)
            wanted = data_of(sharded)
            save(sharded, path, strategy=strategy)
            found += problems(path, wanted)
    return found


def act_in_a_thread(rank: int, directory: str) -> Any:
    """B058, B044: from a thread that isn't the main one, as in an actor, next to busy threads."""

    def refuse(*_: Any) -> Any:
        raise ValueError("signal only works in main thread")

    real, stop = signal.signal, threading.Event()
    signal.signal = refuse  # type: ignore[assignment]
    busy = [threading.Thread(target=_keep_busy, args=(stop,)) for _ in range(4)]
    result: list[Any] = []
    actor = threading.Thread(target=lambda: result.append(_outcome(lambda: _async_act(directory, queue()))))
    for thread in (*busy, actor):
        thread.start()
    try:
        actor.join(60)
    finally:
        stop.set()
        signal.signal = real
        for thread in busy:
            thread.join()
    return result


def act_train_state(rank: int, directory: str) -> Any:
    """A save with Megatron-LM's args, which go on counting after it was scheduled."""
    import argparse

    from ckpt_engine import TrainState
    from ckpt_engine.restore.verify import verify_checkpoint

    path = os.path.join(directory, "iter_0000012")
    latest = os.path.join(directory, "latest_train_state.pt")
    args = argparse.Namespace(iteration=11, consumed_train_samples=480, skipped_train_samples=3, do_train=True)
    sharded = {**state(12.0), "args": args, "iteration": 12, "num_floating_point_operations_so_far": 2.0**70}
    seen: list[bool] = []
    calls = queue()
    request = save(sharded, path, asynchronous=True)
    request.add_finalize_fn(lambda: seen.append(os.path.exists(latest) and "commit.json" in published(path)))
    calls.schedule_async_request(request)
    args.consumed_train_samples = 999
    calls.maybe_finalize_async_calls(blocking=True)
    files = [os.path.join(path, "train_state.pt"), latest]
    contents = []
    for file in files:
        with open(file, "rb") as stream:
            contents.append(TrainState.from_bytes(stream.read()))
    return {"seen": seen, "states": contents, "ok": verify_checkpoint(path).problems}


def act_not_ours(rank: int, directory: str) -> Any:
    """A request of somebody else goes stock's way, which here ends in the patched fork."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    return _error_of(lambda: queue().schedule_async_request(AsyncRequest(io.BytesIO, (), [])))


ACTS: dict[str, Callable[[int, str], Any]] = {
    name.removeprefix("act_"): act for name, act in list(globals().items()) if name.startswith("act_")
}
