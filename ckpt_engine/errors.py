"""Every error that the engine raises.

There is one base, :class:`CheckpointError`. It carries what an operator needs at three in the morning: the step, the path,
the rank, the phase (one of :data:`PHASES`) and a hint that says what to do next. Errors pickle, because a failure on one
rank is sent to all the others and raised there with the same type.
"""

from __future__ import annotations

from typing import Any

PHASES = ("config", "plan", "stage", "write", "vote", "commit", "publish", "restore", "verify", "close")


class CheckpointError(RuntimeError):
    """Base of all errors of this package.

    Attributes:
        message: what went wrong, with the value found and the one expected.
        step: training step of the save or restore concerned, if there is one.
        path: file or directory concerned.
        rank: rank (in the engine's process group) on which it happened.
        phase: one of :data:`PHASES`.
        hint: what to do next.
        errno: operating-system error number, if one was the cause.
        remote_traceback: traceback text of the rank where it happened.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        path: str | None = None,
        rank: int | None = None,
        phase: str | None = None,
        hint: str | None = None,
        errno: int | None = None,
        remote_traceback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.path = path
        self.rank = rank
        self.phase = phase
        self.hint = hint
        self.errno = errno
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle as cls(*args) and would lose every keyword; the fields travel as state instead.
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))

    def __repr__(self) -> str:
        # Frameworks print no more than this of an error that they have caught (DCP's CheckpointException does): the family is
        # what tells an operator whose it is.
        name = type(self).__name__
        return (
            f"{name}({self.message!r})"
            if type(self) is CheckpointError
            else f"CheckpointError.{name}({self.message!r})"
        )

    def __str__(self) -> str:
        where = [
            f"{name} {value}"
            for name, value in (("step", self.step), ("rank", self.rank), ("phase", self.phase), ("path", self.path))
            if value is not None
        ]
        text = self.message + (f" [{', '.join(where)}]" if where else "")
        if self.hint:
            text += f" Hint: {self.hint}"
        if self.remote_traceback:
            text += f"\n--- traceback of rank {self.rank} ---\n{self.remote_traceback.rstrip()}"
        return text


def _rebuild(cls: type[CheckpointError], message: str, fields: dict[str, Any]) -> CheckpointError:
    error = cls(message)
    error.__dict__.update(fields)
    return error


class ConfigError(CheckpointError, ValueError):
    """An option, path or argument is unusable. Raised before anything is written."""


class StateError(CheckpointError, TypeError):
    """Something in the state can't be saved exactly. ``key`` names it. Raised before the first byte is written."""

    key: str | None = None

    def __init__(self, message: str, *, key: str | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.key = key


class KeyMismatchError(CheckpointError, KeyError):
    """The state to restore into and the checkpoint name different keys, or shapes differ."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __init__(
        self, message: str, *, missing: tuple[str, ...] = (), unexpected: tuple[str, ...] = (), **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.missing = missing
        self.unexpected = unexpected

    __str__ = CheckpointError.__str__  # KeyError.__str__ would print the repr of the message


class StepExistsError(CheckpointError):
    """The step is already committed with another structure, or is being written."""


class DirectoryBusyError(CheckpointError):
    """Another live engine writes to this directory."""


class MemoryBudgetError(CheckpointError, MemoryError):
    """Not even the floor of staging memory can be had. Raised before the first byte is written."""


class StorageError(CheckpointError):
    """The file system refused: ENOSPC, EIO, a failed fsync, a short file. ``errno`` tells which."""


class CommitTimeoutError(CheckpointError, TimeoutError):
    """A deadline passed while waiting for other ranks or for the storage. ``silent_ranks`` names who did not answer."""

    silent_ranks: tuple[int, ...] = ()

    def __init__(self, message: str, *, silent_ranks: tuple[int, ...] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.silent_ranks = silent_ranks


class NotCommittedError(CheckpointError):
    """The step asked for isn't a committed checkpoint of this directory."""


class CorruptionError(CheckpointError):
    """Bytes on disk aren't the bytes that were saved. ``file`` and ``tensor`` name them."""

    file: str | None = None
    tensor: str | None = None

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.file = file
        self.tensor = tensor


class EngineClosedError(CheckpointError):
    """The engine was closed; make a new one."""
