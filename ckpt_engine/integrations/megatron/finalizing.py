"""From durable shard files to a committed checkpoint: the finalize function of a Megatron save.

One round over the Store on the caller's thread, in which every rank votes and rank 0 commits::

    rank 0                                                   what a crash after it leaves
    gathers the votes                                        to stock: what was there before
    commit.json of an earlier checkpoint goes                its files are still whole, nobody vouches for them
    part manifests get their names, .metadata is replaced    stock's "complete", to us uncommitted
    metadata.json, train_state.pt                            the same
    commit.json                                              committed
    files of the earlier checkpoint go, latest_train_state   committed; trackers may lag, never lead

Megatron's own finalize functions (``metadata.json`` again, ``integrity.json``, trackers, retention) come after it. Whatever fails
on any rank is raised on every rank, as stock's ``CheckpointException``.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import pickle
from collections.abc import Sequence

from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from ckpt_engine.agreeing import attempt, opened
from ckpt_engine.commit.manifest import COMMIT_NAME, CommitRecord, FileEntry, PartEntry, compose_commit
from ckpt_engine.commit.names import PART_DIRECTORY
from ckpt_engine.errors import CheckpointError, StorageError
from ckpt_engine.integrations.megatron import progress
from ckpt_engine.integrations.megatron.places import place_of
from ckpt_engine.integrations.megatron.write import ThreadedWrite, temporary_part
from ckpt_engine.saving import Vote
from ckpt_engine.storage.place import Place
from ckpt_engine.version import __version__

log = logging.getLogger("ckpt_engine")

#: Written by Megatron itself before the strategy is called, in versions that have it; not fsynced by it.
_COMMON = "common.pt"

#: SHA-256 sums of the files of recent commits, for Megatron's own manifest: by directory.
_digests: dict[str, dict[str, str]] = {}
_REMEMBERED = 8


class Finalize:
    """The finalize function of one save. Collective: every rank of the group calls it, in the order of the saves."""

    def __init__(self, write: ThreadedWrite) -> None:
        self.write = write

    def __call__(self) -> None:
        """Commits the save.

        Raises:
            CheckpointException: it failed on some rank; names it, on every rank, with its traceback.
        """
        write = self.write
        if write.settled:
            raise CheckpointError("this save was given up or is finalised already", step=write.step, phase="commit")

        def judge(payloads: list[bytes]) -> bytes:
            _commit(write, [pickle.loads(payload) for payload in opened(payloads)])
            return b""

        payload, original = attempt(lambda: pickle.dumps(write.vote()), rank=write.rank, step=write.step, phase="write")
        try:
            write.session.finalize(write.number, payload, judge, write.step)
        except CheckpointError as error:
            write.remove()
            write.settle()
            log.error("the save of %s failed: %s", write.directory, error)
            if original is not None and not isinstance(original, Exception):
                raise original from None  # an interrupt is the trainer's own; the others have been told
            failure = CheckpointException(error.phase or "write", {error.rank or 0: _wrap_exception(error)})
        except BaseException:
            write.remove()
            write.settle()
            raise
        else:
            write.committed()
            return
        raise failure from None


def _commit(write: ThreadedWrite, votes: Sequence[Vote]) -> None:
    """On rank 0: everything that is written after the shard files."""
    place, commit = write.place, f"{PART_DIRECTORY}/{COMMIT_NAME}"
    # Composed first: an earlier checkpoint at this path stays as it is if that fails.
    contents = {
        ".metadata": write.compose(votes),
        "metadata.json": write.target.config,
    }
    if write.train_state is not None:
        contents[progress.NAME] = write.train_state
    if place.exists(commit):
        place.remove(commit)
        place.sync(PART_DIRECTORY)
    for rank, vote in enumerate(votes):
        try:
            place.rename(temporary_part(rank, write.save_id), f"{PART_DIRECTORY}/{vote.part[0]}")
        except FileNotFoundError as error:
            raise StorageError(
                f"rank 0 doesn't see what rank {rank} has written",
                path=write.directory,
                step=write.step,
                phase="commit",
                hint="all ranks have to save into one shared directory",
            ) from error
    place.sync(PART_DIRECTORY)
    for name, content in contents.items():
        place.put(name, content)
    files = {name: FileEntry(len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()}
    common = place.digest(_COMMON)
    if common is not None:
        files[_COMMON] = FileEntry(*common)
    place.sync()
    record = CommitRecord(
        step=write.step,
        save_id=write.save_id,
        world_size=write.world_size,
        bytes=sum(size for vote in votes for _, size in vote.files),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        engine=__version__,
        checksum="crc32" if write.core.config.checksum else None,
        parts=tuple(PartEntry(rank, *vote.part) for rank, vote in enumerate(votes)),
        files=files,
    )
    place.put(commit, compose_commit(record))
    log.info("step %d committed: %d bytes at %s", record.step, record.bytes, write.directory)
    shards = {name for vote in votes for name, _ in vote.files}
    _remove_others(place, "", shards, ".distcp")
    _remove_others(place, PART_DIRECTORY, {vote.part[0] for vote in votes} | {COMMIT_NAME}, "")
    if write.target.digests:
        sums = {name: entry.sha256 for name, entry in files.items()}
        for vote in votes:
            sums.update(zip((name for name, _ in vote.files), vote.digests or (), strict=True))
        _digests[write.directory] = sums
        while len(_digests) > _REMEMBERED:
            del _digests[next(iter(_digests))]
    if write.train_state is not None:
        progress.advance(write.directory, write.train_state, lambda: place_of(os.path.dirname(write.directory)))


def digests_of(place: Place) -> dict[str, str] | None:
    """SHA-256 sums, taken while writing, of the files of a save that was just committed there on this rank; asked for once."""
    return _digests.pop(place.path, None)


def _remove_others(place: Place, folder: str, names: set[str], suffix: str) -> None:
    """What an earlier checkpoint, or a run that died, has left here is of no use any more."""
    try:
        for name in place.names(folder):
            if name.endswith(suffix) and name not in names:
                place.remove(f"{folder}/{name}" if folder else name)
    except (OSError, StorageError) as error:
        log.warning("left-overs in %s can't be removed: %s", place.path, error)
