"""Names in a checkpoint directory, and the path of the directory itself. No I/O.

::

    iter_0000100                       a checkpoint
    iter_0000100.tmp-<save id>         a save on its way
    iter_0000100.old-<save id>         the one that a save of the same step is replacing
    iter_0000100.deleting-<random>     retired, being removed
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from ckpt_engine.errors import ConfigError

#: Folder inside a checkpoint with the part manifests and the commit record.
PART_DIRECTORY = "ckpt_engine"

#: Start of the names of files that only test whether the directory can be written to.
PROBE_PREFIX = ".ckpt_engine.probe-"

#: Everything that the checkpoint writers whose directories we know (ours, stock DCP, Megatron) put next to the folder.
_WRITER_FILES = frozenset(
    {".metadata", "common.pt", "metadata.json", "integrity.json", "train_state.pt", "run_config.yaml"}
)
_WRITER_SUFFIXES = (".distcp", ".tmp")
_PASSING_PREFIXES = (".ckpt_engine.", ".nfs")  # half-written by us; open and deleted on NFS

_STEP = re.compile(r"iter_([0-9]{7,19})")
_LEFTOVER = re.compile(r"(iter_[0-9]{7,19})\.(tmp|old|deleting)-[0-9A-Za-z_-]+")
_SAVE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
#: ``pathlib.Path("gs://bucket/x")`` is ``gs:/bucket/x``; only for known schemes, since ``a:/b`` may be a folder.
_MANGLED_URI = re.compile(r"(?:gs|gcs|s3|s3a|hdfs|https?|abfss?|wasbs?|az|adl|oss|cos|file|memory|msc|dbfs):/")


class Leftover(NamedTuple):
    """A name that only an unfinished save or removal leaves behind."""

    step: int
    kind: str


def step_name(step: int) -> str:
    """Directory name of a step, as Megatron has it."""
    if step < 0:
        raise ConfigError(f"step is {step}, expected 0 or more", phase="config")
    return f"iter_{step:07d}"


def parse_step(name: str) -> int | None:
    """The step that a directory name stands for, or ``None``."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if step < 2**63 and step_name(step) == name else None


def parse_leftover(name: str) -> Leftover | None:
    """What a name says of an unfinished save or removal, or ``None``."""
    match = _LEFTOVER.fullmatch(name)
    step = parse_step(match[1]) if match is not None else None
    return Leftover(step, match[2]) if match is not None and step is not None else None


def is_writers_file(name: str) -> bool:
    """Whether a file in a checkpoint may have been made by a checkpoint writer, so that it isn't somebody's own."""
    return name in _WRITER_FILES or name.endswith(_WRITER_SUFFIXES) or name.startswith(_PASSING_PREFIXES)


def aside_name(step: int, kind: str, token: str) -> str:
    """Name next to ``step_name(step)``; ``kind`` is one of "tmp", "old" and "deleting"."""
    if not _SAVE_ID.fullmatch(token):
        raise ConfigError(f"save id is {token!r}, expected at most 64 letters and digits", step=step, phase="config")
    return f"{step_name(step)}.{kind}-{token}"


def absolute_directory(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """``path`` made absolute now, so that a later ``chdir`` doesn't matter. Symbolic links stay as they are.

    Raises:
        ConfigError: it is no path of this machine's file systems.
    """
    try:
        text = os.fsdecode(path)
    except TypeError as error:
        raise ConfigError(
            f"directory is a {type(path).__name__}, expected str, bytes or os.PathLike", phase="config"
        ) from error
    if _URI.match(text) or _MANGLED_URI.match(text):
        raise ConfigError(
            f"{text!r} is a URI, expected a path in a file system",
            path=text,
            phase="config",
            hint="mount the bucket, or save to a local path and upload each committed step in an on_committed callback",
        )
    if not text or "\0" in text:
        raise ConfigError(f"directory is {text!r}, expected a path", phase="config")
    try:
        text = os.path.join(os.getcwd(), text)
    except OSError as error:
        raise ConfigError(
            f"{text!r} is relative, but the current directory is gone", path=text, phase="config", errno=error.errno
        ) from error
    # normpath resolves ".." by text, which behind a symbolic link is another directory than the kernel's.
    return text.rstrip("/") or "/" if ".." in text.split("/") else os.path.normpath(text)
