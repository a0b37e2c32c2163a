"""The counters of a Megatron-LM run, next to the weights that they belong to.

::

    <save>/latest_train_state.pt           copy of the newest checkpoint's
    <save>/iter_0000007/train_state.pt     the counters, in the schema of ckpt_engine.train_state

Megatron-LM keeps its progress in ``args``, which go on counting while an asynchronous save is on its way. The snapshot is
bytes, taken when the save is scheduled and written when it commits, so nothing can change it. Saves without ``args`` in
their state are left alone: Bridge writes a file of its own.

When a checkpoint is loaded, this file wins over the fields inside of it: it may be Bridge's (whose checkpoints have no
``args``), and it is one file that can be looked at and checked. What can't be trusted is never used and never skipped: a run
that resumes with the wrong counters trains on data that it has seen, and nobody notices. So a file that is damaged, that isn't
the one that was committed, or that belongs to another step, is an error on every rank, before the first training step.
Without the file, stock's fields count, as ever.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch.distributed as dist

from ckpt_engine.commit.manifest import COMMIT_NAME, FileEntry, parse_commit
from ckpt_engine.commit.names import PART_DIRECTORY, parse_step
from ckpt_engine.commit.remote_error import pack_error, unpack_error
from ckpt_engine.errors import CheckpointError, ConfigError, CorruptionError, StorageError
from ckpt_engine.integrations.megatron.places import place_of
from ckpt_engine.storage.place import Place
from ckpt_engine.train_state import TrainState

log = logging.getLogger("ckpt_engine")

NAME = "train_state.pt"
_LATEST = "latest_train_state.pt"

#: Eight numbers take less than 4 KiB. Something that large isn't read into memory to find out.
_LARGEST = 1 << 20

_HINT = f"load another checkpoint (--ckpt-step), or remove {NAME} to resume with the counters inside of this one"

_SAMPLES = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_FLAGS = ("do_train", "do_valid", "do_test")
_FLOPS = "num_floating_point_operations_so_far"


# -- saving --------------------------------------------------------------------------------------------------------------


def snapshot(state: Any) -> bytes | None:
    """The content of ``train_state.pt`` for a state dict of Megatron-LM, or ``None`` for any other. Never raises."""
    if not isinstance(state, Mapping) or "args" not in state or "iteration" not in state:
        return None
    try:
        overrides = {"step": state["iteration"]}
        flops = state.get(_FLOPS)
        if flops is not None:
            overrides["floating_point_operations_so_far"] = flops
        return TrainState.from_args(_counters(state), **overrides).to_bytes()
    except ConfigError as error:  # the checkpoint itself is as good without
        log.warning("no %s is written: %s", NAME, error)
        return None


def _counters(state: Mapping[str, Any]) -> Any:
    """Where the counters live: in Megatron-LM's TrainState, which is to take them over from ``args``, or in ``args``.

    No release has that object yet; it is known by its fields, in the state or where ``megatron.training`` keeps its globals.
    """
    candidates = [state.get("train_state")]
    getter = getattr(sys.modules.get("megatron.training.global_vars"), "get_train_state", None)
    if callable(getter):
        try:
            candidates.append(getter())
        except Exception as error:  # not initialised, say
            log.debug("megatron.training has no train state now: %s", str(error))
    for candidate in candidates:
        if hasattr(candidate, "step") and hasattr(candidate, "consumed_train_samples"):
            return candidate
    return state["args"]


def advance(directory: str, data: bytes, beside: Callable[[], Place]) -> None:
    """Points ``latest_train_state.pt`` next to an ``iter_*`` directory to it: before Megatron advances its own tracker.

    Args:
        beside: the place that holds the directory.
    """
    if parse_step(os.path.basename(directory)) is not None:
        beside().put(_LATEST, data)


# -- loading -------------------------------------------------------------------------------------------------------------


def agreed(directory: str, iteration: Any) -> TrainState | None:
    """The counters of a checkpoint, the same on all ranks; ``None`` if it has no ``train_state.pt``.

    One broadcast of the default process group, whose timeout is its deadline: all ranks call this at the same point. Rank 0
    reads.

    Args:
        directory: the ``iter_*`` directory.
        iteration: what the checkpoint itself says, if it does.

    Raises:
        CheckpointError: what :func:`read` raises on rank 0, on every rank.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return read(directory, iteration)
    box: list[TrainState | bytes | None] = [None]
    if dist.get_rank() == 0:
        try:
            box = [read(directory, iteration)]
        except Exception as error:
            step = parse_step(os.path.basename(directory))
            box = [pack_error(error, rank=0, step=step, phase="restore", path=directory)]
    dist.broadcast_object_list(box, src=0)
    found = box[0]
    if isinstance(found, bytes):
        raise unpack_error(found)
    return found


def read(directory: str, iteration: Any) -> TrainState | None:
    """``train_state.pt`` of a checkpoint directory, checked as far as it can be; ``None`` if there is none.

    Raises:
        CorruptionError: it is damaged, isn't the file that was committed, or is of another step.
        StorageError: it can't be read.
    """
    path = os.path.join(directory, NAME)
    step = parse_step(os.path.basename(directory))
    committed = _committed(directory)
    try:
        data = place_of(directory).read(NAME, _LARGEST)
    except FileNotFoundError:
        if committed is not None:
            log.warning("%s was committed and is gone; the counters inside of the checkpoint are used", path)
        return None
    except OSError as error:
        raise StorageError(
            f"{NAME} can't be read: {error}", step=step, path=path, phase="restore", errno=error.errno, hint=_HINT
        ) from error
    if committed is not None and committed != (found := FileEntry(len(data), hashlib.sha256(data).hexdigest())):
        raise CorruptionError(
            f"{NAME} isn't the one that was committed: {found.bytes} bytes with SHA-256 {found.sha256}, "
            f"expected {committed.bytes} bytes with {committed.sha256}",
            step=step,
            path=path,
            file=path,
            phase="restore",
            hint=_HINT,
        )
    try:
        state = TrainState.from_bytes(data, path=path)
    except CorruptionError as error:
        error.step, error.hint = step, _HINT
        raise
    _check_step(state, step, iteration, path)
    return state


def _check_step(state: TrainState, step: int | None, iteration: Any, path: str) -> None:
    """Three witnesses: the file, the directory's name, and the checkpoint itself. The file needs one of the other two."""
    if state.step == step:
        if iteration is not None and iteration != step:
            log.warning(
                "%s says step %d, as the directory does; that the checkpoint says %s is ignored", path, step, iteration
            )
        return
    if iteration is not None and state.step == iteration:
        # Somebody has renamed the directory. Stock resumes at that step, too.
        log.warning("%s and the checkpoint say step %d, which its directory's name doesn't", path, state.step)
        return
    raise CorruptionError(
        f"{NAME} is of step {state.step}, expected {step}"
        + (f" (the checkpoint says {iteration})" if iteration is not None else "")
        + ": it belongs to another checkpoint",
        step=step,
        path=path,
        file=path,
        phase="restore",
        hint=_HINT,
    )


def _committed(directory: str) -> FileEntry | None:
    """What the commit record says of the file, if it is ours: a flipped bit in a counter shows nowhere else."""
    path = os.path.join(directory, PART_DIRECTORY, COMMIT_NAME)
    try:
        return parse_commit(place_of(directory).read(f"{PART_DIRECTORY}/{COMMIT_NAME}"), path=path).files.get(NAME)
    except FileNotFoundError:
        return None
    except (OSError, CheckpointError) as error:  # the weights are stock's to load, with or without a record
        log.warning("%s can't be checked: %s", os.path.join(directory, NAME), error)
        return None


def mirror(state: TrainState, loaded: MutableMapping[str, Any], args: Any) -> None:
    """Puts the counters where Megatron-LM looks for them.

    Into what it has loaded, from where it takes them by its own rules (``--override-ckpt-iteration`` still wins); and into
    ``args``, for checkpoints without ``args``. The flags only where ``args`` has them, as they belong to this run; if none
    of them is set, the file was written before anybody knew them.
    """
    loaded["iteration"] = state.step
    loaded[_FLOPS] = state.floating_point_operations_so_far
    if loaded.get("args") is not None:
        loaded["args"] = copy.copy(loaded["args"])  # loaders may keep what they have read for the next time
        for name in _SAMPLES:
            setattr(loaded["args"], name, getattr(state, name))
    if getattr(args, "override_ckpt_iteration", None) is not None:
        return
    args.iteration = state.step
    args.num_floating_point_operations_so_far = state.floating_point_operations_so_far
    for name in _SAMPLES:
        setattr(args, name, getattr(state, name))
    if any(getattr(state, name) for name in _FLAGS):
        for name in _FLAGS:
            if hasattr(args, name):
                setattr(args, name, getattr(state, name))


def left_behind(directory: str) -> int | None:
    """The newest step that has its ``.metadata`` in a folder, or ``None``. For a folder without a tracker."""
    try:
        steps = sorted((step for name in os.listdir(directory) if (step := parse_step(name)) is not None), reverse=True)
    except OSError:
        return None
    return next((s for s in steps if os.path.exists(os.path.join(directory, f"iter_{s:07d}", ".metadata"))), None)
