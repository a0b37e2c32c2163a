"""Megatron-Bridge's ``checkpoint.custom_manager_class``: the engine by a name in a configuration file, without patching anything.

    checkpoint:
      custom_manager_class: ckpt_engine.megatron.bridge.ThreadedCheckpointManager

Bridge takes names of packages that it knows only. Say this before it sets training up::

    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
    register_allowed_target_prefix("ckpt_engine.")

The manager is Bridge's own ``DefaultCheckpointManager`` with two parts exchanged: the strategy that writes
(:class:`~.strategy.ThreadedSaveStrategy`, injected where Bridge keeps the one of the save before), and the queue of asynchronous saves
(:class:`~.queues.ThreadAsyncCallsQueue`). Loading, ``train_state.pt``, trackers and ``run_config.yaml`` stay Bridge's. Settings of the
engine come from the environment (``CKPT_ENGINE_WRITERS`` and its like), since Bridge hands nothing else over.

``custom_manager_class`` needs a Bridge of August 2026 or later. With an older one, and in NeMo-RL, which calls Bridge's functions and never
makes a manager, ``ckpt_engine.megatron.install()`` does the same.
"""

from __future__ import annotations

import importlib
from typing import Any

from ckpt_engine.errors import ConfigError
from ckpt_engine.integrations.megatron.flags import config_from_args
from ckpt_engine.integrations.megatron.queues import ThreadAsyncCallsQueue
from ckpt_engine.integrations.megatron.strategy import ThreadedSaveStrategy

_KEY = "save_strategy"


class ThreadedCheckpointManager:
    """Bridge's ``CheckpointManager`` protocol.

    Args:
        checkpoint_config: Bridge's ``CheckpointConfig``.

    Raises:
        ConfigError: this Bridge has no managers, or a setting in the environment is unusable.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        module: Any = importlib.import_module("megatron.bridge.training.checkpointing")
        kind = getattr(module, "DefaultCheckpointManager", None)
        if kind is None:
            raise ConfigError(
                "this Megatron-Bridge has no checkpoint managers",
                phase="config",
                hint="call ckpt_engine.megatron.install() instead",
            )
        self.checkpoint_config = checkpoint_config
        self._config = config_from_args()
        self._default: Any = kind(checkpoint_config)

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """What Bridge keeps from save to save; it looks here to decide whether to resume."""
        context: dict[str, Any] = self._default.checkpointing_context
        return context

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Saves, or schedules a save. Collective. Raises what Bridge raises, and :class:`ckpt_engine.CheckpointError`."""
        self._use_threads(ctx.state)
        if _KEY not in self.checkpointing_context:
            self.checkpointing_context[_KEY] = self._strategy(ctx)
        self._default.save(ctx, callback_manager)

    def load(self, ctx: Any) -> Any:
        """Bridge's own loading: (iteration, FLOPs so far)."""
        return self._default.load(ctx)

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Finalises what is done. Collective."""
        self._use_threads(state)
        self._default.finalize_async_saves(state, blocking, terminate)

    def _use_threads(self, state: Any) -> None:
        """Exchanges the queue as long as nothing is on it."""
        queue = getattr(state, "_async_calls_queue", None)
        if queue is None or isinstance(queue, ThreadAsyncCallsQueue) or queue.get_num_unfinalized_calls():
            return
        queue.close()
        state._async_calls_queue = ThreadAsyncCallsQueue()

    def _strategy(self, ctx: Any) -> Any:
        config = self.checkpoint_config
        strategy: Any = ThreadedSaveStrategy(
            "torch_dist", 1, thread_count=getattr(config, "storage_writers_per_rank", None) or 1, config=self._config
        )
        if getattr(config, "fully_parallel_save", False):
            module: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.fully_parallel")
            groups = getattr(ctx, "pg_collection", None)
            group = groups.dp_cp if groups is not None else _data_parallel_group()
            constant = bool(getattr(config, "ckpt_assume_constant_structure", False))
            strategy = module.FullyParallelSaveStrategyWrapper(strategy, group, constant)
        return strategy


def _data_parallel_group() -> Any:
    module: Any = importlib.import_module("megatron.core.parallel_state")
    return module.get_data_parallel_group(with_context_parallel=True)
