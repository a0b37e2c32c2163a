"""From durable shard files to a committed checkpoint, on Megatron's own sequence of finalize functions.

::

    finalize function                rank 0                                 what a crash after it leaves
    save_state_dict_async_finalize   gathers results, writes .metadata      stock's "complete", to us uncommitted
    metadata_finalize_fn             metadata.json, then commit.json        committed
    (the caller's)                   trackers, train state, retention       committed

What fails on rank 0 in the first two would make it leave while the others wait in Megatron's next collective. So it is kept
back, noted in the Store, and raised on every rank once the finalize function is over: after its collective, every rank
finds the note. The sequence of collectives stays stock's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from ckpt_engine.commit.coordinator import pack_error, unpack_error
from ckpt_engine.commit.manifest import COMMIT_NAME, CommitRecord, FileEntry, compose_commit
from ckpt_engine.commit.names import PART_DIRECTORY, absolute_directory
from ckpt_engine.errors import CheckpointError, ConfigError
from ckpt_engine.integrations.megatron import progress
from ckpt_engine.integrations.megatron.write import Results, ThreadedWrite, unfinished
from ckpt_engine.storage.fs import fsync_dir, write_atomic
from ckpt_engine.version import __version__

log = logging.getLogger("ckpt_engine")

#: Files next to the shard files that belong to a Megatron checkpoint, as far as its version writes them.
_COMPANIONS = (".metadata", "metadata.json", "common.pt")

#: Saves that may have their .metadata and not yet their metadata.json; frameworks finalise one after the other.
_WAITING = 8


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """On rank 0: a save whose ``.metadata`` is written, with everybody's part."""

    write: ThreadedWrite
    parts: tuple[Results, ...]


_gathered: dict[str, _Gathered] = {}
_lock = threading.Lock()


# -- on rank 0 -----------------------------------------------------------------------------------------------------------


def finish(write: ThreadedWrite, results: Sequence[Any], original: Callable[[], Any]) -> None:
    """``FileSystemWriterAsync.finish``: writes ``.metadata``. Errors are noted, to be raised on every rank."""
    try:
        original()
        parts = tuple(result for result in results if isinstance(result, Results))
        if len(parts) != len(results):
            missing = [rank for rank, result in enumerate(results) if not isinstance(result, Results)]
            raise CheckpointError(
                f"ranks {missing} saved without ckpt_engine", hint="call ckpt_engine.megatron.install() on every rank"
            )
        for rank, part in enumerate(parts):
            if part.name[:3] != write.name[:3] or part.part.rank != rank:
                raise CheckpointError(
                    f"rank {rank} saved {part.name}, rank 0 saved {write.name}: the ranks are out of step"
                )
    except BaseException as error:
        _keep_back(write, error)
        _forget(os.path.join(write.directory, ".metadata"))
        return
    with _lock:
        # A caller that writes no metadata.json commits nothing: to us its checkpoint stays unverified.
        while len(_gathered) >= _WAITING:
            del _gathered[next(iter(_gathered))]
        _gathered[write.directory] = _Gathered(write, parts)


def commit(directory: str, original: Callable[[], Any]) -> Any:
    """``save_config``, the last file that Megatron writes: and then the commit record. Errors are noted as above."""
    try:
        where = absolute_directory(directory)
    except ConfigError:  # object storage, which is stock's
        return original()
    with _lock:
        gathered = _gathered.pop(where, None)
    if gathered is None:  # not one of ours
        return original()
    try:
        original()
        _write_commit(gathered)
    except BaseException as error:
        _keep_back(gathered.write, error)
    return None


def _write_commit(gathered: _Gathered) -> None:
    write = gathered.write
    files = {}
    names = list(_COMPANIONS)
    if write.train_state is not None:
        # Only one of ours is listed: one that somebody else writes may still change after the commit.
        write_atomic(os.path.join(write.directory, progress.NAME), write.train_state)
        names.append(progress.NAME)
    for name in names:
        entry = _durable_digest(os.path.join(write.directory, name))
        if entry is not None:
            files[name] = entry
    fsync_dir(write.directory)
    record = CommitRecord(
        step=write.name.step,
        save_id=write.name.save_id,
        world_size=write.name.world_size,
        bytes=sum(part.size for part in gathered.parts),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        engine=__version__,
        checksum="crc32" if write.checksum else None,
        parts=tuple(part.part for part in gathered.parts),
        files=files,
    )
    write_atomic(os.path.join(write.directory, PART_DIRECTORY, COMMIT_NAME), compose_commit(record))
    if write.train_state is not None:
        progress.advance(write.directory, write.train_state)
    log.info("step %d committed: %d bytes at %s", record.step, record.bytes, write.directory)


def _durable_digest(path: str) -> FileEntry | None:
    """Size and SHA-256 of a file that Megatron wrote, made durable: it doesn't fsync common.pt and metadata.json."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    digest, size = hashlib.sha256(), 0
    try:
        while piece := os.read(fd, 1 << 20):
            digest.update(piece)
            size += len(piece)
        os.fsync(fd)
    finally:
        os.close(fd)
    return FileEntry(size, digest.hexdigest())


def _keep_back(write: ThreadedWrite, error: BaseException) -> None:
    log.error("the save of %s can't be finalised: %s", write.directory, error)
    packed = pack_error(error, rank=write.name.rank, step=write.name.step, phase="commit", path=write.directory)
    if write.session is None or not write.checked:
        # Nobody looks for notes: the finalize functions were moved to a request that isn't ours (Megatron's logits saver).
        raise error
    write.session.note_failure(write.name.number, packed)
    if not isinstance(error, Exception) and not isinstance(error, CheckpointException):
        raise error  # an interrupt is the trainer's own; the others have the note


def _forget(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


# -- on every rank -------------------------------------------------------------------------------------------------------


def check(write: ThreadedWrite) -> None:
    """Raises the failure that some rank has noted. Called where all ranks have just synchronised.

    Raises:
        CheckpointException: stock's type, with the failed rank and its traceback, on every rank.
    """
    failure = _failure(write)
    if failure is not None:
        settle(write)
        raise failure


def settle(write: ThreadedWrite) -> None:
    """The caller knows what became of this save."""
    unfinished.discard(write)


class Checked:
    """A finalize function, with :func:`check` after it."""

    def __init__(self, function: Callable[[], Any], write: ThreadedWrite, *, last: bool) -> None:
        self._function, self._write, self._last = function, write, last
        functools.update_wrapper(self, function, updated=())

    def __call__(self) -> Any:
        with heard(self._write):
            result = self._function()
        check(self._write)
        if self._last:
            settle(self._write)
        return result


@contextlib.contextmanager
def heard(write: ThreadedWrite) -> Iterator[None]:
    """Names the failed rank where Megatron tells that to its coordinator only (B004)."""
    try:
        yield
    except CheckpointException as error:
        settle(write)
        failure = None if error.failures else _failure(write)
        if failure is None:
            raise
        raise failure from None


def _failure(write: ThreadedWrite) -> CheckpointException | None:
    if write.session is None:
        return None
    packed = write.session.failure_of(write.name.number)
    if packed is None:
        return None
    error = unpack_error(packed)
    return CheckpointException(error.phase or "write", {error.rank or 0: _wrap_exception(error)})
