"""A storage writer and reader for ``torch.distributed.checkpoint``: its API, this engine's core.

::

    dcp.save(state, storage_writer=EngineStorageWriter("checkpoint"))         also dcp.async_save
    dcp.load(state, storage_reader=EngineStorageReader("checkpoint"))

Planning, collectives and metadata stay DCP's. What changes: writes go through staging extents, direct I/O and checksums
within the staging budget; a failed write on any thread fails the save on every rank, with nothing published; ``.metadata``
and the commit record are written last, durably; reading compares checksums. Files are in the stock format and stock readers
read them; the reader here reads stock checkpoints, too.

One directory is one checkpoint, as everywhere in DCP: no steps, trackers or retention. Those are ``CheckpointEngine``'s.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import io
import os
import pickle
import re
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckpt_engine.commit.manifest import (
    COMMIT_NAME,
    CommitRecord,
    FileEntry,
    PartEntry,
    compose_commit,
    parse_part,
    part_name,
)
from ckpt_engine.commit.names import PART_DIRECTORY, absolute_directory
from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import CheckpointError, CorruptionError, StateError
from ckpt_engine.layout.image import TensorSpec, plan_files
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.persisting import ShardSave, describe_tensors
from ckpt_engine.planning import DCP_VERSION
from ckpt_engine.restore.reader import TensorRead, read_object, read_tensors
from ckpt_engine.restore.source import CheckpointSource
from ckpt_engine.state import check_tensor
from ckpt_engine.storage.fs import fsync_dir, make_directory, write_atomic
from ckpt_engine.storage.place import LocalPlace
from ckpt_engine.structure import SameMemory
from ckpt_engine.version import __version__
from ckpt_engine.workers import Workers

_LEFTOVER = re.compile(r"\.__\d+_\d+\.distcp\.tmp-[0-9a-f]{32}")


@dataclasses.dataclass(frozen=True)
class _RankOrder:
    """What rank 0 tells each rank in its plan."""

    rank: int
    world_size: int
    save_id: str


class EngineStorageWriter(StorageWriter):
    """Writes a checkpoint directory for ``dcp.save`` and ``dcp.async_save``.

    Args:
        path: the checkpoint directory; made if missing. A checkpoint that is there is replaced: it stops being committed when
            the first file of the new one is complete.
        config: ``writers``, ``staging_budget``, ``direct_io``, ``checksum``, ``retries`` and the like; what concerns steps
            and retention has no meaning here.

    Raises:
        ConfigError: ``path`` is a URI.
    """

    def __init__(self, path: str | os.PathLike[str], config: EngineConfig | None = None) -> None:
        super().__init__()
        self.config = config if config is not None else EngineConfig()
        self.path = absolute_directory(path)
        self._workers: Workers | None = None
        self._templates = TemplateCache()
        self._save_id = uuid.uuid4().hex
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = absolute_directory(checkpoint_id)
        self._save_id = uuid.uuid4().hex

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = int(kwargs.get("rank") or 0)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.path, save_id=self._save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        make_directory(os.path.join(self.path, PART_DIRECTORY))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with os.scandir(self.path) as entries:  # what a save that was killed has left here
            for entry in entries:
                if _LEFTOVER.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)
        return [
            dataclasses.replace(plan, storage_data=_RankOrder(rank, len(plans), self._save_id))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items; durable, with the part manifest, when it returns.

        Raises:
            StateError: an item can't be saved exactly; nothing was written.
            CheckpointError: the write failed; none of this save's files is left.
        """
        order = plan.storage_data
        if not isinstance(order, _RankOrder):  # a planner that keeps plans of an earlier save, or a decentralised one
            order = _RankOrder(self._rank, 1, self._save_id)
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(plan, planner, order))
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner, order: _RankOrder) -> list[WriteResult]:
        tensors: list[torch.Tensor] = []
        specs: list[TensorSpec] = []
        items: list[MetadataIndex] = []
        values: list[tuple[Any, bytes]] = []
        same = SameMemory()
        for item in plan.items:
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                if not isinstance(data, io.BytesIO):
                    raise StateError(f"{item.index.fqn!r} is a {type(data).__name__}, expected a BytesIO", phase="plan")
                values.append((item.index, data.getvalue()))
                continue
            if not isinstance(data, torch.Tensor):
                raise StateError(f"{item.index.fqn!r} is a {type(data).__name__}, expected a tensor", phase="plan")
            check_tensor(item.index.fqn, data)
            tensor = data.detach()
            specs.append(TensorSpec(tuple(tensor.shape), tensor.dtype, same.seen(len(tensors), tensor)))
            tensors.append(tensor)
            items.append(item.index)
        if self._workers is None:
            self._workers = Workers(self.config)
        workers = self._workers
        workers.fit()
        names = [f"__{order.rank}_{number}.distcp" for number in range(workers.geometry.writers)]
        images, holder = plan_files(specs, names, self._templates)
        if not specs and not values:
            images = []
        blobs = [[data for _, data in values] if number == 0 else [] for number in range(len(images))]
        static = describe_tensors(
            images,
            [index.fqn for index in items],
            [None if index.offset is None else list(index.offset) for index in items],
            specs,
            rank=order.rank,
            checksum=self.config.checksum,
        )
        shards = ShardSave(
            images,
            static,
            blobs,
            LocalPlace(self.path),
            workers.pool,
            name_of=lambda name: os.path.basename(self._temporary(name, order.save_id)),
            step=0,
            rank=order.rank,
            directory=self.path,
            extent_bytes=workers.geometry.extent_bytes,
            config=self.config,
        )
        workers.write(shards.queue)
        try:
            shards.stage(tensors, workers.copiers)
        except BaseException as error:
            shards.queue.fail(error)
            if not isinstance(error, Exception):
                raise
        shards.wait()
        self._publish([image.name for image in images], shards, [index.fqn for index, _ in values], order)
        where = {
            item: _StorageInfo(image.name, start, template.length)
            for image in images
            for item, start, template in zip(image.items, image.starts, image.templates, strict=True)
        }
        results = [
            WriteResult(index, where[holder[number]].length, where[holder[number]])
            for number, index in enumerate(items)
        ]
        results += [
            WriteResult(index, length, _StorageInfo(images[file].name, offset, length))
            for (index, _), (file, offset, length) in zip(values, shards.placed, strict=True)
        ]
        shards.release()
        return results

    def _temporary(self, name: str, save_id: str) -> str:
        return os.path.join(self.path, f".{name}.tmp-{save_id}")

    def _publish(self, names: Sequence[str], shards: ShardSave, values: Sequence[str], order: _RankOrder) -> None:
        """Gives the files their names and writes the part manifest."""
        folder = os.path.join(self.path, PART_DIRECTORY)
        content = shards.part(order.save_id, order.world_size, values)
        # The earlier checkpoint at this path ends here: it must not be taken for a whole one from now on.
        for stale in (os.path.join(folder, COMMIT_NAME), os.path.join(self.path, ".metadata")):
            try:
                os.unlink(stale)
            except FileNotFoundError:
                pass
        fsync_dir(folder)
        for name in names:
            os.rename(self._temporary(name, order.save_id), os.path.join(self.path, name))
        fsync_dir(self.path)
        write_atomic(os.path.join(folder, part_name(order.rank)), content)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: ``.metadata``, then the commit record. ``metadata`` is what is on disk, field by field.

        Raises:
            CheckpointError: a part is missing or of another save.
            StorageError: the file system refused.
        """
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        metadata.storage_meta = self.storage_meta()
        if hasattr(metadata, "version"):
            metadata.version = DCP_VERSION
        parts, total = [], 0
        for rank in range(len(results)):
            entry, size = self._part(rank)
            parts.append(entry)
            total += size
        content = pickle.dumps(metadata)
        write_atomic(os.path.join(self.path, ".metadata"), content)
        record = CommitRecord(
            step=0,
            save_id=self._save_id,
            world_size=len(results),
            bytes=total,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            engine=__version__,
            checksum="crc32" if self.config.checksum else None,
            parts=tuple(parts),
            files={".metadata": FileEntry(len(content), hashlib.sha256(content).hexdigest())},
        )
        write_atomic(os.path.join(self.path, PART_DIRECTORY, COMMIT_NAME), compose_commit(record))
        fsync_dir(os.path.dirname(self.path))

    def _part(self, rank: int) -> tuple[PartEntry, int]:
        path = os.path.join(self.path, PART_DIRECTORY, part_name(rank))
        try:
            with open(path, "rb") as file:
                data = file.read()
            part = parse_part(data, path=path)
        except (OSError, CorruptionError) as error:
            raise CheckpointError(
                f"the part manifest of rank {rank} can't be read: {error}",
                rank=rank,
                path=path,
                phase="commit",
                hint="all ranks have to write to the same, shared directory",
            ) from error
        if part.save_id != self._save_id:
            raise CheckpointError(
                f"the part manifest of rank {rank} is of save {part.save_id}, expected {self._save_id}",
                rank=rank,
                path=path,
                phase="commit",
                hint="all ranks have to write to the same, shared directory",
            )
        return PartEntry(rank, part_name(rank), len(data), hashlib.sha256(data).hexdigest()), sum(
            f.bytes for f in part.files
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


class EngineStorageReader(StorageReader):
    """Reads a checkpoint directory for ``dcp.load``, ours or one of stock DCP, comparing checksums.

    Args:
        path: the checkpoint directory.
        config: ``checksum`` (compare them) and ``copy_threads``.
    """

    def __init__(self, path: str | os.PathLike[str], config: EngineConfig | None = None) -> None:
        super().__init__()
        self.config = config if config is not None else EngineConfig()
        self.path = absolute_directory(path)
        self._load_id = uuid.uuid4().hex
        self._source: CheckpointSource | None = None
        self._lock = threading.Lock()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = absolute_directory(checkpoint_id)
        self._source = None
        self._load_id = uuid.uuid4().hex

    def _opened(self) -> CheckpointSource:
        with self._lock:
            if self._source is None:
                self._source = CheckpointSource.open(self.path)
            return self._source

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata.

        Raises:
            NotCommittedError: there is no checkpoint, or one that never reached its commit.
            CorruptionError: a file is missing or not what the commit record says.
        """
        metadata = self._opened().metadata
        metadata.storage_meta = dataclasses.replace(metadata.storage_meta or StorageMeta(), load_id=self._load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for.

        Raises:
            CorruptionError: bytes on disk aren't those that were saved; names file and tensor.
        """
        source = self._opened()
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        targets = [planner.resolve_tensor(item) for item in tensors]
        reads = [
            TensorRead(item.storage_index, item.storage_offsets, item.lengths, target.detach(), item.storage_index.fqn)
            for item, target in zip(tensors, targets, strict=True)
        ]
        threads = self.config.copy_threads or min(4, os.cpu_count() or 1)
        read_tensors(source, reads, threads=threads, verify=self.config.checksum)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                data = read_object(source, item.storage_index.fqn, verify=self.config.checksum)
                planner.load_bytes(item, io.BytesIO(data))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)
