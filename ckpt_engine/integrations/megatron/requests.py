"""Async requests: what a save strategy gives its caller, for Megatron's queue, for NVRx's, for ours, or for none.

The request is of Megatron's class where there is one, else of NVRx's, else of :class:`AsyncRequest`, with the same fields: code that
unpacks, replaces or isinstance-checks requests goes on working. It finds the usual three arguments in it::

    async_fn(*async_fn_args)     the :class:`~.write.ThreadedWrite`
    async_fn_args                [rank, buckets in stock's layout, None]
    preload_fn()                 stages, and returns the buckets emptied
    finalize_fns                 [:class:`~.finalizing.Finalize`]
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ckpt_engine.integrations.megatron.finalizing import Finalize
from ckpt_engine.integrations.megatron.session import core
from ckpt_engine.integrations.megatron.write import Target, ThreadedWrite


class AsyncRequest(NamedTuple):
    """For installations where neither Megatron nor NVRx has one. Fields and methods are those of their classes."""

    async_fn: Callable[..., Any] | None
    async_fn_args: Any
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - never changed
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Adds what all ranks call once the save is finalised.

        Raises:
            RuntimeError: the request is scheduled already.
        """
        if self.is_frozen:
            raise RuntimeError("a finalize function can't be added to a request that is scheduled")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Saves now: returns when the checkpoint is complete. Collective."""
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            args[1] = self.preload_fn()
        if self.async_fn is not None:
            self.async_fn(*args, **self.async_fn_kwargs)
        for function in self.finalize_fns:
            function()

    def freeze(self) -> AsyncRequest:
        """The request as a queue keeps it."""
        return self._replace(is_frozen=True)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Runs the finalize functions. Collective. Returns the index of the request."""
        for function in self.finalize_fns:
            function()
        return self.call_idx


@dataclasses.dataclass
class Running:
    """What is known of the ``dist_checkpointing.save`` that is running in this process, from its arguments.

    Attributes:
        train_state: content of ``train_state.pt``.
        digests: ``integrity.json`` will be written.
        ours: the strategy that it was given is planned and checked by the engine.
        complete: the caller wants the sharding validated.
        common: backend and version of the strategy that writes ``common.pt``, if it isn't the usual one.
    """

    train_state: bytes | None = None
    digests: bool = False
    ours: bool = False
    complete: bool = False
    common: tuple[str, int] | None = None


#: Set by the seam on ``dist_checkpointing.save``; what a strategy that is called directly knows of it is nothing.
running = Running()


def save_request(
    strategy: Any, state: Any, directory: Any, *, train_state: Callable[[str], bytes | None] = lambda _: None
) -> Any:
    """Plans a save together with the other ranks, and returns the request for it. Nothing is copied or written yet. Collective.

    Args:
        strategy: mcore's ``TorchDistSaveShardedStrategy`` or one that has its attributes.
        state: sharded state dict, factories applied.
        directory: checkpoint directory, shared by all ranks.
        train_state: makes the content of ``train_state.pt`` for a directory, if the running save doesn't say.

    Raises:
        CheckpointError: the same on every rank. Nothing was written.
    """
    from ckpt_engine.integrations.megatron.layouts import Wanted
    from ckpt_engine.integrations.megatron.planning import open_save

    hint = getattr(strategy, "separation_hint", None)
    files = int(getattr(strategy, "thread_count", 1) or 1)
    wanted = Wanted(max(files, 2 if hint is not None else 1), hint, running.complete)
    mine = core()
    settings = f"checksum={mine.config.checksum} digests={running.digests}"
    known = running.train_state
    opening = open_save(
        mine,
        mine.session(),
        state,
        directory,
        wanted=wanted,
        settings=settings,
        train_state=train_state if known is None else lambda _: known,
    )
    config = _config_text(strategy.backend, strategy.version, running.common)
    write = ThreadedWrite(mine, mine.session(), opening, Target(config, running.digests))
    kind = request_class()
    return kind(write, [write.rank, write.buckets(), None], [Finalize(write)], preload_fn=write.preload)


def _config_text(backend: str, version: int, common: tuple[str, int] | None) -> bytes:
    """``metadata.json`` as this version of Megatron writes it."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig

    config = CheckpointingConfig(backend, version, *(common or ()))
    return json.dumps(dataclasses.asdict(config)).encode()


def request_class() -> Any:
    """The class of requests: Megatron's, NVRx's, or ours."""
    for module in (
        "megatron.core.dist_checkpointing.strategies.async_utils",
        "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
    ):
        try:
            return vars(importlib.import_module(module))["AsyncRequest"]
        except Exception:  # not there, or not fit for the rest of the installation
            continue
    return AsyncRequest
