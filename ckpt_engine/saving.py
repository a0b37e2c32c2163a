"""One save on one rank: what is planned once, what is staged, and what this rank reports when its files are durable.

Follow a tensor: ``engine.save`` -> :meth:`SaveJob.stage` (here) -> ``staging.stager`` copies it into an extent ->
``storage.writer`` seals the extent (``layout.image``) and hands it to ``storage.shard_file``, which calls ``pwrite``.
"""

from __future__ import annotations

import array
import concurrent.futures
import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch

from ckpt_engine.agreeing import Agreed
from ckpt_engine.commit.manifest import PartStatic, compose_part
from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import CommitTimeoutError
from ckpt_engine.layout.image import BlobRun, FileImage, Sealer, plan_files
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.planning import RankPlan
from ckpt_engine.results import SaveHandle, SaveStats
from ckpt_engine.staging.copy import Sources
from ckpt_engine.staging.pool import Extent, ExtentPool
from ckpt_engine.staging.stager import FileSource, stage
from ckpt_engine.storage.fs import write_atomic
from ckpt_engine.storage.shard_file import ShardFile
from ckpt_engine.storage.writer import FileWriter, Filled, WriteQueue

PART_DIRECTORY = "ckpt_engine"


@dataclasses.dataclass(frozen=True)
class Vote:
    """What a rank reports once its files and its part manifest are durable.

    Attributes:
        part: name, size and SHA-256 of the part manifest.
        files: name and size of each shard file.
        blobs: (file, offset, length) of each pickled value, in the plan's order.
        tensors: columns (file, offset, length) of each tensor in the plan's order, as long as no save with this plan was committed.
        seal_seconds, write_seconds: for the statistics.
    """

    part: tuple[str, int, str]
    files: tuple[tuple[str, int], ...]
    blobs: tuple[tuple[int, int, int], ...]
    tensors: tuple[array.array[int], array.array[int], array.array[int]] | None


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
        self.static = PartStatic(
            rank=rank,
            checksum=checksum,
            file_names=[image.name for image in self.images],
            fqn=[plan.tensors[i].index.fqn for image in self.images for i in image.items],
            chunk=[_offsets(plan.tensors[i].index.offset) for image in self.images for i in image.items],
            dtype=[str(plan.specs[i].dtype) for image in self.images for i in image.items],
            shape=[list(plan.specs[i].shape) for image in self.images for i in image.items],
            file=[number for number, image in enumerate(self.images) for _ in image.items],
            offset=[start for image in self.images for start in image.starts],
            length=[template.length for image in self.images for template in image.templates],
            payload=[payload for image in self.images for payload in image.payloads],
            nbytes=[template.nbytes for image in self.images for template in image.templates],
        )

    def _placements(self, count: int) -> tuple[array.array[int], array.array[int], array.array[int]]:
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
        seq: int,
        step: int,
        agreed: Agreed,
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
        self.seq, self.step, self.rank, self.world_size = seq, step, rank, world_size
        self.save_id, self.directory = agreed.save_id, agreed.directory
        self.plan, self.layout = agreed.plan, layout
        self.train_state = agreed.train_state
        self.handle = handle
        self.config = config
        self.started = started
        self.stats = SaveStats()
        self.staged = threading.Event()  # set once stats are those of the whole save() call
        self.direct = False
        self._pool = pool
        self._extent_bytes = extent_bytes
        self._runs: list[BlobRun] = []
        self._sealers: list[Sealer] = []
        self._writers: list[FileWriter] = []
        for number, image in enumerate(layout.images):
            mine = [agreed.blobs[key] for key in self.plan.blobs] if number == layout.blob_image else []
            self._add_file(image, BlobRun.place(image, mine))
        self.queue = WriteQueue(self._writers, on_failure=pool.wake, retries=config.retries)

    def _add_file(self, image: FileImage, run: BlobRun) -> None:
        sealer = Sealer(image, run, self._extent_bytes, checksum=self.config.checksum)
        extents = -(-run.size // self._extent_bytes)
        self._runs.append(run)
        self._sealers.append(sealer)
        self._writers.append(FileWriter(self._opener(image.name, run.size), extents, self._extent_bytes, sealer.seal))

    def _opener(self, name: str, size: int) -> Callable[[], ShardFile]:
        path, direct, step = os.path.join(self.directory, name), self.config.direct_io, self.step

        def open_file() -> ShardFile:
            file = ShardFile.create(path, size, direct=direct, step=step)
            self.direct = file.direct
            return file

        return open_file

    @property
    def size(self) -> int:
        """Bytes of this rank's shard files."""
        return sum(run.size for run in self._runs)

    # -- caller's thread --------------------------------------------------------------------------------------------

    def stage(self, tensors: Sequence[torch.Tensor], copiers: concurrent.futures.Executor) -> None:
        """Copies everything into staging memory; returns when the engine needs the tensors no longer.

        Args:
            tensors: local tensors, parallel to the plan's.
            copiers: threads that copy.
        """
        files = []
        for image, run, writer in zip(self.layout.images, self._runs, self._writers, strict=True):
            sources = Sources.of([tensors[item] for item in image.items])
            files.append(FileSource(image, sources, run.size, self._putter(writer)))
        stage(
            files,
            self._pool,
            copiers,
            extent_bytes=self._extent_bytes,
            timeout=self.config.commit_timeout,
            cancelled=lambda: self.queue.failed,
            step=self.step,
        )

    def _putter(self, writer: FileWriter) -> Callable[[int, Extent], None]:
        queue, pool = self.queue, self._pool

        def put(number: int, extent: Extent) -> None:
            queue.put(writer, number, Filled(extent.view, lambda: pool.release(extent)))

        return put

    # -- committer thread -------------------------------------------------------------------------------------------

    def persisted(self) -> Vote:
        """Waits until this rank's files are durable, writes the part manifest and returns the vote.

        Raises:
            CommitTimeoutError: the storage took nothing for ``commit_timeout`` seconds.
            BaseException: what made the save fail on this rank.
        """
        seen = -1
        while not self.queue.done.wait(self.config.commit_timeout):
            if self.queue.progress == seen:
                self.queue.fail(
                    CommitTimeoutError(
                        f"the storage took no bytes for {self.config.commit_timeout:g} s ({self.queue.progress} of {self.size} are written)",
                        step=self.step,
                        rank=self.rank,
                        path=self.directory,
                        phase="write",
                        silent_ranks=(self.rank,),
                    )
                )
                break
            seen = self.queue.progress
        if self.queue.failure is not None:
            raise self.queue.failure
        return self._write_part()

    def _write_part(self) -> Vote:
        crcs, frames = array.array("I"), array.array("I")
        blob_crcs, blob_frames = array.array("I"), array.array("I")
        for image, sealer in zip(self.layout.images, self._sealers, strict=True):
            count = len(image.items)
            crcs += sealer.crcs[:count]
            frames += sealer.frame_crcs[:count]
            blob_crcs += sealer.crcs[count:]
            blob_frames += sealer.frame_crcs[count:]
        holder = self.layout.blob_image
        placed = tuple((holder, start, len(blob)) for run in self._runs for start, blob in run.blobs)
        content = compose_part(
            self.layout.static,
            save_id=self.save_id,
            step=self.step,
            world_size=self.world_size,
            file_bytes=[run.size for run in self._runs],
            crcs=crcs,
            frame_crcs=frames,
            blobs=[(key, *place) for key, place in zip(self.plan.blobs, placed, strict=True)],
            blob_crcs=blob_crcs,
            blob_frame_crcs=blob_frames,
        )
        name = f"rank-{self.rank:05d}.json"
        write_atomic(os.path.join(self.directory, PART_DIRECTORY, name), content)
        return Vote(
            part=(name, len(content), hashlib.sha256(content).hexdigest()),
            files=tuple((image.name, run.size) for image, run in zip(self.layout.images, self._runs, strict=True)),
            blobs=placed,
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
            direct_io=self.direct,
        )

    def release(self) -> None:
        """Drops everything that this save held, so that a kept handle holds no bytes."""
        self._runs, self._sealers, self._writers = [], [], []
        self.train_state = None
