"""What the acts of :mod:`tests.megatron_frameworks` are made of: Megatron's names and calls as frameworks use them, and their patches.

Nothing here knows of the engine.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron_ranks import _change_everything, problems

#: How SkyRL finds the shard files of a rank in a bucket.
SHARD_FILE = re.compile(r"__(\d+)_\d+\.distcp$")

#: The files that say that a checkpoint is complete: to torch, to us, to Megatron.
ENDS = [".metadata", "commit.json", "metadata.json"]

#: What frameworks have imported by name before anybody installs the engine.
names: dict[str, Any] = {}


def import_by_name() -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    for kind in (
        *(AsyncCallsQueue, AsyncRequest, FileSystemWriterAsync),
        *(FullyParallelSaveStrategyWrapper, TorchDistSaveShardedStrategy),
    ):
        names[kind.__name__] = kind


# -- saves ---------------------------------------------------------------------------------------------------------------


def save(sharded: dict[str, Any], directory: str, strategy: Any, **options: Any) -> Any:
    """Megatron's save, fully parallel, into a directory that one rank has made."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        os.makedirs(directory, exist_ok=True)
    dist.barrier()
    return dist_checkpointing.save(
        sharded_state_dict=sharded,
        checkpoint_dir=directory,
        sharded_strategy=names["FullyParallelSaveStrategyWrapper"](strategy, dist.group.WORLD),
        validate_access_integrity=True,
        **options,
    )


def default_strategy() -> Any:
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    return get_default_save_sharded_strategy("torch_dist")


def own_strategy(**options: Any) -> Any:
    return names["TorchDistSaveShardedStrategy"](backend="torch_dist", version=1, **options)


def asked(strategy: str) -> dict[str, str]:
    """The argument that asks for this asynchronous strategy; none where this Megatron's save doesn't take it (before 0.17)."""
    from megatron.core import dist_checkpointing

    known = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": strategy} if known else {}


def free(sharded: dict[str, Any]) -> None:
    """What off-loading does to tensors: other values, then no memory at all."""
    _change_everything(sharded)
    for value in sharded.values():
        if isinstance(getattr(value, "data", None), torch.Tensor):
            value.data.untyped_storage().resize_(0)
    sharded.clear()


def blank_of(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A state to load into."""
    blank = make()
    _change_everything(blank)
    return blank


def wrong_with(wanted: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with checkpoints of :func:`tests.megatron_ranks.state`, by directory."""
    return [f"{directory}: {problem}" for directory, data in wanted.items() for problem in problems(directory, data)]


def shards_of(directory: str, rank: int) -> set[str]:
    """The files with shards that only this rank can have written."""
    from torch.distributed.checkpoint import FileSystemReader

    places = FileSystemReader(directory).read_metadata().storage_data
    shards = {torch.Size((rank * 8, 0)): "torch.float32", torch.Size((0, rank * 10)): "columns"}
    return {place.relative_path for index, place in places.items() if shards.get(index.offset) == index.fqn}


def in_a_thread(work: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as helper:
        return helper.submit(work).result(60)


# -- queues and requests -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def skyrls_queue() -> Iterator[Any]:
    """Megatron's module with the queue that SkyRL puts there; as it was afterwards, for the other frameworks."""
    from megatron.core.dist_checkpointing.strategies import base
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    before = {key: value for key, value in vars(base).items() if key == "async_calls"}
    base.async_calls = AsyncCallsQueue(persistent=True)
    try:
        yield base
    finally:
        base.async_calls.close()
        del base.async_calls
        vars(base).update(before)


def staged_on_the_host(request: Any) -> Any:
    """The request with its tensors copied by this rank, so that whoever writes never sees the originals."""
    if request.preload_fn is None:  # nothing to write here
        return request
    args = list(request.async_fn_args)
    if len(args) != 3:
        raise ValueError(f"the request has {len(args)} arguments, expected 3")
    args[1] = request.preload_fn()
    return request._replace(async_fn_args=tuple(args), preload_fn=None)


def retained_by(request: Any) -> list[list[Any]]:
    """The tensor lists in a request, as AReaL looks for them: it refuses to save if they are elsewhere."""
    args = request.async_fn_args
    if not isinstance(args, (list, tuple)) or len(args) != 3 or not isinstance(args[1], list):
        raise ValueError(f"arguments of an unknown form: {args!r}")
    lists = []
    for bucket in args[1]:
        if not isinstance(bucket, tuple) or len(bucket) != 3:
            raise ValueError(f"a bucket of an unknown form: {bucket!r}")
        content = bucket[2]
        if not isinstance(content, tuple) or len(content) != 2 or not isinstance(content[1], list):
            raise ValueError(f"a bucket's content of an unknown form: {content!r}")
        lists.append(content[1])
    return lists


def queue_of_megatron_training() -> Any:
    """A new queue in the place where Megatron-LM's training code keeps its own, if this version brings that code."""
    queue = names["AsyncCallsQueue"]()
    if asked("nvrx"):
        from megatron.training import async_utils

        async_utils._async_calls_queue = queue
    return queue


def async_classes() -> dict[str, Any]:
    """What ``get_async_strategy`` hands out for its default; the same by name where there is no such function."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    if hasattr(strategies, "get_async_strategy"):
        classes: dict[str, Any] = strategies.get_async_strategy("nvrx")[1]
        return classes
    return {**names, "get_write_results_queue": lambda _: filesystem_async._get_write_results_queue()}


# -- patches -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def saves_through_nvrx() -> Iterator[None]:
    """As NeMo-RL changes the synchronous save."""
    kind = names["TorchDistSaveShardedStrategy"]
    original = kind.save

    def save(self: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        try:
            self.async_save(sharded_state_dict, checkpoint_dir, **asked("nvrx")).execute_sync()
        except ImportError:
            original(self, sharded_state_dict, checkpoint_dir)

    kind.save = save
    try:
        yield
    finally:
        kind.save = original


@contextlib.contextmanager
def threads_forced(count: int) -> Iterator[None]:
    """As ms-swift changes how strategies are made."""
    kind = names["TorchDistSaveShardedStrategy"]
    original = kind.__init__

    def init(*args: Any, **options: Any) -> None:
        original(*args, **{**options, "thread_count": count})

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = original


@contextlib.contextmanager
def another_writer() -> Iterator[None]:
    """As slime and miles replace the writer's class on ROCm: its staging must not pin memory."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    original = filesystem_async.FileSystemWriterAsync

    class Unpinned(original):  # type: ignore[misc,valid-type]
        @staticmethod
        def preload_tensors(*args: Any, **options: Any) -> Any:
            return original.preload_tensors(*args[:1], **{**options, "non_blocking": False})

    filesystem_async.FileSystemWriterAsync = Unpinned
    try:
        yield
    finally:
        filesystem_async.FileSystemWriterAsync = original
