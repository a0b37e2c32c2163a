"""One save on one rank: what is planned once, and what this rank reports when its files are durable.

Follow a tensor: ``engine.save`` -> :meth:`SaveJob.stage` (here) -> ``persisting``, which stages, seals and writes it.
"""

from __future__ import annotations

import array
import concurrent.futures
import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Sequence
from typing import TypeAlias

import torch

from ckpt_engine.agreeing import Agreed
from ckpt_engine.commit.manifest import part_name
from ckpt_engine.commit.names import PART_DIRECTORY
from ckpt_engine.config import EngineConfig
from ckpt_engine.layout.image import plan_files
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.persisting import ShardSave, describe_tensors
from ckpt_engine.planning import RankPlan
from ckpt_engine.results import SaveHandle, SaveStats
from ckpt_engine.spool import Pickled
from ckpt_engine.staging.pool import ExtentPool
from ckpt_engine.storage.fs import write_atomic
from ckpt_engine.storage.place import LocalPlace

#: (file, offset, length) of each tensor, as columns.
Columns: TypeAlias = "tuple[array.array[int], array.array[int], array.array[int]]"


@dataclasses.dataclass(frozen=True)
class Vote:
    """What a rank reports once its files and its part manifest are durable.

    Attributes:
        part: name, size and SHA-256 of the part manifest.
        files: name and size of each shard file.
        blobs: (file, offset, length) of each pickled value, in the plan's order.
        tensors: columns (file, offset, length) of each tensor in the plan's order, as long as no save with this plan was committed.
        digests: SHA-256 of each shard file, if they were asked for.
    """

    part: tuple[str, int, str]
    files: tuple[tuple[str, int], ...]
    blobs: tuple[tuple[int, int, int], ...]
    tensors: Columns | None
    digests: tuple[str, ...] | None = None


class RankLayout:
    """The files of a rank for one plan. Kept while the structure is unchanged."""

    def __init__(self, plan: RankPlan, rank: int, files: int, templates: TemplateCache, *, checksum: bool) -> None:
        self.plan_id = plan.plan_id
        names = [f"__{rank}_{number}.distcp" for number in range(files)]
        total = sum(_nbytes(spec.shape, spec.dtype) for spec in plan.specs)
        # More files than bytes to keep them busy only cost fsyncs.
        self.images, self.holder = plan_files(
            plan.specs, names[: max(1, min(files, -(-total // _BYTES_PER_FILE)))], templates
        )
        if not plan.specs and not plan.blobs:
            self.images = []  # a rank with nothing to write makes no file
        self.blob_image = min(range(len(self.images)), key=lambda i: self.images[i].tensor_bytes, default=0)
        self.committed = False
        self.columns = self._placements(len(plan.specs))
        self.static = describe_tensors(
            self.images,
            plan.tensors.keys,
            [_offsets(offset) for offset in plan.tensors.offsets],
            plan.specs,
            rank=rank,
            checksum=checksum,
        )

    def _placements(self, count: int) -> Columns:
        where: dict[int, tuple[int, int, int]] = {}
        for number, image in enumerate(self.images):
            for item, start, template in zip(image.items, image.starts, image.templates, strict=True):
                where[item] = (number, start, template.length)
        columns = (array.array("q"), array.array("q"), array.array("q"))
        for item in range(count):
            for column, value in zip(columns, where[self.holder[item]], strict=True):
                column.append(value)
        return columns


_BYTES_PER_FILE = 4 << 20


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count


def _offsets(offset: torch.Size | None) -> list[int] | None:
    return None if offset is None else list(offset)


class SaveJob:
    """A save that the ranks have agreed on."""

    def __init__(
        self,
        agreed: Agreed,
        plan: RankPlan,
        layout: RankLayout,
        handle: SaveHandle,
        pool: ExtentPool,
        *,
        rank: int,
        world_size: int,
        extent_bytes: int,
        config: EngineConfig,
        started: float,
    ) -> None:
        self.step, self.rank, self.world_size = handle.step, rank, world_size
        self.save_id, self.directory = agreed.save_id, agreed.directory
        self.plan, self.layout = plan, layout
        self.train_state = agreed.train_state
        self.handle = handle
        self.config = config
        self.started = started
        self.stats = SaveStats()
        self.staged = threading.Event()  # set once stats are those of the whole save() call
        self._pool = pool
        blobs: list[list[Pickled]] = [[] for _ in layout.images]
        if self.plan.blobs:
            blobs[layout.blob_image] = [agreed.blobs[key] for key in self.plan.blobs]
        self.shards = ShardSave(
            layout.images,
            layout.static,
            blobs,
            LocalPlace(self.directory),
            pool,
            step=handle.step,
            rank=rank,
            directory=self.directory,
            extent_bytes=extent_bytes,
            config=config,
        )
        self.queue = self.shards.queue

    @property
    def size(self) -> int:
        """Bytes of this rank's shard files."""
        return self.shards.size

    # -- caller's thread --------------------------------------------------------------------------------------------

    def stage(self, tensors: Sequence[torch.Tensor], copiers: concurrent.futures.Executor) -> None:
        """Copies everything into staging memory; returns when the engine needs the tensors no longer.

        Args:
            tensors: local tensors, parallel to the plan's.
            copiers: threads that copy.
        """
        self.shards.stage(tensors, copiers)

    # -- committer thread -------------------------------------------------------------------------------------------

    def persisted(self) -> Vote:
        """Waits until this rank's files are durable, writes the part manifest and returns the vote.

        Raises:
            CommitTimeoutError: the storage took nothing for ``commit_timeout`` seconds.
            BaseException: what made the save fail on this rank.
        """
        self.shards.wait()
        content = self.shards.part(self.save_id, self.world_size, self.plan.blobs)
        name = part_name(self.rank)
        write_atomic(os.path.join(self.directory, PART_DIRECTORY, name), content)
        return Vote(
            part=(name, len(content), hashlib.sha256(content).hexdigest()),
            files=tuple(
                (image.name, size) for image, size in zip(self.layout.images, self.shards.file_bytes, strict=True)
            ),
            blobs=self.shards.placed,
            tensors=None if self.layout.committed else self.layout.columns,
        )

    def finished_stats(self) -> SaveStats:
        """Statistics, complete now that the verdict is there."""
        durable = time.perf_counter() - self.started
        self.staged.wait(self.config.commit_timeout)  # a small save may be durable before save() has returned
        return dataclasses.replace(
            self.stats,
            durable_seconds=durable,
            write_seconds=self.queue.write_seconds,
            checksum_cpu_seconds=self.queue.seal_seconds,
            peak_staged_bytes=self._pool.stats().peak_in_use,
            direct_io=self.shards.direct,
        )

    def release(self) -> None:
        """Drops everything that this save held, so that a kept handle holds no bytes."""
        self.shards.release()
        self.train_state = None
