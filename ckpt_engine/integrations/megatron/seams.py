"""Where Megatron is changed: the table of seams, the look whether they are all there, and the way back.

Classes are changed in place, since frameworks hold the classes, or instances of them, by the time this runs; functions are
also replaced where a loaded module has imported them by name. A seam is found by its name and its parameters, never by a
version number. If one that is needed is missing, nothing at all is changed.

=========================================================  ==========================================================
``TorchDistSaveShardedStrategy.async_save``, ``save``      planned, written and finalised by the engine (:mod:`.requests`)
``filesystem_async.get_write_results_queue``               no Manager process, unless a writer of stock's needs it
``AsyncCallsQueue.schedule_async_request``, ``close``      our requests stay in this process (:mod:`.queues`)
``AsyncCallsQueue.warmup_persistent_caller``               no worker process
``serialization.save``                                     takes the train state, and notes what else it will write
``serialization.save_config``                              ``metadata.json`` is there already
``serialization.save_integrity_manifest``                  from sums taken while writing
``validation.determine_global_metadata``,                  shards are checked when the engine plans, not gathered at
``validate_sharding_integrity``                            every save
``get_async_strategy``                                     "nvrx" is no error where NVRx isn't installed
``strategies.base.async_calls``                            there for those who import it (:mod:`.oldnames`)
``megatron.training.checkpointing``                        see :mod:`.training`
=========================================================  ==========================================================

In a version without a queue of its own (0.20) requests go to NVRx's queue or to ours.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from ckpt_engine.errors import CheckpointError
from ckpt_engine.integrations.megatron import finalizing, oldnames, progress, queues, requests
from ckpt_engine.integrations.megatron.places import place_of

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
        wrap: makes the replacement from the original.
        needed: whether nothing works without it.
        queued: needed only where the package has a queue of async requests.
    """

    module: str
    owner: str
    names: tuple[str, ...]
    parameters: tuple[str, ...]
    wrap: Wrap
    needed: bool = True
    queued: bool = False

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


def _results_queue(original: Any) -> Any:
    @functools.wraps(original)
    def get_write_results_queue(*args: Any, **kwargs: Any) -> queues.LateResultsQueue:
        return queues.LateResultsQueue(lambda: original(*args, **kwargs))

    return get_write_results_queue


def _schedule(original: Any) -> Any:
    @functools.wraps(original)
    def schedule_async_request(self: Any, async_request: Any) -> Any:
        return queues.schedule(self, async_request, original)

    return schedule_async_request


def _close(original: Any) -> Any:
    @functools.wraps(original)
    def close(self: Any, *args: Any, **kwargs: Any) -> Any:
        queues.close(self, bool(kwargs.get("abort", args[0] if args else False)))
        return original(self, *args, **kwargs)

    return close


def _warmup(original: Any) -> Any:
    def warmup_persistent_caller(cls: Any, *_: Any, **__: Any) -> None:
        log.debug("no persistent worker is started: saves run on threads of this process")

    return classmethod(functools.wraps(original)(warmup_persistent_caller))


def _async_save(original: Any) -> Any:
    @functools.wraps(original)
    def async_save(self: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        return requests.save_request(self, sharded_state_dict, checkpoint_dir)

    async_save.ours = True  # type: ignore[attr-defined]
    return async_save


def _strategy_save(original: Any) -> Any:
    @functools.wraps(original)
    def save(self: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        plan = getattr(self, "async_save", None) or functools.partial(requests.save_request, self)
        plan(sharded_state_dict, checkpoint_dir).execute_sync()
        return None

    return save


def _save(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        common = given.get("common_strategy")
        requests.running = requests.Running(
            train_state=progress.snapshot(given.get("sharded_state_dict")),
            digests=bool(given.get("verify_integrity")),
            ours=_is_ours(given.get("sharded_strategy")),
            complete=bool(given.get("validate_access_integrity", True)),
            common=common if isinstance(common, tuple) else common and (common.backend, common.version),
        )
        try:
            return original(*args, **kwargs)
        finally:
            requests.running = requests.Running()

    return save


def _is_ours(strategy: Any) -> bool:
    base = getattr(strategy, "base_strategy", strategy)
    if base is None or base == ("torch_dist", 1):
        return True  # stands for mcore's own, which is changed
    return bool(getattr(getattr(type(base), "async_save", None), "ours", False))


#: Stands for the shards of all ranks where the engine's plan checks them.
_UNGATHERED = object()


def _global_metadata(original: Any) -> Any:
    @functools.wraps(original)
    def determine_global_metadata(*args: Any, **kwargs: Any) -> Any:
        if requests.running.ours:
            return None, _UNGATHERED  # no gather of all shards of all ranks at every save
        return original(*args, **kwargs)

    return determine_global_metadata


def _sharding_integrity(original: Any) -> Any:
    check_common = getattr(sys.modules[original.__module__], "_validate_common_state_dict", None)

    @functools.wraps(original)
    def validate_sharding_integrity(global_metadata: Any, common_state_dict: Any = None) -> Any:
        if global_metadata is not _UNGATHERED:
            return original(global_metadata, common_state_dict)
        if common_state_dict is not None and check_common is not None:
            check_common(common_state_dict)
        return None

    return validate_sharding_integrity


def _save_config(original: Any) -> Any:
    @functools.wraps(original)
    def save_config(config: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if place_of(checkpoint_dir).read("metadata.json") == json.dumps(dataclasses.asdict(config)).encode():
                return None  # the commit record vouches for it: truncating it now could leave neither
        except (OSError, TypeError, CheckpointError):
            pass
        return original(config, checkpoint_dir, *args, **kwargs)

    return save_config


def _save_integrity_manifest(original: Any) -> Any:
    @functools.wraps(original)
    def save_integrity_manifest(checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        place = place_of(checkpoint_dir)
        sums = finalizing.digests_of(place)
        if sums is None:
            return original(checkpoint_dir, *args, **kwargs)
        content = json.dumps({"algorithm": "sha256", "files": dict(sorted(sums.items()))}, indent=2).encode()
        place.put("integrity.json", content)
        return None

    return save_integrity_manifest


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
        Seam(module, "AsyncCallsQueue", ("schedule_async_request",), ("self", "async_request"), _schedule, queued=True),
        Seam(module, "AsyncCallsQueue", ("close",), ("self",), _close, queued=True),
        Seam(module, "AsyncCallsQueue", ("warmup_persistent_caller",), (), _warmup, needed=False),
    )


def _queue_fields(module: str) -> tuple[Fields, ...]:
    return (
        Fields(
            module, "AsyncRequest", ("async_fn", "async_fn_args", "finalize_fns", "preload_fn", "is_frozen", "call_idx")
        ),
        Fields(module, "_ActiveAsyncRequest", ("idx", "async_caller", "async_request")),
    )


_QUEUES = {"megatron-core": f"{_MCORE}.strategies.async_utils", "nvidia-resiliency-ext": f"{_NVRX}.core"}

MCORE: tuple[Seam, ...] = (
    Seam(
        f"{_MCORE}.strategies.torch",
        "TorchDistSaveShardedStrategy",
        ("async_save",),
        ("self", "sharded_state_dict", "checkpoint_dir"),
        _async_save,
        queued=True,
    ),
    Seam(
        f"{_MCORE}.strategies.torch",
        "TorchDistSaveShardedStrategy",
        ("save",),
        ("self", "sharded_state_dict", "checkpoint_dir"),
        _strategy_save,
    ),
    Seam(f"{_MCORE}.strategies.torch", "", ("get_async_strategy",), ("async_strategy",), _strategy, needed=False),
    Seam(
        f"{_MCORE}.strategies.filesystem_async",
        "",
        ("get_write_results_queue", "_get_write_results_queue"),
        (),
        _results_queue,
        needed=False,
    ),
    *_queue_seams(_QUEUES["megatron-core"]),
    Seam(f"{_MCORE}.validation", "", ("determine_global_metadata",), (), _global_metadata, needed=False),
    Seam(
        f"{_MCORE}.validation",
        "",
        ("validate_sharding_integrity",),
        ("global_metadata", "common_state_dict"),
        _sharding_integrity,
        needed=False,
    ),
    Seam(f"{_MCORE}.serialization", "", ("save",), ("sharded_state_dict", "checkpoint_dir"), _save),
    Seam(f"{_MCORE}.serialization", "", ("save_config",), ("config", "checkpoint_dir"), _save_config),
    Seam(
        f"{_MCORE}.serialization",
        "",
        ("save_integrity_manifest",),
        ("checkpoint_dir",),
        _save_integrity_manifest,
        needed=False,
    ),
)

NVRX: tuple[Seam, ...] = (
    *_queue_seams(_QUEUES["nvidia-resiliency-ext"]),
    Seam(f"{_NVRX}.filesystem_async", "", ("get_write_results_queue",), (), _results_queue, needed=False),
)

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
    queue_module = _QUEUES[target]
    has_queue = _importable(queue_module)
    for seam in seams:
        place = seam.find()
        if not isinstance(place, str):
            found.append(str(seam))
        elif seam.needed and (has_queue or not seam.queued):
            missing.append(place)
        else:
            optional.append(place)
    if has_queue:
        missing += [problem for fields in _queue_fields(queue_module) if (problem := fields.problem()) is not None]
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
        if isinstance(place, str):
            continue
        owner, name = place
        original = inspect.getattr_static(owner, name)
        replacement = seam.wrap(getattr(owner, name))
        made.append(_Change(owner, name, original, name not in vars(owner)))
        setattr(owner, name, replacement)
        if not seam.owner:
            made += _rebind(name, original, replacement)
    if target == REQUIRED:
        oldnames.add()


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
    oldnames.remove()
    for target in list(_changes):
        for change in reversed(_changes.pop(target)):
            if change.inherited:
                delattr(change.owner, change.name)
            else:
                setattr(change.owner, change.name, change.original)


def applied() -> tuple[str, ...]:
    """Packages that are changed now."""
    return tuple(_changes)
