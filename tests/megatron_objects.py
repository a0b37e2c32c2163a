"""What two gloo ranks do with the objects of the Megatron adapter that change nothing: the strategy and the queue."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests import megatron_ranks
from tests.megatron_ranks import _async_act, _error_of, _outcome, data_of, problems, published, save, state, writes


def play(rank: int, world: int, folder: str, root: str) -> dict[str, Any]:
    """Runs all acts; for each of them its result, or the text of what it raised."""
    from tests import megatron_shims

    megatron_shims.use(folder)
    found: dict[str, Any] = {"before": _outcome(_foreign_queue(rank, root))}
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("fork"))
    megatron_ranks._forbid_processes()
    surface = megatron_ranks._surface()
    for name, act in ACTS.items():
        directory = os.path.join(root, name)
        if rank == 0:
            os.mkdir(directory)
        dist.barrier()
        found[name] = _outcome(lambda act=act, directory=directory: act(rank, directory))  # type: ignore[misc]
        dist.barrier()
    found["unchanged"] = megatron_ranks._surface() == surface
    found["forks"] = forks
    return found


def strategy(**options: Any) -> Any:
    import ckpt_engine
    import ckpt_engine.megatron

    return ckpt_engine.megatron.ThreadedSaveStrategy(
        config=ckpt_engine.EngineConfig(**megatron_ranks.CONFIG), **options
    )


def _queue() -> Any:
    import ckpt_engine.megatron

    return ckpt_engine.megatron.ThreadAsyncCallsQueue()


def _foreign_queue(rank: int, root: str) -> Callable[[], Any]:
    """On Megatron's own temporal queue, which forks to call the request."""

    def act() -> Any:
        directory = os.path.join(root, "foreign")
        sharded = state(2.0)
        wanted = data_of(sharded)
        calls = megatron_ranks.queue()
        calls.schedule_async_request(save(sharded, directory, asynchronous=True, strategy=strategy()))
        megatron_ranks._change_everything(sharded)
        return [calls.maybe_finalize_async_calls(blocking=True), problems(directory, wanted)]

    return act


def act_sync(rank: int, directory: str) -> Any:
    sharded = state(2.0)
    wanted = data_of(sharded)
    save(sharded, directory, strategy=strategy(thread_count=2))
    return {"problems": problems(directory, wanted), "files": sorted(os.listdir(directory))}


def act_positional(rank: int, directory: str) -> Any:
    """As verl and Bridge make it: backend and version first."""
    from ckpt_engine.megatron import ThreadedSaveStrategy

    made = ThreadedSaveStrategy("torch_dist", 1, thread_count=3)
    return [made.backend, made.version, made.thread_count]


def act_async(rank: int, directory: str) -> Any:
    real = megatron_ranks.save
    megatron_ranks.save = lambda *args, **options: real(*args, strategy=strategy(), **options)  # type: ignore[assignment]
    try:
        return _async_act(directory, _queue())
    finally:
        megatron_ranks.save = real


def act_fully_parallel(rank: int, directory: str) -> Any:
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    sharded = state(4.0)
    wanted = data_of(sharded)
    wrapper = FullyParallelSaveStrategyWrapper(strategy(), dist.group.WORLD, True)
    calls = _queue()
    calls.schedule_async_request(save(sharded, directory, asynchronous=True, strategy=wrapper))
    calls.close()
    return problems(directory, wanted)


def act_train_state(rank: int, directory: str) -> Any:
    from ckpt_engine import TrainState

    path = os.path.join(directory, "iter_0000025")
    counters = {"step": 25, "consumed_train_samples": 100}
    made = strategy(train_state=lambda: TrainState(**counters))
    calls = _queue()
    request = save(state(), path, asynchronous=True, strategy=made)
    calls.schedule_async_request(request)
    counters.update(step=28, consumed_train_samples=112)
    calls.maybe_finalize_async_calls(blocking=True)
    wrong = _error_of(lambda: save(state(), os.path.join(directory, "iter_0000026"), strategy=made))
    with open(os.path.join(path, "train_state.pt"), "rb") as file:
        return {"state": TrainState.from_bytes(file.read()), "wrong": wrong}


def act_failing_write(rank: int, directory: str) -> Any:
    def broken() -> None:
        raise OSError(28, "No space left on device")

    calls = _queue()
    with writes(broken) if rank == 1 else contextlib.nullcontext():
        calls.schedule_async_request(save(state(), directory, asynchronous=True, strategy=strategy()))
        error = _error_of(lambda: calls.maybe_finalize_async_calls(blocking=True))
    dist.barrier()
    left = [published(directory), [name for name in os.listdir(directory) if name.endswith(".distcp")]]
    sharded = state(6.0)
    wanted = data_of(sharded)
    calls.schedule_async_request(save(sharded, directory, asynchronous=True, strategy=strategy()))
    return {
        "error": error,
        "left": left,
        "indexes": calls.maybe_finalize_async_calls(blocking=True),
        "again": problems(directory, wanted),
    }


def act_saved_over(rank: int, directory: str) -> Any:
    """B098: the same step again, which fails; then with fewer files; the one that is there stays whole until the next commits."""
    if os.path.exists(os.path.join(os.path.dirname(directory), "sync", "common.pt")):
        return "this version rewrites common.pt at once"

    def broken() -> None:
        raise ValueError("x2")

    first, second = state(2.0), state(3.0)
    wanted = data_of(first), data_of(second)
    save(first, directory, strategy=strategy(thread_count=3))
    found = [problems(directory, wanted[0])]
    dist.barrier()
    with writes(broken) if rank == 1 else contextlib.nullcontext():
        error = _error_of(lambda: save(second, directory, strategy=strategy()))
    dist.barrier()
    found.append(problems(directory, wanted[0]))
    dist.barrier()
    save(second, directory, strategy=strategy())
    found.append(problems(directory, wanted[1]))
    dist.barrier()
    return {"problems": found, "error": error, "files": sorted(n for n in os.listdir(directory) if "distcp" in n)}


def act_changing_structure(rank: int, directory: str) -> Any:
    """B023: with a constant structure promised, an object appears, then a shape, a dtype, and the names change."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    def shard(key: str, rows: int, dtype: Any) -> Any:
        return ShardedTensor.from_rank_offsets(
            key, torch.full((rows, 3), 7.0).to(dtype), (0, rank, dist.get_world_size())
        )

    versions: list[Callable[[], dict[str, Any]]] = [
        lambda: {"a": shard("a", 2, torch.float32)},
        lambda: {
            "a": shard("a", 2, torch.float32),
            "extra": ShardedObject("extra", {"n": 1}, (1,), (0,), replica_id=rank),
        },
        lambda: {"a": shard("a", 4, torch.float32)},
        lambda: {"a": shard("a", 4, torch.bfloat16)},
        lambda: {"b": shard("b", 4, torch.bfloat16)},
        lambda: {"a": shard("a", 2, torch.float32)},
    ]
    made, found = strategy(cached_metadata=True), []
    for number, version in enumerate(versions):
        path = os.path.join(directory, f"iter_{number:07d}")
        wanted = data_of(version())
        save(version(), path, strategy=made)
        blank = version()
        for value in blank.values():
            value.data = torch.zeros_like(value.data) if isinstance(value.data, torch.Tensor) else None
        found += problems(path, wanted, blank)
    return found


def act_flattened(rank: int, directory: str) -> Any:
    """Slices of flattened tensors, as distributed optimizers have them in versions before 0.16."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    def shard(scale: float) -> Any:
        half = slice(12 * rank, 12 * rank + 12)  # of a 2 x 12 local tensor, of which there are two
        data = torch.arange(24, dtype=torch.float32)[half] * scale
        return ShardedTensor.from_rank_offsets_flat("flat", data, (2, 12), (0, 0, 1), flattened_range=half)

    try:
        sharded = {"flat": shard(2.0)}
    except Exception as error:
        return f"this version has no flattened tensors: {type(error).__name__}"
    wanted = sharded["flat"].data.clone()
    save(sharded, directory, strategy=strategy())
    loaded = dist_checkpointing.load({"flat": shard(0.0)}, directory)
    row = ShardedTensor.from_rank_offsets_flat(
        "flat", torch.zeros(12), (1, 12), (0, rank, 2), flattened_range=slice(0, 12)
    )
    reshaped = dist_checkpointing.load({"flat": row}, directory)
    return [torch.equal(loaded["flat"], wanted), torch.equal(reshaped["flat"], wanted)]


def act_bad_shards(rank: int, directory: str) -> Any:
    """B112: rows on no rank, on two ranks, beyond the edge; an object of two ranks. Told at the call, with nothing written."""
    import dataclasses

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    import ckpt_engine.megatron

    def shard(offset: int, rows: int) -> Any:
        made = ShardedTensor.from_rank_offsets("w", torch.zeros(rows, 8))
        return dataclasses.replace(made, global_shape=(4, 8), global_offset=(offset, 0), axis_fragmentations=None)

    try:
        shard(1, 3)  # on every rank: one that raised alone would leave the other in a collective
    except Exception as error:
        return f"this version describes regular grids only: {type(error).__name__}"
    cases = {
        "missing": {"w": shard(rank, 1)},
        "twice": {"w": shard(rank, 3)},
        "beyond": {"w": shard(3 * rank, 2)},
        "object": {"o": ShardedObject("o", rank, (1,), (0,)), "w": shard(2 * rank, 2)},
        "leaf": {"layer": {"w": shard(2 * rank, 2)}, "n": 3},
    }
    found = {}
    for name, sharded in cases.items():
        path = os.path.join(directory, name)
        if name == "leaf":  # what dist_checkpointing.save would have sorted out
            found[name] = _error_of(lambda path=path, sharded=sharded: strategy().save(sharded, path))  # type: ignore[misc]
        else:
            os.makedirs(path, exist_ok=True)
            found[name] = _error_of(
                lambda path=path, sharded=sharded: dist_checkpointing.save(  # type: ignore[misc]
                    sharded, path, strategy(), validate_access_integrity=False
                )
            )
        dist.barrier()
        if [file for file in os.listdir(os.path.dirname(path)) if "distcp" in file]:
            found[name] += " but wrote"
        if name != "leaf":
            found[f"{name} checked"] = _error_of(lambda sharded=sharded: ckpt_engine.megatron.check(sharded))  # type: ignore[misc]
    found["fine"] = _error_of(lambda: ckpt_engine.megatron.check(state()))
    return found


def act_unpicklable(rank: int, directory: str) -> Any:
    """B085: an object that can't be pickled, on one rank; and finalize functions that can't."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    sharded: dict[str, Any] = state()
    sharded["lock"] = ShardedObject("lock", threading.Lock() if rank == 1 else 1, (2,), (rank,))
    error = _error_of(lambda: save(sharded, os.path.join(directory, "lock"), strategy=strategy()))
    calls, lock, called = _queue(), threading.Lock(), []
    request = save(state(), os.path.join(directory, "finalize"), asynchronous=True, strategy=strategy())
    request.add_finalize_fn(lambda: called.append(lock.locked()))
    calls.schedule_async_request(request)
    calls.maybe_finalize_async_calls(blocking=True)
    files = [name for name in os.listdir(os.path.join(directory, "lock")) if "distcp" in name]
    return {"error": error, "called": called, "files": files}


def act_never_scheduled(rank: int, directory: str) -> Any:
    """B046: a request that its owner drops."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt_engine").addHandler(handler)
    request = save(state(), directory, asynchronous=True, strategy=strategy())
    del request
    gc.collect()
    logging.getLogger("ckpt_engine").removeHandler(handler)
    return [line for line in lines if "never scheduled" in line]


def act_alone(rank: int, directory: str) -> Any:
    """B022: only rank 0 finalises; then only rank 1 saves. Both end, and name the other."""
    import ckpt_engine
    from ckpt_engine.integrations.megatron import session

    session.configure(ckpt_engine.EngineConfig(**{**megatron_ranks.CONFIG, "commit_timeout": 3.0}), unfinished=0)
    from ckpt_engine.megatron import ThreadedSaveStrategy

    request = save(state(), directory, asynchronous=True, strategy=ThreadedSaveStrategy())
    request.async_fn(*request.async_fn_args)
    found = [_error_of(request.finalize_fns[0]) if rank == 0 else "later"]
    dist.barrier()
    if rank == 1:
        found.append(_error_of(request.finalize_fns[0]))
    dist.barrier()
    sharded = state(2.0)
    wanted = data_of(sharded)
    save(sharded, directory, strategy=ThreadedSaveStrategy())
    return {"errors": found, "again": problems(directory, wanted)}


def act_somebody_elses(rank: int, directory: str) -> Any:
    """Requests that aren't ours run in a thread of the queue; what they raise is raised when they are finalised."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    calls, seen = _queue(), []
    request = AsyncRequest(
        lambda *args: seen.append(args), [1, None, 3], [lambda: seen.append("final")], preload_fn=lambda: 2
    )
    first = calls.schedule_async_request(request)
    empty = calls.schedule_async_request(AsyncRequest(None, (), [lambda: seen.append("empty")]))
    done = calls.maybe_finalize_async_calls(blocking=True)
    calls.schedule_async_request(AsyncRequest(lambda: 1 // 0, (), []))
    error = _error_of(lambda: calls.maybe_finalize_async_calls(blocking=True))
    calls.close()
    return {
        "seen": seen,
        "indexes": [first, empty],
        "done": done,
        "error": error,
        "left": calls.get_num_unfinalized_calls(),
    }


def act_in_another_process(rank: int, directory: str) -> Any:
    """What a queue that pickles a request sends away is a function that does nothing."""
    request = save(state(), directory, asynchronous=True, strategy=strategy())
    sent = pickle.loads(pickle.dumps(request.async_fn))
    result = sent(0, [], None)
    request.async_fn(*request.async_fn_args)
    for function in request.finalize_fns:
        function()
    return [result, published(directory)]


def act_pending(rank: int, directory: str) -> Any:
    """B025, B070, B065: written, but not finalised: not published, not logged as committed, not taken for the latest."""
    from ckpt_engine.commit.directory import CheckpointDirectory
    from ckpt_engine.restore.verify import verify_checkpoint

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ckpt_engine")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    calls, first, second = _queue(), os.path.join(directory, "iter_0000001"), os.path.join(directory, "iter_0000002")
    try:
        save(state(), first, strategy=strategy())
        lines.clear()
        calls.schedule_async_request(save(state(2.0), second, asynchronous=True, strategy=strategy()))
        calls.async_calls[0].async_caller.write.wait()
        dist.barrier()
        latest = next(iter(CheckpointDirectory(directory).newest_first()), None)
        visible = [name for name in published(second) if ".tmp-" not in name]
        pending = [visible, verify_checkpoint(second).ok, [n for n in lines if "committed" in n], latest]
        staged = [line for line in lines if "step 2 staged" in line]
        dist.barrier()
        calls.maybe_finalize_async_calls(blocking=True)
        committed = [line for line in lines if "step 2 committed" in line]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return {"pending": pending, "staged": len(staged), "committed": len(committed) - (rank == 0)}


def act_growing(rank: int, directory: str) -> Any:
    """B082: ten saves while the process gains threads and the tensors change their sizes."""
    from megatron.core.dist_checkpointing import ShardedTensor

    stop, found, threads = threading.Event(), [], []
    try:
        for number in range(10):
            for _ in range(8):
                threads.append(threading.Thread(target=megatron_ranks._keep_busy, args=(stop,), daemon=True))
                threads[-1].start()
            rows, path = 100 + 37 * number, os.path.join(directory, f"iter_{number:07d}")

            def sharded(value: float, rows: int = rows) -> dict[str, Any]:
                return {
                    "w": ShardedTensor.from_rank_offsets(
                        "w", torch.full((rows, 64), value), (0, rank, dist.get_world_size())
                    )
                }

            save(sharded(number + 1.0), path, strategy=strategy())
            found += problems(path, data_of(sharded(number + 1.0)), sharded(0.0))
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    return found


def act_directory_race(rank: int, directory: str) -> Any:
    """B061: mkdir says "exists", and for a moment the directory isn't seen."""
    import time

    path, until = os.path.join(directory, "deep", "iter_0000003"), time.monotonic() + 0.3
    mkdir, isdir = os.mkdir, os.path.isdir
    fault = [FileExistsError(17, "File exists")]

    def racing(target: Any, *args: Any, **options: Any) -> None:
        if fault and str(target).startswith(directory):
            raise fault.pop()
        mkdir(target, *args, **options)

    sharded = state(2.0)
    wanted = data_of(sharded)
    os.mkdir = racing
    os.path.isdir = lambda target: time.monotonic() > until and isdir(target)
    try:
        strategy().save({key: value for key, value in sharded.items() if hasattr(value, "replica_id")}, path)
    finally:
        os.mkdir, os.path.isdir = mkdir, isdir
    del wanted
    return published(path)


ACTS: dict[str, Callable[[int, str], Any]] = {
    name.removeprefix("act_"): act for name, act in list(vars(sys.modules[__name__]).items()) if name.startswith("act_")
}
