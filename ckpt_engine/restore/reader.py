"""Fills tensors from a checkpoint, with several threads, checking every byte on the way.

What happens to the payload of one record:

========================================  ======================================================================
whole, into a contiguous CPU tensor       read straight into the tensor's memory, CRC over each piece while it is hot
part of it, another dtype or device,      through a scratch buffer of at most 16 MiB per thread, in windows of whole
a strided tensor                          rows; CRC over the whole payload, so that a checked read takes all of it
1 MiB or less                             neighbours in a file are read with one vectored read; the same two cases
in a stock checkpoint                     ``torch.load`` of the record, after a check of its zip CRCs
========================================  ======================================================================

Large payloads are cut into segments that different threads read; their CRCs are combined. A record that several reads
need is read once. Nothing here runs Python per byte or per row; bulk work releases the GIL.

Promises: when :func:`read_tensors` returns, every target holds exactly what was saved. When it raises, targets may hold
anything: it writes before it can know. Its threads are gone in either case.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ckpt_engine.restore.boxes import (
    TensorRead,
    Window,
    check_read,
    copy_boxes,
    copy_rows,
    direct_address,
    rows_in,
    windows,
)
from ckpt_engine.restore.objects import check_crc, load_object, read_object
from ckpt_engine.restore.raw import IOV_MAX, WINDOW, Scratch, ShardReader, memory_at
from ckpt_engine.restore.source import CheckpointSource, RecordInfo
from ckpt_engine.restore.zips import load_record
from ckpt_engine.storage.checksum import crc32, crc32_combine

__all__ = ["TensorRead", "load_object", "read_object", "read_tensors"]

_SMALL = 1 << 20  # above, a read per payload costs nothing worth saving
_PIECE = 2 << 20  # per read and CRC; has to stay in the cache between the two
_SEGMENT = 64 << 20  # what one thread takes of a large payload
_BATCH = 8 << 20  # what one thread takes of small payloads
_GAP = 64 << 10  # bytes between small payloads that are rather read and dropped than skipped
_ALIGNMENT = 64  # of payloads in the scratch buffer, so that they can be viewed as any dtype


def read_tensors(
    source: CheckpointSource, reads: Sequence[TensorRead], *, threads: int, verify: bool, step: int | None = None
) -> int:
    """Fills all targets.

    Args:
        threads: at most as many threads are started; they end before this returns.
        verify: whether to compare checksums (where the checkpoint has them).
        step: for the errors; by default that of the source.

    Returns:
        Bytes of payload that were read.

    Raises:
        CorruptionError: a checksum differs or a file is too short; names file and tensor.
        KeyMismatchError: a chunk isn't in the checkpoint, or shapes differ.
        StateError: a target can't be filled: it overlaps itself, is sparse or meta, or real where complex was saved.
        StorageError: the file system refused.
    """
    step = source.step if step is None else step
    with ShardReader(step=step, phase="restore") as reader:
        run = _Run(reader, verify)
        tasks = list(_plan(source, reads, run))
        _wait_for_devices(reads)
        return _run_all(tasks, run, threads)


class _Run:
    """What the tasks of one call share."""

    def __init__(self, reader: ShardReader, verify: bool) -> None:
        self.reader = reader
        self.verify = verify
        self.stopped = False
        self.scratch_bytes = 0
        self._local = threading.local()

    @property
    def scratch(self) -> Scratch:
        """This thread's scratch buffer."""
        found: Scratch | None = getattr(self._local, "scratch", None)
        if found is None:
            found = self._local.scratch = Scratch(self.scratch_bytes)
        return found

    @property
    def waste(self) -> memoryview:
        """Where bytes go that nobody wants."""
        found: memoryview | None = getattr(self._local, "waste", None)
        if found is None:
            found = self._local.waste = memoryview(bytearray(_GAP))
        return found

    def check(self, info: RecordInfo, found: int) -> None:
        """Raises CorruptionError if ``found`` isn't the CRC of the payload."""
        check_crc(info, found, step=self.reader.step, phase="restore")

    def go_on(self) -> None:
        """Ends the task if another one has failed: what it would still read is of no use."""
        if self.stopped:
            raise _Stopped


class _Stopped(Exception):
    """See :meth:`_Run.go_on`."""


_Task = Callable[[], int]


def _run_all(tasks: Sequence[_Task], run: _Run, threads: int) -> int:
    """Runs all tasks; returns the sum of their results, or raises the first error."""
    pool = concurrent.futures.ThreadPoolExecutor(
        max(1, min(threads, len(tasks))), thread_name_prefix="ckpt_engine-restore"
    )
    futures: list[concurrent.futures.Future[int]] = []
    try:
        futures += [pool.submit(task) for task in tasks]
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
    finally:
        run.stopped = True
        pool.shutdown(wait=True, cancel_futures=True)
    try:
        for future in futures:
            error = None if future.cancelled() else future.exception()
            if error is not None and not isinstance(error, _Stopped):
                raise error
        return sum(future.result() for future in futures)
    finally:
        # The error's traceback holds this frame, and a future holds the error: a cycle that keeps the targets alive.
        futures.clear()
        future = error = None  # type: ignore[assignment]


# -- planning ----------------------------------------------------------------------------------------------------------


class _Item:
    """A record to read, with all that is wanted from it.

    ``address`` is that of the only target if the payload can be read straight into it, else 0.
    """

    __slots__ = ("address", "info", "payload", "reads", "size")

    def __init__(self, info: RecordInfo) -> None:
        self.info = info
        self.size: int = info.nbytes or 0
        self.payload: int = info.payload or 0
        self.reads: list[TensorRead] = []
        self.address = 0


def _plan(source: CheckpointSource, reads: Sequence[TensorRead], run: _Run) -> Iterator[_Task]:
    items: dict[tuple[str, int], _Item] = {}
    for read in reads:
        info = source.record_of(read.storage_index)
        item = items.get((info.path, info.offset))
        if item is None:
            item = items[info.path, info.offset] = _Item(info)
        item.reads.append(read)
        check_read(info, read, run.reader.step)
    small: dict[str, list[_Item]] = {}
    for place in sorted(items):
        item = items[place]
        if item.info.payload is None:
            yield functools.partial(_read_stock, item, run)
            continue
        item.address = direct_address(item.info, item.reads[0])
        if len(item.reads) > 1 and any(direct_address(item.info, read) != item.address for read in item.reads):
            item.address = 0  # not the same target twice, as tied tensors have it
        if item.size <= _SMALL:
            small.setdefault(item.info.path, []).append(item)
        elif item.address:
            yield from _direct_tasks(item, run)
        else:
            yield from _window_tasks(item, run)
    for neighbours in small.values():
        for batch in _batches(neighbours):
            scratch = sum(_rounded(item.size) for item in batch if not item.address)
            run.scratch_bytes = max(run.scratch_bytes, scratch)
            yield functools.partial(_read_batch, batch, run)


def _wait_for_devices(reads: Iterable[TensorRead]) -> None:
    """Copies run on the streams of our threads; what the caller has queued for the targets must come before them."""
    for device in {read.target.device for read in reads if not read.target.is_cpu}:
        module = torch.get_device_module(device)
        if hasattr(module, "current_stream"):
            module.current_stream(device).synchronize()


def _read_stock(item: _Item, run: _Run) -> int:
    run.go_on()
    chunk = load_record(run.reader, item.info, verify=run.verify)
    copy_boxes(chunk, item.reads)
    return chunk.numel() * chunk.element_size()


# -- large payloads ----------------------------------------------------------------------------------------------------


class _Whole:
    """Puts the CRCs of a payload's segments together; whoever brings the last one compares."""

    def __init__(self, item: _Item, run: _Run, count: int) -> None:
        self._item = item
        self._run = run
        self._found: dict[int, tuple[int, int]] = {}
        self._count = count
        self._lock = threading.Lock()

    def add(self, number: int, crc: int, size: int) -> None:
        """Takes the CRC of a segment.

        Raises:
            CorruptionError: it was the last, and all together aren't what was saved.
        """
        with self._lock:
            self._found[number] = (crc, size)
            if len(self._found) < self._count:
                return
        total = 0
        for _, found in sorted(self._found.items()):
            total = crc32_combine(total, *found)
        self._run.check(self._item.info, total)


def _direct_tasks(item: _Item, run: _Run) -> Iterator[_Task]:
    count = max(1, item.size // _SEGMENT)
    edges = [item.size * number // count // _PIECE * _PIECE for number in range(count)] + [item.size]
    whole = _Whole(item, run, count)
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        yield functools.partial(_read_direct, item, run, whole, number, start, stop)


def _read_direct(item: _Item, run: _Run, whole: _Whole, number: int, start: int, stop: int) -> int:
    memory, crc = memory_at(item.address + start, stop - start), 0
    for low in range(0, stop - start, _PIECE):
        run.go_on()
        piece = memory[low : low + _PIECE]
        run.reader.fill(item.info.path, [piece], item.payload + start + low, tensor=item.info.fqn)
        if run.verify:
            crc = crc32(piece, crc)
    if run.verify:
        whole.add(number, crc, stop - start)
    return stop - start


def _window_tasks(item: _Item, run: _Run) -> Iterator[_Task]:
    shape, dtype = _layout_of(item.info)
    segments: list[list[Window]] = [[]]
    for window in windows(shape, dtype.itemsize, WINDOW):
        if segments[-1] and window.stop - segments[-1][0].start > _SEGMENT:
            segments.append([])
        segments[-1].append(window)
        run.scratch_bytes = max(run.scratch_bytes, window.stop - window.start)
    whole = _Whole(item, run, len(segments))
    for number, segment in enumerate(segments):
        yield functools.partial(_read_windows, item, run, whole, number, segment)


def _read_windows(item: _Item, run: _Run, whole: _Whole, number: int, segment: Sequence[Window]) -> int:
    shape, dtype = _layout_of(item.info)
    crc = size = 0
    for window in segment:
        run.go_on()
        wanted = [(rows, read) for read in item.reads if (rows := rows_in(window, read)) is not None]
        if not run.verify:
            if not wanted:
                continue
            window = window.cut(min(rows[0] for rows, _ in wanted), max(rows[1] for rows, _ in wanted))
        view = run.scratch.view[: window.stop - window.start]
        run.reader.fill(item.info.path, [view], item.payload + window.start, tensor=item.info.fqn)
        size += len(view)
        if run.verify:
            crc = crc32(view, crc)
        if wanted:
            inner = shape[len(window.outer) + 1 :]
            block = run.scratch.tensor[: len(view)].view(dtype).view(window.high - window.low, *inner)
            for rows, read in wanted:
                copy_rows(block, window, rows, read)
    if run.verify:
        whole.add(number, crc, size)
    return size


def _layout_of(info: RecordInfo) -> tuple[tuple[int, ...], torch.dtype]:
    if info.shape is None or info.dtype is None:  # check_read has refused those
        raise RuntimeError(f"{info.fqn!r} is no tensor")
    return info.shape, info.dtype


# -- small payloads ----------------------------------------------------------------------------------------------------


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _batches(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Neighbours in one file, given in file order, that one vectored read can take."""
    batch: list[_Item] = []
    end = 0
    for item in items:
        if batch and (
            item.payload - end > _GAP
            or item.payload + item.size - batch[0].payload > _BATCH
            or 2 * len(batch) + 1 > IOV_MAX - 2  # a buffer for each payload and each gap
        ):
            yield batch
            batch = []
        batch.append(item)
        end = item.payload + item.size
    if batch:
        yield batch


def _read_batch(batch: Sequence[_Item], run: _Run) -> int:
    run.go_on()
    first = batch[0]
    buffers: list[memoryview] = []
    views: list[memoryview] = []  # one per item; few objects per item, or the garbage collector takes most of the time
    at, used, size = first.payload, 0, 0
    for item in batch:
        if item.payload > at:
            buffers.append(run.waste[: item.payload - at])
        if item.address or not item.size:
            view = memory_at(item.address, item.size) if item.size else memoryview(b"")
        else:
            view = run.scratch.view[used : used + item.size]
        views.append(view)
        if item.size:
            buffers.append(view)
        if not item.address:
            used += _rounded(item.size)
        at = item.payload + item.size
        size += item.size
    name = first.info.fqn if len(batch) == 1 else f"{first.info.fqn} ... {batch[-1].info.fqn}"
    if buffers:
        run.reader.fill(first.info.path, buffers, first.payload, tensor=name)
    used = 0
    for item, view in zip(batch, views, strict=True):
        if run.verify:
            run.check(item.info, crc32(view))
        if item.size and not item.address:
            shape, dtype = _layout_of(item.info)
            copy_boxes(run.scratch.tensor[used : used + item.size].view(dtype).view(shape), item.reads)
        if not item.address:
            used += _rounded(item.size)
    return size
