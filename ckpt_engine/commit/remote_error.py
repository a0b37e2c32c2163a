"""An error on its way from the rank where it happened to the others.

Promises: a :class:`CheckpointError` arrives with its type and fields, anything else as a CheckpointError that names
it, both with the traceback as text. Packing never fails, whatever the error is made of, and what arrives refers to no
frame, tensor or object of the trainer.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from ckpt_engine.errors import CheckpointError


def pack_error(
    error: BaseException, *, rank: int, step: int | None, phase: str | None, path: str | None = None
) -> bytes:
    """Makes bytes of an error, for the other ranks.

    Args:
        error: a :class:`CheckpointError` keeps its type and fields; anything else becomes one that names its type.
        rank, step, phase, path: fill the fields that the error leaves open.
    """
    fields: dict[str, Any] = {"rank": rank, "step": step, "phase": phase, "path": path}
    if isinstance(error, CheckpointError):
        packed = _plain_copy(error)
    else:
        where = f" in phase {phase}" if phase else ""
        number = error.errno if isinstance(error, OSError) else None
        packed = CheckpointError(f"rank {rank} failed{where}: {describe(error)}", errno=number)
    if packed.remote_traceback is None:
        packed.remote_traceback = _traceback_text(error)
    for name, value in fields.items():
        if getattr(packed, name) is None:
            setattr(packed, name, value)
    return pickle_error(packed)


def unpack_error(packed: bytes) -> CheckpointError:
    """The error in bytes made by :func:`pack_error`, free of frames and ready to be raised."""
    try:
        error = pickle.loads(packed)
    except Exception as reason:
        return CheckpointError(
            f"another rank failed, but its error can't be read here: {describe(reason)}",
            hint="run the same version of ckpt_engine on all ranks; the log of the failed rank has the error",
        )
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"another rank sent a {type(error).__name__} where an error was expected")


def pickle_error(error: CheckpointError) -> bytes:
    """Bytes for :func:`unpack_error` of an error that is known to be plain."""
    return pickle.dumps(error)


def _plain_copy(error: CheckpointError) -> CheckpointError:
    """A copy that pickles: fields are plain data, and the type is one that the other ranks can import and make."""
    message = _plain(getattr(error, "message", None)) or describe(error)
    fields = {name: _plain(value) for name, value in error.__dict__.items()}
    for kind in type(error).__mro__:
        if not issubclass(kind, CheckpointError):
            continue
        try:
            copy = kind(message)
            copy.__dict__.update(fields)
            pickle.loads(pickle.dumps(copy))
            return copy
        except Exception:  # a class made inside of a function, or one with a constructor of its own: its base, then
            continue
    return CheckpointError(message)


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, bytes, int, float, bool):
        return value
    if type(value) in (tuple, list):
        return type(value)(_plain(part) for part in value)
    try:
        return str(value)[:1000]  # a tensor or an object of the user would travel to all ranks with everything in it
    except Exception:
        return f"<{type(value).__name__}>"


def describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "<its message can't be made>"
    # The message of a failed c10d call carries dozens of C++ frames.
    text = text.split("\nException raised from ")[0]
    return f"{type(error).__name__}: {text[:4000]}" if text else type(error).__name__


def _traceback_text(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:
        text = describe(error)
    return text if len(text) <= 20_000 else f"{text[:4000]}\n[...]\n{text[-16_000:]}"
