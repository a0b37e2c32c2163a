"""The save strategy for those who want nothing patched: an object for ``dist_checkpointing.save(..., sharded_strategy=...)``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from ckpt_engine.commit.names import parse_step
from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import ConfigError
from ckpt_engine.integrations.megatron import session
from ckpt_engine.integrations.megatron.requests import save_request
from ckpt_engine.integrations.megatron.write import unfinished
from ckpt_engine.train_state import TrainState


class ThreadedSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """mcore's ``torch_dist`` strategy, planned, written and finalised by the engine. Nothing of Megatron is changed.

    A subclass, since ``dist_checkpointing.save`` quietly replaces other objects; composes with ``FullyParallelSaveStrategyWrapper``.
    Schedule the requests of :meth:`async_save` on :class:`~.queues.ThreadAsyncCallsQueue`; on a stock queue they work, too, next to
    the process that it starts.

    Without ``install()``, Megatron rewrites ``metadata.json`` with the same content after the commit: a kill in that moment leaves
    an empty one, which ``verify`` reports.

    Args:
        arguments, options: those of ``TorchDistSaveShardedStrategy``; backend and version may be left out.
        config: settings of the engine for all Megatron saves of this process, on every rank the same.
        train_state: called at each save on rank 0 for the progress to write as ``train_state.pt``; must match the step of the directory.
    """

    def __init__(
        self,
        *arguments: Any,
        config: EngineConfig | None = None,
        train_state: Callable[[], TrainState] | None = None,
        **options: Any,
    ) -> None:
        for name, default in (("backend", "torch_dist"), ("version", 1))[len(arguments) :]:
            options.setdefault(name, default)
        super().__init__(*arguments, **options)
        self.train_state = train_state
        if config is not None:
            session.configure(config, unfinished=len(unfinished))

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "nvrx") -> Any:
        """Plans the save with the other ranks; returns the request. Collective.

        Args:
            async_strategy: taken and not used: the queue that the request is scheduled on decides.

        Raises:
            CheckpointError: the same on every rank; nothing was written.
        """
        return save_request(self, sharded_state_dict, checkpoint_dir, train_state=self._train_state_of)

    async_save.ours = True  # type: ignore[attr-defined]

    def _train_state_of(self, directory: str) -> bytes | None:
        if self.train_state is None:
            return None
        found, step = self.train_state(), parse_step(os.path.basename(directory))
        if step is not None and found.step != step:
            raise ConfigError(
                f"train_state.step is {found.step}, but the checkpoint is {os.path.basename(directory)}",
                step=step,
                path=directory,
                phase="plan",
            )
        return found.to_bytes()

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Saves now. Collective.

        Raises:
            CheckpointError: planning failed, on every rank.
            CheckpointException: the save failed on some rank; on every rank.
        """
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()
