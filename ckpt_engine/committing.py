"""The commit on rank 0: from everybody's votes to a checkpoint that readers trust, and the retention that follows.

Order, and what a crash after each step leaves behind:

1. all shard files and part manifests are durable in ``iter_N.tmp-<id>/`` (that is what the votes say): invisible;
2. ``.metadata``, ``train_state.pt``, then ``commit.json`` in the same directory: still invisible by its name;
3. the directory gets its final name: committed;
4. ``latest_train_state.pt``, then ``latest_checkpointed_iteration.txt``: trackers may lag, never lead;
5. retention: only now may older checkpoints go.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import logging
import os
import pickle
from collections.abc import Sequence
from typing import Protocol

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from ckpt_engine.commit.directory import CheckpointDirectory
from ckpt_engine.commit.manifest import COMMIT_NAME, CommitRecord, FileEntry, PartEntry, compose_commit
from ckpt_engine.commit.names import PART_DIRECTORY
from ckpt_engine.errors import StorageError
from ckpt_engine.planning import DCP_VERSION
from ckpt_engine.saving import Columns, SaveJob, Vote
from ckpt_engine.storage.fs import write_atomic

log = logging.getLogger("ckpt_engine")


class Planned(Protocol):
    """What a plan tells rank 0 of the metadata: see :class:`ckpt_engine.planning.RankPlan`."""

    plan_id: str
    metadata: Metadata | None
    all_items: list[tuple[list[MetadataIndex], list[MetadataIndex]]]


class MetadataComposer:
    """Makes ``.metadata`` from the plan and the votes. While plan and offsets repeat, the pickle is patched, not made again."""

    def __init__(self) -> None:
        self._plan_id: str | None = None
        self._columns: list[tuple[tuple[str, ...], Columns]] = []  # per rank: file names and placements
        self._blob_places: tuple[object, ...] = ()
        self._pickled = b""
        self._save_id = ""

    def compose(self, plan: Planned, votes: Sequence[Vote], save_id: str) -> bytes:
        """The content of ``.metadata``."""
        if plan.plan_id != self._plan_id:
            self._columns = [(tuple(name for name, _ in vote.files), _known(vote)) for vote in votes]
            self._blob_places = ()
            self._plan_id = plan.plan_id
        places = tuple(vote.blobs for vote in votes)
        old, new = self._save_id.encode(), save_id.encode()
        if places == self._blob_places and len(old) == len(new) and self._pickled.count(old) == 1:
            self._pickled = self._pickled.replace(old, new)
        else:
            self._pickled = self._pickle(plan, votes, save_id)
            self._blob_places = places
        self._save_id = save_id
        return self._pickled

    def _pickle(self, plan: Planned, votes: Sequence[Vote], save_id: str) -> bytes:
        if plan.metadata is None:
            raise RuntimeError("only rank 0 composes the metadata")
        # Made for the pickle and dropped again: 20,000 of these objects take 10 MB.
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for (tensors, keys), (names, columns), vote in zip(plan.all_items, self._columns, votes, strict=True):
            for index, file, offset, length in zip(tensors, *columns, strict=True):
                storage[index] = _StorageInfo(names[file], offset, length)
            for index, (file, offset, length) in zip(keys, vote.blobs, strict=True):
                storage[index] = _StorageInfo(names[file], offset, length)
        metadata = copy.copy(plan.metadata)
        metadata.storage_data, metadata.storage_meta = storage, StorageMeta(save_id=save_id)
        if hasattr(metadata, "version"):  # later torch only
            metadata.version = DCP_VERSION
        return pickle.dumps(metadata)


def _known(vote: Vote) -> Columns:
    if vote.tensors is None:
        raise RuntimeError("a rank left out the offsets of a plan that rank 0 doesn't know")
    return vote.tensors


def commit(
    job: SaveJob, votes: Sequence[Vote], directory: CheckpointDirectory, composer: MetadataComposer, version: str
) -> tuple[str, int]:
    """Steps 2 to 4 of the module docstring.

    Returns:
        The final path, and the bytes of all shard files.

    Raises:
        StorageError: the file system refused.
    """
    contents = {".metadata": composer.compose(job.plan, votes, job.save_id)}
    if job.train_state is not None:
        contents["train_state.pt"] = job.train_state
    for name, content in contents.items():
        write_atomic(os.path.join(job.directory, name), content)
    total = sum(size for vote in votes for _, size in vote.files)
    record = CommitRecord(
        step=job.step,
        save_id=job.save_id,
        world_size=job.world_size,
        bytes=total,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        engine=version,
        checksum="crc32" if job.config.checksum else None,
        generation=directory.next_generation(),
        parts=tuple(PartEntry(rank, *vote.part) for rank, vote in enumerate(votes)),
        files={
            name: FileEntry(len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
        },
        int_keys=job.plan.int_keys,
        empty=job.plan.empty,
        structure_digest=job.plan.digest,
    )
    write_atomic(os.path.join(job.directory, PART_DIRECTORY, COMMIT_NAME), compose_commit(record))
    final = directory.publish(job.directory, job.step, job.save_id)
    try:
        directory.advance_trackers(job.step, job.train_state)
    except StorageError as error:  # it is committed and will be found; a failure now would say that it isn't
        log.error("step %d is committed, but the trackers still name an earlier one: %s", job.step, error)
    return final, total
