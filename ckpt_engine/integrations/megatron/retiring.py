"""Megatron-LM deletes old checkpoints of asynchronous runs in a forked process; here a thread does it.

And the commit record goes first, in every deletion: a checkpoint that is half removed must not be taken for a whole one.
Only the deletions of ``megatron.training.checkpointing`` are caught; whatever else it wants of ``multiprocessing`` it gets.
:mod:`.training` knows when that module is there to be changed.
"""

from __future__ import annotations

import functools
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
        deletion = _record_first(names[_DELETION])
        setattr(module, _DELETION, deletion)
        module.multiprocessing = _Multiprocessing(deletion)


def restore() -> None:
    """Takes :func:`use_threads` back."""
    module: Any = sys.modules.get(_MODULE)
    ours: Any = getattr(module, "__dict__", {}).get("multiprocessing")
    if isinstance(ours, _Multiprocessing):
        module.multiprocessing = multiprocessing
        if vars(module).get(_DELETION) is ours.deletion:
            setattr(module, _DELETION, ours.deletion.__wrapped__)


def _record_first(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def delete(save_path: Any, iteration_to_delete: int, *args: Any, **kwargs: Any) -> Any:
        try:
            os.unlink(os.path.join(save_path, step_name(iteration_to_delete), PART_DIRECTORY, COMMIT_NAME))
        except FileNotFoundError:
            pass
        except Exception as error:
            log.warning("the commit record of a checkpoint that is being deleted stays: %s", error)
        return original(save_path, iteration_to_delete, *args, **kwargs)

    return delete


class _Multiprocessing:
    """The module ``multiprocessing`` with other contexts."""

    def __init__(self, deletion: Any) -> None:
        self.deletion = deletion

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)

    def get_context(self, method: str | None = None) -> Any:
        return _Context(multiprocessing.get_context(method), self.deletion)


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
        # Save path, iteration, whether to log: what follows would lower the priority of the trainer.
        return _Deletion(functools.partial(self._deletion, *options.get("args", ())[:3]))


class _Deletion(threading.Thread):
    """A deletion; has what Megatron-LM asks of a process."""

    pid = None

    def __init__(self, delete: Callable[[], Any]) -> None:
        super().__init__(name="ckpt-delete", daemon=True)
        self._delete_checkpoint = delete  # not _delete: Thread has that, and ends the thread with it

    def run(self) -> None:
        self._delete_checkpoint()
