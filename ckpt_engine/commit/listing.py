"""What stands in a checkpoint directory: which steps, which of them are committed, and whether their files are whole.

Reads names, sizes and commit records, never data. A checkpoint is taken for one because of its commit record, not
because of its name or of a ``.metadata`` in it. Nor is a directory taken for our own left-over because of its name:
:func:`foreign` tells what a save must not replace.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from ckpt_engine.commit.manifest import COMMIT_NAME, CommitRecord, parse_commit
from ckpt_engine.commit.names import PART_DIRECTORY, is_writers_file, parse_step, step_name
from ckpt_engine.errors import CheckpointError, CorruptionError, StorageError
from ckpt_engine.storage import fs

log = logging.getLogger("ckpt_engine")

_SHARD_SUFFIX = ".distcp"


def step_entries(root: str) -> list[tuple[int, bool]]:
    """(step, whether it is a real directory and no link to one) of everything that is named like a step, ascending."""
    found = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                step = parse_step(entry.name)
                if step is not None and entry.is_dir():
                    found.append((step, not entry.is_symlink()))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(
            f"the checkpoint directory can't be listed: {error.strerror}", path=root, errno=error.errno
        ) from error
    return sorted(found)


def read_commit(path: str, step: int) -> CommitRecord | None:
    """The commit record in the checkpoint directory ``path``; ``None`` if there is none that is valid and of ``step``.

    Raises:
        CheckpointError: a newer engine wrote the record.
        StorageError: the record can't be read.
    """
    name = os.path.join(path, PART_DIRECTORY, COMMIT_NAME)
    try:
        with open(name, "rb") as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(
            f"the commit record can't be read: {error.strerror}", step=step, path=name, errno=error.errno
        ) from error
    try:
        record = parse_commit(data, path=name)
    except CorruptionError as error:
        log.warning("not taken for a checkpoint: %s", error)
        return None
    if record.step != step:  # a checkpoint that was copied or renamed by hand
        log.warning("not taken for a checkpoint: %s is of step %d, expected step %d", name, record.step, step)
        return None
    return record


def commit_or_warn(path: str, step: int) -> CommitRecord | None:
    """Like :func:`read_commit`, but a record that can't be understood is logged: it must not hide the other steps."""
    try:
        return read_commit(path, step)
    except CheckpointError as error:
        log.warning("step %d is left out: %s", step, error)
        return None


def newest_first(root: str, steps: Iterable[int]) -> list[tuple[int, CommitRecord]]:
    """Those of ``steps`` that are committed, the one committed last first; by number where nobody counted commits."""
    records = ((step, commit_or_warn(os.path.join(root, step_name(step)), step)) for step in steps)
    found = [(step, record) for step, record in records if record is not None]
    return sorted(found, key=lambda pair: (pair[1].generation, pair[0]), reverse=True)


def shortage(path: str, record: CommitRecord) -> str | None:
    """The first file of a committed checkpoint that is missing or has another size than recorded, in words."""
    listed = {os.path.join(PART_DIRECTORY, part.name): part.bytes for part in record.parts}
    listed.update((name, entry.bytes) for name, entry in record.files.items())
    try:
        for name, size in listed.items():
            found = os.stat(os.path.join(path, name)).st_size
            if found != size:
                return f"{name} has {found} bytes, expected {size}"
        with os.scandir(path) as entries:
            shards = sum(entry.stat().st_size for entry in entries if entry.name.endswith(_SHARD_SUFFIX))
    except OSError as error:
        return f"{os.path.basename(error.filename or path)}: {error.strerror}"
    if shards < record.bytes:
        return f"the shard files have {shards} bytes, expected {record.bytes}"
    return None


def foreign(path: str, step: int) -> str | None:
    """Why a save of ``step`` must not replace what stands at its final name ``path``; ``None`` if it may.

    It may replace nothing, an empty folder, a checkpoint of ours, and what a writer that was cut off left behind. What is
    complete in another way, or holds a file that no checkpoint writer makes, is somebody's: it is gone for good once a
    save has replaced it. What can't be looked at counts as foreign, too.
    """
    if os.path.islink(path):
        return "is a symbolic link"
    names: set[str] = set()
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                names.add(entry.name)
                ours = entry.name == PART_DIRECTORY and entry.is_dir(follow_symlinks=False)
                if not ours and not (is_writers_file(entry.name) and entry.is_file(follow_symlinks=False)):
                    return f"holds {entry.name!r}, which is no file of a checkpoint"
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return "is not a directory"
    except OSError as error:
        return f"can't be looked into ({error.strerror})"
    if PART_DIRECTORY not in names:
        return "holds a complete checkpoint of another writer" if ".metadata" in names else None
    name = os.path.join(path, PART_DIRECTORY, COMMIT_NAME)
    try:
        with open(name, "rb") as file:
            found = parse_commit(file.read(), path=name).step
    except (FileNotFoundError, CorruptionError):
        return None
    except OSError as error:
        return f"has a commit record that can't be read ({error.strerror})"
    except CheckpointError as error:
        return f"was written by a newer engine ({error.message})"
    return f"holds a complete checkpoint of step {found}" if found != step else None


def remove_quietly(path: str) -> bool:
    """Removes what no reader looks at. A refusal is logged, since it must not fail what is committed."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            fs.remove_tree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    except (OSError, CheckpointError) as error:
        log.warning("%s can't be removed now: %s", path, error)
        return False
    return True
