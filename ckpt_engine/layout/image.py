"""The image of a shard file: which record lies at which offset, and what is left to fill in.

::

    file     | record 0 | record 1 |   ...   | record n | blob 0 | blob 1 |
             0          ^ every record and blob starts at a multiple of 64
    record   | header | payload ............................. | tail, padding |
    extents  |   extent 0   |   extent 1   |   extent 2   | ...

Records (tensors) come first, so that their offsets repeat from save to save; blobs (pickled values, whose length varies) follow.
Tensors that are one and the same memory (tied weights) share one record.

:class:`FileImage` is the part that repeats while the structure is unchanged. :class:`Sealer` turns the extents of one save,
whose payload bytes have been copied in, into final bytes: it writes headers, tails and padding and computes the CRCs.
It has to be called for the extents of a file in order, since a payload's CRC runs across extents; whatever is done
with a sealed extent may be done in any order.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
from collections.abc import Sequence

import torch

from ckpt_engine.layout.records import ALIGNMENT, RecordTemplate, TemplateCache, fill_crc
from ckpt_engine.spool import Pickled
from ckpt_engine.storage.checksum import crc32


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What the layout needs to know of one tensor to write: its local shape and dtype, and which other one it is the same as.

    ``same_as`` is the index of an earlier spec whose memory this one shares exactly, or ``None``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    same_as: int | None = None


@dataclasses.dataclass
class FileImage:
    """The repeating part of one shard file. All offsets are bytes from the start of the file.

    Attributes:
        name: file name.
        items: index (into the specs) of each record.
        templates, starts, payloads, payload_ends, ends: per record; ``ends`` is where the next one starts.
        tensor_bytes: end of the last record.
    """

    name: str
    items: list[int] = dataclasses.field(default_factory=list)
    templates: list[RecordTemplate] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    payloads: list[int] = dataclasses.field(default_factory=list)
    payload_ends: list[int] = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)

    @property
    def tensor_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    def add(self, item: int, template: RecordTemplate) -> None:
        start = self.tensor_bytes
        payload = start + len(template.header) if template.nbytes else start + template.length
        self.items.append(item)
        self.templates.append(template)
        self.starts.append(start)
        self.payloads.append(payload)
        self.payload_ends.append(payload + template.nbytes)
        self.ends.append(start + template.span)

    def records_in(self, start: int, stop: int) -> range:
        """Indices of the records that have bytes in ``[start, stop)``."""
        return range(bisect.bisect_right(self.ends, start), bisect.bisect_left(self.starts, stop))


@dataclasses.dataclass
class BlobRun:
    """The blobs of one file in one save: (start, bytes), laid out after the records."""

    blobs: list[tuple[int, Pickled]]
    size: int

    @classmethod
    def place(cls, image: FileImage, blobs: Sequence[Pickled]) -> BlobRun:
        placed, end = [], image.tensor_bytes
        for blob in blobs:
            placed.append((end, blob))
            end += len(blob) + -len(blob) % ALIGNMENT
        if blobs:
            end = placed[-1][0] + len(blobs[-1])  # nothing after the last record: zip readers look for its end there
        elif image.templates:
            last = image.templates[-1]
            end = image.starts[-1] + last.length
        return cls(placed, end)


def plan_files(
    specs: Sequence[TensorSpec], names: Sequence[str], templates: TemplateCache
) -> tuple[list[FileImage], list[int]]:
    """Distributes tensors over files: the largest first, each to the file with the fewest bytes; in a file, in the order given.

    Args:
        specs: the tensors to write.
        names: file names; files that get nothing are left out (the first one stays).
        templates: cache of record templates.

    Returns:
        The images, and for each spec the index of the spec whose record holds it (its own, or that of ``same_as``).
    """
    holder = [i if spec.same_as is None else spec.same_as for i, spec in enumerate(specs)]
    frames = {i: templates.get(specs[i].shape, specs[i].dtype) for i in range(len(specs)) if holder[i] == i}
    loads = [0] * len(names)
    chosen: list[list[int]] = [[] for _ in names]
    for item in sorted(frames, key=lambda i: -frames[i].span):  # stable, hence the same on every save
        target = loads.index(min(loads))
        loads[target] += frames[item].span
        chosen[target].append(item)
    images: list[FileImage] = []
    for name, items in zip(names, chosen, strict=True):
        if items or not images:
            image = FileImage(name)
            for item in sorted(items):
                image.add(item, frames[item])
            images.append(image)
    return images, holder


class Sealer:
    """Completes the extents of one file in one save, in order, and collects the CRCs.

    Attributes:
        crcs: CRC-32 of each payload, records first, then blobs (array of unsigned ints).
        frame_crcs: CRC-32 of everything else that belongs to the item: header, tail and padding.
    """

    def __init__(self, image: FileImage, run: BlobRun, extent_bytes: int, *, checksum: bool) -> None:
        self._image = image
        self._run = run
        self._extent_bytes = extent_bytes
        self._checksum = checksum
        count = len(image.items) + len(run.blobs)
        self.crcs = array.array("I", bytes(4 * count))
        self.frame_crcs = array.array("I", bytes(4 * count))
        self._running = 0  # CRC of the payload that continues from the extent before
        self._tail = bytearray()  # the tail that continues from the extent before
        self.next_extent = 0

    def seal(self, extent: int, view: memoryview) -> int:
        """Makes extent number ``extent`` final.

        Args:
            extent: its number in the file; they have to come in order.
            view: the extent's memory; the payload bytes in it are in place.

        Returns:
            The number of bytes to write: the extent's part of the file, rounded up to 4096 with zeros.
        """
        if extent != self.next_extent:
            raise RuntimeError(f"extent {extent} sealed out of order, expected {self.next_extent}")
        self.next_extent += 1
        base = extent * self._extent_bytes
        stop = min(base + self._extent_bytes, self._run.size)
        image = self._image
        for index in image.records_in(base, stop):
            self._seal_record(index, base, stop, view)
        for number, (start, blob) in enumerate(self._run.blobs):
            if start < stop and start + len(blob) + ALIGNMENT > base:
                self._seal_blob(len(image.items) + number, start, blob, base, stop, view)
        size = stop - base
        padded = size + -size % 4096
        view[size:padded] = bytes(padded - size)
        return padded

    def _seal_record(self, index: int, base: int, stop: int, view: memoryview) -> None:
        image = self._image
        template = image.templates[index]
        start, payload, payload_end = image.starts[index], image.payloads[index], image.payload_ends[index]
        if start >= base and start + len(template.header) <= stop:
            view[start - base : start - base + len(template.header)] = template.header
        else:
            _copy_clipped(template.header, start, base, stop, view)
        if template.nbytes and self._checksum:
            low, high = max(payload, base), min(payload_end, stop)
            if low < high:
                running = crc32(view[low - base : high - base], self._running if low > payload else 0)
                self._running = running
        if payload_end > stop or (payload_end == stop and template.tail and stop < self._run.size):
            return  # the tail belongs to a later extent
        if payload_end >= base:  # the CRC of the whole payload is known now
            tail = bytearray(template.tail)
            del tail[self._run.size - payload_end :]  # the last record of a file has no padding
            if self._checksum:
                crc = self._running if template.nbytes else 0
                fill_crc(tail, template.crc_at, crc)
                self.crcs[index] = crc
                self.frame_crcs[index] = crc32(tail, template.header_crc)
            self._tail = tail
        _copy_clipped(self._tail, payload_end, base, stop, view)

    def _seal_blob(self, index: int, start: int, blob: Pickled, base: int, stop: int, view: memoryview) -> None:
        _copy_clipped(blob, start, base, stop, view)
        pad_start = start + len(blob)
        padding = bytes(min(-len(blob) % ALIGNMENT, self._run.size - pad_start))
        _copy_clipped(padding, pad_start, base, stop, view)
        if self._checksum and base <= start < stop:
            self.crcs[index] = crc32(blob)
            self.frame_crcs[index] = crc32(padding)


def _copy_clipped(data: Pickled | bytearray, start: int, base: int, stop: int, view: memoryview) -> None:
    """Copies the part of ``data``, which lies at file offset ``start``, that falls into ``[base, stop)``."""
    low, high = max(start, base), min(start + len(data), stop)
    if low < high:
        view[low - base : high - base] = memoryview(data)[low - start : high - start]
