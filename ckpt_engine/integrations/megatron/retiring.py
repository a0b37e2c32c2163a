"""Megatron-LM deletes old checkpoints of asynchronous runs in a forked process; here a thread does it.

``megatron.training.checkpointing`` is changed when it has been loaded, which may be long after ``install()``: hence the look
before each save. Only its own deletions are caught; whatever else it wants of ``multiprocessing`` it gets.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from ckpt_engine.commit.manifest import COMMIT_NAME
from ckpt_engine.commit.names import PART_DIRECTORY, step_name

log = logging.getLogger("ckpt_engine")

_MODULE = "megatron.training.checkpointing"
_DELETION = "_async_delete_checkpoint_impl"


def use_threads() -> None:
    """Gives Megatron-LM's checkpointing module, if it is loaded, deletions on threads. Idempotent."""
    module: Any = sys.modules.get(_MODULE)
    names = getattr(module, "__dict__", {})
    if names.get("multiprocessing") is multiprocessing and callable(names.get(_DELETION)):
        module.multiprocessing = _Multiprocessing(names[_DELETION])


def restore() -> None:
    """Takes :func:`use_threads` back."""
    module: Any = sys.modules.get(_MODULE)
    if isinstance(getattr(module, "__dict__", {}).get("multiprocessing"), _Multiprocessing):
        module.multiprocessing = multiprocessing


class _Multiprocessing:
    """The module ``multiprocessing`` with other contexts."""

    def __init__(self, deletion: Callable[..., Any]) -> None:
        self._deletion = deletion

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)

    def get_context(self, method: str | None = None) -> Any:
        return _Context(multiprocessing.get_context(method), self._deletion)


class _Context:
    """A context whose ``Process`` is a thread for one target."""

    def __init__(self, context: Any, deletion: Callable[..., Any]) -> None:
        self._context = context
        self._deletion = deletion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, *arguments: Any, **options: Any) -> Any:  # the name is multiprocessing's
        if arguments or options.get("target") is not self._deletion:
            return self._context.Process(*arguments, **options)
        where = options.get("args", ())
        # Save path, iteration, whether to log: what follows would lower the priority of the trainer.
        return _Deletion(lambda: self._deletion(*where[:3]), where)


class _Deletion(threading.Thread):
    """A deletion; has what Megatron-LM asks of a process."""

    pid = None

    def __init__(self, delete: Callable[[], Any], where: Any) -> None:
        super().__init__(name="ckpt-delete", daemon=True)
        # Long names: Thread has a _delete of its own, which ends the thread.
        self._checkpoint_delete, self._checkpoint_where = delete, where

    def run(self) -> None:
        try:
            # First of all: a checkpoint that is half removed must not be taken for a whole one.
            os.unlink(
                os.path.join(
                    self._checkpoint_where[0], step_name(self._checkpoint_where[1]), PART_DIRECTORY, COMMIT_NAME
                )
            )
        except FileNotFoundError:
            pass
        except Exception as error:
            log.warning("the commit record of a checkpoint that is being deleted stays: %s", error)
        self._checkpoint_delete()
