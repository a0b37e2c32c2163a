"""A short look at how fast this rank can copy and write, with the engine's own parts.

::

    copy    the rank's tensors -> staging extents, by ``staging.stager`` on the copy threads; at most COPY_BYTES, twice
    write   staging extents -> temporary files in the target directory, by ``ShardFile`` on the writer threads; at most
            WRITE_BYTES and WRITE_SECONDS, then fsync
    steps   one small file put in place durably, as the commit does a handful of times

Promises: no more memory than the pool's; no more bytes on disk than it is allowed, and none of them afterwards, whatever
happens (a kill leaves files with the prefix that the next engine clears away); it returns within :data:`PATIENCE` seconds
even if the storage hangs. All bytes are random or the trainer's own, since some file systems compress.

What it isn't: a benchmark. A cache in the device or the file server takes the first megabytes faster than the rest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_engine.commit.names import PROBE_PREFIX
from ckpt_engine.config import MIB
from ckpt_engine.errors import CheckpointError
from ckpt_engine.layout.image import FileImage
from ckpt_engine.preflight.report import Problem, Speeds
from ckpt_engine.staging.copy import Sources
from ckpt_engine.staging.pool import Extent, ExtentPool
from ckpt_engine.staging.stager import FileSource, stage
from ckpt_engine.storage.checksum import crc32
from ckpt_engine.storage.fs import write_atomic
from ckpt_engine.storage.shard_file import ShardFile
from ckpt_engine.workers import Workers

#: Most that is copied, and written, by all ranks of a node together.
COPY_BYTES, WRITE_BYTES = 128 * MIB, 256 * MIB

#: After so many seconds no further extent is begun.
COPY_SECONDS, WRITE_SECONDS = 0.25, 0.5

#: So long a storage that takes nothing is waited for.
PATIENCE = 30.0

#: Part of the free bytes that may be taken for a moment: others write to that file system, too.
FREE_SHARE = 1 / 4

#: Small files that a commit puts in place one after the other, part manifest, record, trackers and renames counted.
COMMIT_STEPS = 7

#: The first piece is small: on a storage with 2 MB/s one of 16 MiB would take eight seconds.
_FIRST_PIECE = 1 * MIB


def measure(
    images: Sequence[FileImage],
    tensors: Sequence[torch.Tensor],
    workers: Workers,
    folder: str,
    *,
    room: int,
    patience: float = PATIENCE,
) -> tuple[Speeds, Problem | None]:
    """Measures, on the calling thread and the engine's own.

    Args:
        images: the rank's files; ``tensors`` are parallel to their items.
        folder: an existing directory on the file system that is meant.
        room: bytes that may be written there.

    Returns:
        The speeds, and what the storage refused.
    """
    started = time.perf_counter()
    if not images or workers.pool.stats().in_use:
        note = "a save on its way uses the staging memory" if images else "there is nothing to write"
        return Speeds(None, None, None, 0.0, False, 0, 0, 0.0, note), None
    problem: Problem | None = None
    copied, first, copy, written, note = 0, None, None, _Written(), ""
    try:
        copied, first, copy = _copy(images, tensors, workers, min(patience, PATIENCE))
    except CheckpointError as error:  # no memory at this moment; what a tensor's own copy raises, a save would, too
        note = error.message
    lanes = max(1, min(len(images), workers.geometry.writers, workers.writers.size, room // _FIRST_PIECE))
    each = room // lanes // 4096 * 4096
    if each < 4096:
        note = f"{folder} has no room for a trial write"
    else:
        try:
            written = _write(workers, folder, lanes, each, min(patience, PATIENCE))
        except CheckpointError as error:
            problem = Problem("storage", f"a trial write to {folder} failed: {error.message}")
    return (
        Speeds(
            copy=copy,
            copy_first=first,
            write=written.speed,
            write_overhead=written.overhead,
            direct=written.direct,
            copied=copied,
            written=written.bytes,
            seconds=time.perf_counter() - started,
            note=note,
        ),
        problem,
    )


# -- copying ---------------------------------------------------------------------------------------------------------


def _copy(
    images: Sequence[FileImage], tensors: Sequence[torch.Tensor], workers: Workers, patience: float
) -> tuple[int, float | None, float | None]:
    """Bytes copied, and the speeds of the first time, which pays for the page faults of fresh extents, and of the second."""
    extent_bytes, pool = workers.geometry.extent_bytes, workers.pool
    share = max(COPY_BYTES // workers.gauge.local_ranks // len(images), extent_bytes)
    filled = [image for image in images if image.tensor_bytes]
    if not filled:
        return 0, None, None
    counts: list[int] = []

    def source_of(image: FileImage) -> FileSource:
        nbytes = min(image.tensor_bytes, share)

        def put(number: int, extent: Extent) -> None:
            pool.release(extent)
            counts.append(min(extent_bytes, nbytes - number * extent_bytes))

        return FileSource(image, Sources.of([tensors[item] for item in image.items]), nbytes, put)

    files = [source_of(image) for image in filled]
    total = 0
    speeds: list[float] = []
    while len(speeds) < 2:
        counts.clear()
        begin = time.perf_counter()
        end = begin + COPY_SECONDS
        stage(
            files,
            pool,
            workers.copiers,
            extent_bytes=extent_bytes,
            timeout=patience,
            cancelled=functools.partial(_past, end),
            step=0,
        )
        spent = time.perf_counter() - begin
        total += sum(counts)
        speeds.append(sum(counts) / max(spent, 1e-9))
        if spent > 4 * COPY_SECONDS:
            break
    return total, speeds[0], speeds[-1]


def _past(end: float) -> bool:
    return time.perf_counter() > end


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Written:
    """What one lane, or all of them, have done: bytes, seconds that count for the speed, seconds that each save pays once."""

    bytes: int = 0
    seconds: float = 0.0
    overhead: float = 0.0
    direct: bool = False

    @property
    def speed(self) -> float | None:
        return self.bytes / max(self.seconds, 1e-9) if self.bytes else None


class _Lane:
    """One temporary file. Owns an extent until :meth:`run` or :meth:`drop` is done."""

    def __init__(self, folder: str, nbytes: int, pool: ExtentPool, extent: Extent, workers: Workers) -> None:
        self._path = os.path.join(folder, f"{PROBE_PREFIX}{uuid.uuid4().hex}")
        self._nbytes, self._pool, self._extent = nbytes, pool, extent
        self._direct, self._checksum = workers.config.direct_io, workers.config.checksum

    def drop(self) -> None:
        self._pool.release(self._extent)

    def run(self, end: float, stop: threading.Event) -> _Written:
        file: ShardFile | None = None
        try:
            begin = time.perf_counter()
            file = ShardFile.create(self._path, self._nbytes, direct=self._direct)
            opened = time.perf_counter()
            done = 0
            while done < self._nbytes and not stop.is_set() and (done == 0 or time.perf_counter() < end):
                piece = min(self._extent.nbytes if done else _FIRST_PIECE, self._nbytes - done)
                view = self._extent.view[:piece]
                if self._checksum:
                    crc32(view)  # the writer threads do that between their writes
                file.write(view, done)
                done += piece
            wrote = time.perf_counter()
            file.finish()
            finished = time.perf_counter()
            # A direct write is on the device when it returns. A buffered one isn't: there fsync belongs to the writing.
            seconds, overhead = (wrote, finished - wrote) if file.direct else (finished, 0.0)
            return _Written(done, seconds - opened, overhead + opened - begin, file.direct)
        finally:
            if file is not None:
                file.abort()  # removes a finished file, too
            self.drop()


def _write(workers: Workers, folder: str, lanes: int, each: int, patience: float) -> _Written:
    """
    Raises:
        CheckpointError: the storage refused, or didn't answer in time.
    """
    block = os.urandom(MIB)
    ready: list[_Lane] = []
    running: list[concurrent.futures.Future[_Written]] = []
    stop = threading.Event()
    late: set[concurrent.futures.Future[Any]] = set()
    everything: list[concurrent.futures.Future[Any]] = []
    try:
        for _ in range(lanes):
            try:
                extent = workers.pool.acquire(timeout=0.2)
            except TimeoutError:
                break  # the pool has shrunk: fewer lanes, as in a save
            if extent is None:
                break
            ready.append(_Lane(folder, each, workers.pool, extent, workers))
            for start in range(0, extent.nbytes, MIB):
                extent.view[start : start + MIB] = block[: min(MIB, extent.nbytes - start)]
            extent.touched = True
        end = time.perf_counter() + WRITE_SECONDS
        while ready:
            lane = ready.pop()  # before it runs: dropped from both sides, its extent would go to two users
            try:
                running.append(workers.writers.submit(lane.run, end, stop))
            except BaseException:
                lane.drop()
                raise
            everything.append(running[-1])
        step = workers.writers.submit(_commit_step, folder)
        everything.append(step)
        _, late = concurrent.futures.wait(everything, timeout=patience)
        if late:
            raise CheckpointError(f"it didn't answer within {patience:g} s", path=folder, phase="write")
        results = [future.result() for future in running]
        return _Written(
            sum(result.bytes for result in results),
            max((result.seconds for result in results), default=0.0),
            max((result.overhead for result in results), default=0.0) + COMMIT_STEPS * step.result(),
            all(result.direct for result in results),
        )
    finally:
        stop.set()
        for lane in ready:
            lane.drop()
        if not late:  # after an interrupt, too: the files are gone when this returns
            concurrent.futures.wait(everything, timeout=patience)


def _commit_step(folder: str) -> float:
    """Seconds to put a small file in place durably."""
    path = os.path.join(folder, f"{PROBE_PREFIX}{uuid.uuid4().hex}")
    begin = time.perf_counter()
    try:
        write_atomic(path, b"ckpt_engine\n")
        return time.perf_counter() - begin
    except OSError as error:
        raise CheckpointError(
            f"a small file can't be put in place: {error.strerror}", path=path, phase="write", errno=error.errno
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
