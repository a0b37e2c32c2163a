"""Where Megatron is changed: the table of seams, the look whether they are all there, and the way back.

Classes are changed in place, since frameworks hold the classes, or instances of them, by the time this runs; functions are
also replaced where a loaded module has imported them by name. A seam is found by its name and its parameters, never by a
version number. If one that is needed is missing, nothing at all is changed.

=====================================================  ==============================================================
``FileSystemWriterAsync.get_save_function_and_args``   our callable instead of stock's write function
``retrieve_write_results`` of that writer              the results of this save, or its error
``finish`` of that writer                              keeps errors of rank 0 back until all ranks can raise them
``filesystem_async.get_write_results_queue``           no Manager process
``AsyncCallsQueue.schedule_async_request``, ``close``  our requests stay in this process
``AsyncCallsQueue.warmup_persistent_caller``           no worker process
``AsyncRequest.execute_sync``                          raises on every rank what rank 0 kept back
``serialization.save_config``, ``save``                the commit record after ``metadata.json``
``TorchDistSaveShardedStrategy.async_save``            "nvrx", the default, means this engine
``get_async_strategy``                                 "nvrx" is no error where NVRx isn't installed
``megatron.training.checkpointing``                    deletes on threads (:mod:`.retiring`)
=====================================================  ==============================================================
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from ckpt_engine.integrations.megatron import calls, progress, retiring, verdict
from ckpt_engine.integrations.megatron.session import core
from ckpt_engine.integrations.megatron.write import ThreadedWrite, write_of

log = logging.getLogger("ckpt_engine")

_MCORE = "megatron.core.dist_checkpointing"
_NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"

Wrap = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Seam:
    """One place to change.

    Attributes:
        module, owner, names: ``module.owner.name``; an empty owner is the module itself; the first name that is there counts.
        parameters: that the function has to take, by name.
        wrap: makes the replacement from the original; ``None``: only has to be there, it is replaced on single objects.
        needed: whether nothing works without it.
    """

    module: str
    owner: str
    names: tuple[str, ...]
    parameters: tuple[str, ...]
    wrap: Wrap | None
    needed: bool = True

    def __str__(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.names[0]) if part)

    def find(self) -> tuple[Any, str] | str:
        """The object to change and the attribute's name, or what is wrong."""
        try:
            target: Any = importlib.import_module(self.module)
        except Exception as error:  # versions of packages that don't fit each other raise nearly everything at import
            return f"{self}: {self.module} can't be imported ({type(error).__name__}: {error})"
        if self.owner:
            target = getattr(target, self.owner, None)
            if target is None:
                return f"{self}: {self.module} has no {self.owner}"
        for name in self.names:
            function = getattr(target, name, None)
            if function is not None:
                break
        else:
            return f"{self}: not there"
        try:
            found = inspect.signature(function).parameters
        except (TypeError, ValueError):
            return f"{self}: not a function with a signature"
        lacking = [parameter for parameter in self.parameters if parameter not in found]
        if lacking:
            return f"{self}: takes ({', '.join(found)}), expected {', '.join(lacking)} too"
        return target, name


@dataclasses.dataclass(frozen=True)
class Fields:
    """A named tuple that has to have these fields."""

    module: str
    owner: str
    fields: tuple[str, ...]

    def problem(self) -> str | None:
        try:
            kind = getattr(importlib.import_module(self.module), self.owner, None)
        except Exception as error:
            return f"{self.module} can't be imported ({type(error).__name__}: {error})"
        lacking = set(self.fields) - set(getattr(kind, "_fields", ()))
        return f"{self.module}.{self.owner}: lacks the fields {sorted(lacking)}" if lacking else None


# -- replacements --------------------------------------------------------------------------------------------------------

#: What the ``dist_checkpointing.save`` that is running has made: if it is synchronous, the commit comes before it returns.
_awaiting_commit: list[ThreadedWrite] = []

#: The train state of the ``dist_checkpointing.save`` that is running.
_snapshot: list[bytes | None] = []


def _save_function(original: Any) -> Any:
    @functools.wraps(original)
    def get_save_function_and_args(self: Any) -> Any:
        if getattr(self, "use_msc", False) or self.write_buckets is None:
            return original(self)  # object storage: stock's writers know how
        write = ThreadedWrite(core(), self.write_buckets, self.checkpoint_dir, *_snapshot)
        finish = self.finish
        # On this writer, not on its class: whoever uninstalls meanwhile, this save ends as it began.
        self.retrieve_write_results = write.results
        self.finish = lambda metadata, results: verdict.finish(write, results, lambda: finish(metadata, results))
        _awaiting_commit.append(write)
        buckets = self.write_buckets
        # The writer lives until the save is finalised; with the buckets it would keep the trainer's tensors.
        self.write_buckets = [(path, key, ([], [])) for path, key, _ in buckets]
        return write, write.preload, [write.name.rank, buckets, self.results_queue]

    return get_save_function_and_args


class NoResultsQueue:
    """Stands where stock keeps the proxy of a Manager process. Holds nothing."""

    class _Manager:
        def shutdown(self) -> None:
            pass

    _manager = _Manager()


def _results_queue(original: Any) -> Any:
    @functools.wraps(original)
    def get_write_results_queue(mp_mode: str = "spawn") -> NoResultsQueue:
        return NoResultsQueue()

    return get_write_results_queue


def _schedule(original: Any) -> Any:
    @functools.wraps(original)
    def schedule_async_request(self: Any, async_request: Any) -> Any:
        return calls.schedule(self, async_request, original)

    return schedule_async_request


def _close(original: Any) -> Any:
    @functools.wraps(original)
    def close(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.close(self, bool(kwargs.get("abort", args[0] if args else False)))
        return original(self, *args, **kwargs)

    return close


def _warmup(original: Any) -> Any:
    def warmup_persistent_caller(cls: Any, *_: Any, **__: Any) -> None:
        log.debug("no persistent worker is started: saves run on threads of this process")

    return classmethod(functools.wraps(original)(warmup_persistent_caller))


def _execute_sync(original: Any) -> Any:
    @functools.wraps(original)
    def execute_sync(self: Any) -> Any:
        write = write_of(self.async_fn)
        if write is None:
            return original(self)
        write.checked = True
        with verdict.heard(write):
            result = original(self)
        verdict.check(write)
        verdict.settle(write)
        return result

    return execute_sync


def _save_config(original: Any) -> Any:
    @functools.wraps(original)
    def save_config(config: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        return verdict.commit(os.fspath(checkpoint_dir), lambda: original(config, checkpoint_dir, *args, **kwargs))

    return save_config


def _save(original: Any) -> Any:
    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        _awaiting_commit.clear()
        retiring.use_threads()
        _snapshot[:] = [progress.snapshot(args[0] if args else kwargs.get("sharded_state_dict"))]
        try:
            result = original(*args, **kwargs)
        finally:
            _snapshot.clear()
        for write in tuple(_awaiting_commit):
            if result is None:  # synchronous; the requests of others are checked where they are finalised
                verdict.check(write)
                verdict.settle(write)
        _awaiting_commit.clear()
        return result

    return save


def _async_save(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def async_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        if "async_strategy" in signature.parameters:
            # Planning and writing are mcore's and ours, whoever owns the queue; NVRx needn't be installed for that.
            bound.arguments["async_strategy"] = "mcore"
        return original(*bound.args, **bound.kwargs)

    return async_save


def _strategy(original: Any) -> Any:
    @functools.wraps(original)
    def get_async_strategy(async_strategy: str = "nvrx", *args: Any, **kwargs: Any) -> Any:
        # The default that needs a package which may not be there: for a queue of ours, mcore's is as good.
        if async_strategy == "nvrx" and not _importable("nvidia_resiliency_ext"):
            async_strategy = "mcore"
        return original(async_strategy, *args, **kwargs)

    return get_async_strategy


# -- tables --------------------------------------------------------------------------------------------------------------


def _queue_seams(module: str) -> tuple[Seam, ...]:
    return (
        Seam(module, "AsyncCallsQueue", ("schedule_async_request",), ("self", "async_request"), _schedule),
        Seam(module, "AsyncCallsQueue", ("close",), ("self",), _close),
        Seam(module, "AsyncCallsQueue", ("warmup_persistent_caller",), (), _warmup, needed=False),
        Seam(module, "AsyncRequest", ("execute_sync",), ("self",), _execute_sync),
    )


def _queue_fields(module: str) -> tuple[Fields, ...]:
    return (
        Fields(
            module, "AsyncRequest", ("async_fn", "async_fn_args", "finalize_fns", "preload_fn", "is_frozen", "call_idx")
        ),
        Fields(module, "_ActiveAsyncRequest", ("idx", "async_caller", "async_request")),
    )


_WRITER = f"{_MCORE}.strategies.filesystem_async"

MCORE: tuple[Seam, ...] = (
    Seam(_WRITER, "FileSystemWriterAsync", ("get_save_function_and_args",), ("self",), _save_function),
    Seam(_WRITER, "FileSystemWriterAsync", ("retrieve_write_results",), ("self",), None),
    Seam(_WRITER, "FileSystemWriterAsync", ("finish",), ("self", "metadata", "results"), None),
    Seam(_WRITER, "", ("get_write_results_queue", "_get_write_results_queue"), (), _results_queue),
    *_queue_seams(f"{_MCORE}.strategies.async_utils"),
    Seam(f"{_MCORE}.serialization", "", ("save_config",), ("config", "checkpoint_dir"), _save_config),
    Seam(f"{_MCORE}.serialization", "", ("save",), ("sharded_state_dict", "checkpoint_dir"), _save),
    Seam(f"{_MCORE}.strategies.torch", "TorchDistSaveShardedStrategy", ("async_save",), ("self",), _async_save),
    Seam(f"{_MCORE}.strategies.torch", "", ("get_async_strategy",), ("async_strategy",), _strategy, needed=False),
)

NVRX: tuple[Seam, ...] = _queue_seams(f"{_NVRX}.core")

_FIELDS = {
    "megatron-core": _queue_fields(f"{_MCORE}.strategies.async_utils"),
    "nvidia-resiliency-ext": _queue_fields(f"{_NVRX}.core"),
}

#: The package without which, or with a seam of which missing, nothing is installed.
REQUIRED = "megatron-core"

TARGETS: dict[str, tuple[str, tuple[Seam, ...]]] = {
    "megatron-core": ("megatron.core", MCORE),
    "nvidia-resiliency-ext": ("nvidia_resiliency_ext", NVRX),
}


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """What :func:`look` found.

    Attributes:
        target: the package.
        present: whether it can be imported.
        found: seams that are there.
        optional: seams that this version doesn't have and that aren't needed.
        missing: what is needed and not as expected.
    """

    target: str
    present: bool
    found: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.present:
            return f"{self.target}: not installed"
        needed = len(self.found) + len(self.missing)
        text = f"{self.target}: {len(self.found)} of {needed} seams found"
        return text + "".join(f"\n  missing: {line}" for line in self.missing)


def look(target: str) -> SelfCheck:
    """Whether everything that is needed of a package is there. Imports it, changes nothing."""
    package, seams = TARGETS[target]
    if not _importable(package):
        return SelfCheck(target, present=False)
    found, optional, missing = [], [], []
    for seam in seams:
        place = seam.find()
        if not isinstance(place, str):
            found.append(str(seam))
        elif seam.needed:
            missing.append(place)
        else:
            optional.append(place)
    missing += [problem for fields in _FIELDS[target] if (problem := fields.problem()) is not None]
    return SelfCheck(target, True, tuple(found), tuple(optional), tuple(missing))


def _importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


@dataclasses.dataclass(frozen=True)
class _Change:
    owner: Any
    name: str
    original: Any
    inherited: bool


_changes: dict[str, list[_Change]] = {}


def apply(target: str) -> None:
    """Changes a package whose :func:`look` is complete. Does nothing the second time."""
    if target in _changes:
        return
    made = _changes[target] = []
    for seam in TARGETS[target][1]:
        place = seam.find()
        if isinstance(place, str) or seam.wrap is None:
            continue
        owner, name = place
        original = inspect.getattr_static(owner, name)
        replacement = seam.wrap(getattr(owner, name))
        made.append(_Change(owner, name, original, name not in vars(owner)))
        setattr(owner, name, replacement)
        if not seam.owner:
            made += _rebind(name, original, replacement)


def _rebind(name: str, original: Any, replacement: Any) -> list[_Change]:
    """A function that other modules have imported by name is replaced there, too."""
    made = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})  # not getattr(module, name): lazy modules import half the world on that
        if names.get(name) is original:
            made.append(_Change(module, name, original, inherited=False))
            setattr(module, name, replacement)
    return made


def restore() -> None:
    """Takes all changes back, last one first."""
    retiring.restore()
    for target in list(_changes):
        for change in reversed(_changes.pop(target)):
            if change.inherited:
                delattr(change.owner, change.name)
            else:
                setattr(change.owner, change.name, change.original)


def applied() -> tuple[str, ...]:
    """Packages that are changed now."""
    return tuple(_changes)
