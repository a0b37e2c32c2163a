"""One rank's shard files of one save: laid out, staged, sealed, durable, and described in a part manifest.

What the standalone engine and the Megatron adapter have in common. Follow a tensor: :meth:`ShardSave.stage` ->
``staging.stager`` copies it into an extent -> ``storage.writer`` seals the extent (``layout.image``) and hands it to
``storage.shard_file``, which calls ``pwrite`` (or to a stream, where ``storage.place`` is an object store).

Promises: when :meth:`ShardSave.stage` returns, nothing reads the tensors any more, whatever happened; when
:meth:`ShardSave.wait` returns, every byte is durable; when either fails, no file of this save is left.
Not here: which tensor goes into which file, votes, and the commit.
"""

from __future__ import annotations

import array
import concurrent.futures
import hashlib
import weakref
from collections.abc import Callable, Sequence

import torch

from ckpt_engine.commit.manifest import PartStatic, compose_part
from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import CommitTimeoutError
from ckpt_engine.layout.image import BlobRun, FileImage, Sealer, TensorSpec
from ckpt_engine.spool import Pickled
from ckpt_engine.staging.copy import Sources
from ckpt_engine.staging.pool import Extent, ExtentPool
from ckpt_engine.staging.stager import FileSource, stage
from ckpt_engine.storage.place import Place, Sink
from ckpt_engine.storage.writer import FileWriter, Filled, WriteQueue


def describe_tensors(
    images: Sequence[FileImage],
    fqns: Sequence[str],
    chunks: Sequence[list[int] | None],
    specs: Sequence[TensorSpec],
    *,
    rank: int,
    checksum: bool,
) -> PartStatic:
    """The repeating part of a part manifest.

    Args:
        fqns, chunks, specs: name, offsets in the global tensor, and shape and dtype of each item that the images refer to.
    """
    order = [item for image in images for item in image.items]
    return PartStatic(
        rank=rank,
        checksum=checksum,
        file_names=[image.name for image in images],
        fqn=[fqns[item] for item in order],
        chunk=[chunks[item] for item in order],
        dtype=[str(specs[item].dtype) for item in order],
        shape=[list(specs[item].shape) for item in order],
        file=[number for number, image in enumerate(images) for _ in image.items],
        offset=[start for image in images for start in image.starts],
        length=[template.length for image in images for template in image.templates],
        payload=[payload for image in images for payload in image.payloads],
        nbytes=[template.nbytes for image in images for template in image.templates],
    )


class _Failed:
    """Whether a save has failed, for its files. Doesn't hold the queue, which holds them."""

    queue: weakref.ref[WriteQueue] | None = None

    def __call__(self) -> bool:
        queue = self.queue() if self.queue is not None else None
        return queue is None or queue.failed


class ShardSave:
    """The shard files of one save on this rank.

    Args:
        images: the files; none of them may be empty.
        static: from :func:`describe_tensors`.
        blobs: pickled values, one sequence per image.
        place: where the files go; ``name_of`` makes the name under which one is written from its own.
        directory: for messages.
        digests: take a SHA-256 of each file while it is written.

    Attributes:
        queue: of the writer threads; run :meth:`WriteQueue.pump` on each of them.
        placed: (file, offset, length) of each blob, in file order.
        file_bytes: size of each file.
        direct: whether the last file was opened with O_DIRECT.
    """

    def __init__(
        self,
        images: Sequence[FileImage],
        static: PartStatic,
        blobs: Sequence[Sequence[Pickled]],
        place: Place,
        pool: ExtentPool,
        *,
        name_of: Callable[[str], str] = lambda name: name,
        step: int,
        rank: int,
        directory: str,
        extent_bytes: int,
        config: EngineConfig,
        digests: bool = False,
    ) -> None:
        if extent_bytes != pool.extent_bytes:
            raise RuntimeError(f"extents of {extent_bytes} bytes for a pool that has {pool.extent_bytes}")
        self._images, self._static = images, static
        self._pool, self._extent_bytes, self._config = pool, extent_bytes, config
        self._step, self._rank, self._directory = step, rank, directory
        self._opened: list[bool] = []
        failed = _Failed()
        self._runs = [BlobRun.place(image, mine) for image, mine in zip(images, blobs, strict=True)]
        self._sealers = [
            Sealer(image, run, extent_bytes, checksum=config.checksum)
            for image, run in zip(images, self._runs, strict=True)
        ]
        self._digests = [hashlib.sha256() for _ in images] if digests else None
        self._writers = [
            FileWriter(
                self._opener(place, name_of(image.name), run.size, failed),
                -(-run.size // extent_bytes),
                extent_bytes,
                self._seal_of(number),
            )
            for number, (image, run) in enumerate(zip(images, self._runs, strict=True))
        ]
        self.placed = tuple(
            (number, start, len(blob)) for number, run in enumerate(self._runs) for start, blob in run.blobs
        )
        self.file_bytes = [run.size for run in self._runs]
        self.queue = WriteQueue(self._writers, on_failure=pool.wake, retries=config.retries)
        failed.queue = weakref.ref(self.queue)

    def _opener(self, place: Place, name: str, size: int, failed: _Failed) -> Callable[[], Sink]:
        config, step, opened = self._config, self._step, self._opened
        room = self._pool.stats().budget // len(self._images)

        # Without self: the queue would hold this save, which holds the queue, blobs and all.
        def open_file() -> Sink:
            file = place.create(
                name,
                size,
                direct=config.direct_io,
                step=step,
                timeout=config.commit_timeout,
                cancelled=failed,
                room=room,
            )
            opened.append(file.direct)
            return file

        return open_file

    def _seal_of(self, number: int) -> Callable[[int, memoryview], int]:
        seal, size, step = self._sealers[number].seal, self._runs[number].size, self._extent_bytes
        if self._digests is None:
            return seal
        digest = self._digests[number]

        def seal_and_digest(extent: int, view: memoryview) -> int:
            sealed = seal(extent, view)
            digest.update(view[: min(step, size - extent * step)])  # extents are sealed in file order
            return sealed

        return seal_and_digest

    def digests(self) -> tuple[str, ...] | None:
        """SHA-256 of each file, if they were asked for, once :meth:`wait` has returned."""
        return None if self._digests is None else tuple(digest.hexdigest() for digest in self._digests)

    @property
    def direct(self) -> bool:
        return bool(self._opened) and self._opened[-1]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.file_bytes)

    def stage(self, tensors: Sequence[torch.Tensor], copiers: concurrent.futures.Executor) -> None:
        """Copies everything into staging memory; returns when the engine needs the tensors no longer.

        Args:
            tensors: parallel to the items of the images.
            copiers: threads that copy.
        """
        files = []
        for image, run, writer in zip(self._images, self._runs, self._writers, strict=True):
            sources = Sources.of([tensors[item] for item in image.items])
            files.append(FileSource(image, sources, run.size, self._putter(writer)))
        stage(
            files,
            self._pool,
            copiers,
            extent_bytes=self._extent_bytes,
            timeout=self._config.commit_timeout,
            cancelled=lambda: self.queue.failed,
            step=self._step,
        )

    def _putter(self, writer: FileWriter) -> Callable[[int, Extent], None]:
        queue, pool = self.queue, self._pool

        def put(number: int, extent: Extent) -> None:
            queue.put(writer, number, Filled(extent.view, lambda: pool.release(extent)))

        return put

    def wait(self) -> None:
        """Waits until every file is durable, for as long as the storage takes bytes.

        Raises:
            CommitTimeoutError: the storage took nothing for ``commit_timeout`` seconds.
            BaseException: what made the save fail on this rank.
        """
        patience, seen = self._config.commit_timeout, -1
        while not self.queue.done.wait(patience):
            if self.queue.progress == seen:
                self.queue.fail(
                    CommitTimeoutError(
                        f"the storage took no bytes for {patience:g} s ({self.queue.progress} of {self.size} are written)",
                        step=self._step,
                        rank=self._rank,
                        path=self._directory,
                        phase="write",
                        silent_ranks=(self._rank,),
                    )
                )
                break
            seen = self.queue.progress
        if self.queue.failure is not None:
            raise self.queue.failure

    def part(self, save_id: str, world_size: int, blob_names: Sequence[str]) -> bytes:
        """The part manifest, once :meth:`wait` has returned.

        Args:
            blob_names: name of each blob, in file order.
        """
        crcs, frames = array.array("I"), array.array("I")
        blob_crcs, blob_frames = array.array("I"), array.array("I")
        for image, sealer in zip(self._images, self._sealers, strict=True):
            count = len(image.items)
            crcs += sealer.crcs[:count]
            frames += sealer.frame_crcs[:count]
            blob_crcs += sealer.crcs[count:]
            blob_frames += sealer.frame_crcs[count:]
        return compose_part(
            self._static,
            save_id=save_id,
            step=self._step,
            world_size=world_size,
            file_bytes=self.file_bytes,
            crcs=crcs,
            frame_crcs=frames,
            blobs=[(name, *place) for name, place in zip(blob_names, self.placed, strict=True)],
            blob_crcs=blob_crcs,
            blob_frame_crcs=blob_frames,
        )

    def release(self) -> None:
        """Drops the blobs and the CRCs, so that whoever keeps this holds no bytes."""
        self._runs, self._sealers, self._writers = [], [], []
        error = self.queue.failure
        # Its frames hold the queue. An interrupt is the trainer's, and may be on its way.
        while isinstance(error, Exception):
            error.__traceback__ = None
            error = error.__cause__ or error.__context__
