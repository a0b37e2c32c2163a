"""What is changed in ``megatron.training.checkpointing``, Megatron-LM's own saving and loading, whenever that is imported.

=====================================================  ==============================================================
``_load_base_checkpoint``                              ``train_state.pt`` wins over the checkpoint's own counters
``open``, ``open_file`` or ``maybe_msc.open``          the tracker is replaced in one step (:mod:`.tracker`)
``multiprocessing``, ``_async_delete_checkpoint_impl`` deletes on threads (:mod:`.retiring`)
=====================================================  ==============================================================

:func:`watch` changes the module at once if it is loaded, and else right after it has been executed, which may be long after:
an import hook waits for it. Names are only replaced in that one module (and where others have imported the loader by name).

The counters are put in below ``load_checkpoint``, where all ranks have just loaded the weights and Megatron-LM hasn't looked at
them yet. So all its rules stay its own: ``--finetune`` and release checkpoints start at 0 (there ``train_state.pt`` isn't even
read), ``--override-ckpt-iteration`` wins, the microbatch calculator hears of the samples.

Nothing here makes an import fail: what isn't as expected stays stock's, with a warning. Not here: local checkpoints and the
``torch`` format, which have no such files.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import logging
import os
import sys
import threading
from typing import Any

import torch.distributed as dist

from ckpt_engine.commit.names import parse_step
from ckpt_engine.integrations.megatron import progress, retiring, tracker

log = logging.getLogger("ckpt_engine")

_MODULE = "megatron.training.checkpointing"


def watch() -> None:
    """Changes Megatron-LM's checkpointing module now, or when it is imported. Idempotent."""
    _finder.watching = True
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = sys.modules.get(_MODULE)
    if module is None:
        return
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        log.warning("%s is being imported right now: call install() again afterwards", _MODULE)
        return
    _change(module)


def restore() -> None:
    """Takes :func:`watch` back. Idempotent."""
    _finder.watching = False
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _take_back()


# -- the changes ---------------------------------------------------------------------------------------------------------

_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class _Change:
    module: Any
    name: str
    original: Any
    replacement: Any


_changes: list[_Change] = []


def _change(module: Any) -> None:
    """Makes all changes that aren't made yet. Never raises."""
    for make in (_resume_from_sidecar, _replace_tracker):
        try:
            problem = make(module)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            log.warning("%s stays as it is, in part: %s", _MODULE, problem)
    retiring.use_threads()


def _set(module: Any, name: str, replacement: Any) -> None:
    _changes.append(_Change(module, name, vars(module).get(name, _ABSENT), replacement))
    setattr(module, name, replacement)


def _made(module: Any, name: str) -> bool:
    """Whether a name is changed now; a reload sets most of them back."""
    return any(c.module is module and vars(module).get(name, _ABSENT) is c.replacement for c in _changes)


def _take_back() -> None:
    retiring.restore()
    while _changes:
        change = _changes.pop()
        if vars(change.module).get(change.name, _ABSENT) is not change.replacement:
            continue  # reloaded, or changed by somebody else since
        if change.original is _ABSENT:
            delattr(change.module, change.name)
        else:
            setattr(change.module, change.name, change.original)
            _rebind(change.name, change.replacement, change.original)


def _rebind(name: str, old: Any, new: Any) -> None:
    """Modules that have imported something by name see the change, and the way back."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})  # not getattr(module, name): lazy modules import half the world on that
        if names.get(name) is old:
            setattr(module, name, new)


# -- loading -------------------------------------------------------------------------------------------------------------

_LOADER = "_load_base_checkpoint"


def _resume_from_sidecar(module: Any) -> str | None:
    if _made(module, _LOADER):
        return None
    original = vars(module).get(_LOADER)
    if not callable(original):
        return f"it has no {_LOADER}; train_state.pt is not read"
    signature = inspect.signature(original)
    lacking = [name for name in ("load_dir", "args", "rank0") if name not in signature.parameters]
    if lacking:
        return f"{_LOADER} takes {signature}, expected {', '.join(lacking)} too; train_state.pt is not read"

    @functools.wraps(original)
    def load_base_checkpoint(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        given = signature.bind(*arguments, **options).arguments
        # "rank0" is the first look at the common part, on some ranks or without any: no place for a collective.
        if _finder.watching and not given.get("rank0", False):
            _put_counters_in(module, given["load_dir"], given["args"], *result[:3])
        return result

    _set(module, _LOADER, load_base_checkpoint)
    _rebind(_LOADER, original, load_base_checkpoint)
    return None


def _put_counters_in(module: Any, load_dir: Any, args: Any, loaded: Any, name: Any, release: Any) -> None:
    """All ranks come here with the same checkpoint, of which they have just loaded their parts."""
    if loaded is None:
        _say_what_is_there(load_dir)
        return
    if release or getattr(args, "finetune", False):
        return
    # A local checkpoint has an id instead of a directory; in the torch format each rank has a file.
    directory = os.fspath(name) if isinstance(name, (str, os.PathLike)) else ""
    if parse_step(os.path.basename(directory)) is None:
        return
    state = progress.agreed(directory, loaded.get("iteration", loaded.get("total_iters")))
    if state is None:
        return
    progress.mirror(state, loaded, args)
    if loaded.get("args") is None and getattr(args, "override_ckpt_iteration", None) is None:
        # Stock does it for checkpoints with args. Without it a batch-size ramp-up would start anew.
        module.update_num_microbatches(consumed_samples=state.consumed_train_samples, verbose=True)
    if _is_first_rank():
        log.info("resumed from %s: %s", os.path.join(directory, progress.NAME), state)


def _say_what_is_there(load_dir: Any) -> None:
    if load_dir is None or not _is_first_rank():
        return
    step = progress.left_behind(os.fspath(load_dir))
    if step is not None:
        log.error(
            "%s is missing, so that Megatron starts from scratch, but there is a checkpoint of step %d; "
            "to resume from it, write %d into that file or give --ckpt-step %d",
            *(os.path.join(load_dir, tracker.NAME), step, step, step),
        )


def _is_first_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


# -- the tracker ---------------------------------------------------------------------------------------------------------


def _replace_tracker(module: Any) -> str | None:
    name = getattr(module, "get_checkpoint_tracker_filename", None)
    if not callable(name) or os.path.basename(name("")) != tracker.NAME:
        return f"its tracker is not {tracker.NAME}; it is written in place"
    names = vars(module)
    # Of the three ways to open a file, each version has one or two. The builtin is shadowed in this module only.
    if not _made(module, "open"):
        _set(module, "open", tracker.opener(lambda *arguments, **options: builtins.open(*arguments, **options)))
    if callable(names.get("open_file")) and not _made(module, "open_file"):
        _set(module, "open_file", tracker.opener(names["open_file"]))
    if hasattr(names.get("maybe_msc"), "open") and not _made(module, "maybe_msc"):
        _set(module, "maybe_msc", tracker.Storage(names["maybe_msc"]))
    return None


# -- the import ----------------------------------------------------------------------------------------------------------


class _Finder:
    """Finds nothing itself: it sees to it that the module is changed as soon as it has been executed."""

    def __init__(self) -> None:
        self.watching = False
        self._asking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _MODULE or getattr(self._asking, "now", False):
            return None
        self._asking.now = True  # other hooks ask all the finders, too, and would ask us again
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find is not None and finder is not self else None
                if spec is not None:
                    _change_after(spec.loader)
                    return spec
        finally:
            self._asking.now = False
        return None


_finder: Any = _Finder()


def _change_after(loader: Any) -> None:
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        log.warning("%s is loaded by %r, which is not as expected; it stays as it is", _MODULE, loader)
        return

    def exec_module(module: Any) -> None:
        loader.__dict__.pop("exec_module", None)
        execute(module)
        if _finder.watching:
            _change(module)

    try:
        # On this loader, not on its class, and only once: the module's loader is a stock one afterwards.
        loader.exec_module = exec_module
    except AttributeError as error:
        log.warning("%s can't be watched, it stays as it is: %s", _MODULE, error)
