"""Boxes of saved chunks: whether a read makes sense, which windows of a payload it needs, and the copy of its part.

Pure geometry and ``copy_``; nothing here reads a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_engine.errors import KeyMismatchError, StateError
from ckpt_engine.restore.source import RecordInfo

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class TensorRead(NamedTuple):
    """One box of a saved chunk, and where it goes.

    Attributes:
        storage_index: DCP's key of the chunk.
        storage_offsets, lengths: the box, counted from the start of the chunk.
        target: tensor of shape ``lengths`` to fill.
        fqn: name for messages.
    """

    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size
    target: torch.Tensor
    fqn: str


class Window(NamedTuple):
    """Rows ``low`` to ``high`` of dimension ``len(outer)``, at index ``outer`` of the dimensions before it.

    ``start`` and ``stop`` are where its bytes lie in the payload.
    """

    outer: tuple[int, ...]
    low: int
    high: int
    start: int
    stop: int

    def cut(self, low: int, high: int) -> Window:
        """Some of its rows."""
        row = (self.stop - self.start) // (self.high - self.low)
        start = self.start + (low - self.low) * row
        return Window(self.outer, low, high, start, start + (high - low) * row)


def check_read(info: RecordInfo, read: TensorRead, step: int | None) -> None:
    """Refuses a read that can't be carried out exactly.

    Raises:
        KeyMismatchError: no such box was saved, or the target has another shape.
        StateError: the target can't hold what was saved.
    """
    target = read.target
    where: dict[str, Any] = {"step": step, "path": info.path, "phase": "restore"}
    if info.kind != "tensor" or info.shape is None:
        raise KeyMismatchError(f"{read.fqn!r} is a pickled value in the checkpoint, not a tensor", **where)
    shape = info.shape
    if read.lengths != shape or any(read.storage_offsets) or len(read.storage_offsets) != len(shape):
        box = tuple(zip(read.storage_offsets, read.lengths, shape, strict=False))
        if len({len(shape), len(read.lengths), len(read.storage_offsets)}) > 1 or any(
            min(low, size) < 0 or low + size > end for low, size, end in box
        ):
            raise KeyMismatchError(
                f"{read.fqn!r}: {list(read.lengths)} elements at {list(read.storage_offsets)} aren't inside the saved "
                f"chunk, whose shape is {list(shape)}",
                **where,
            )
    if target.shape != read.lengths:
        raise KeyMismatchError(
            f"{read.fqn!r} has shape {list(target.shape)}, expected {list(read.lengths)} as saved", **where
        )
    problem = None
    if target.layout != torch.strided:
        problem = f"has layout {target.layout}, expected a dense tensor"
    elif target.is_meta:
        problem = "is on the meta device, which holds no values"
    elif type(target) in _PLAIN and not target.is_contiguous() and _overlaps(target):
        problem = f"shares elements with itself (shape {list(target.shape)}, strides {list(target.stride())})"
    elif info.dtype is not None and info.dtype.is_complex and not target.dtype.is_complex:
        problem = f"has dtype {target.dtype}, which can't hold the saved {info.dtype}"
    if problem is not None:
        raise StateError(
            f"{read.fqn!r} can't be filled: it {problem}",
            key=read.fqn,
            hint="restore into an ordinary tensor",
            **where,
        )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two indices may mean the same element; in doubt, yes."""
    if not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def direct_address(info: RecordInfo, read: TensorRead) -> int:
    """Address of the target if the payload is exactly what its memory has to hold, else 0."""
    target = read.target
    if (
        type(target) in _PLAIN  # a wrapper's pointer isn't that of its data
        and target.dtype == info.dtype
        and target.is_cpu
        and read.lengths == info.shape
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    ):
        return target.data_ptr()
    return 0


def windows(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[Window]:
    """Cuts the payload of a chunk into windows of at most ``limit`` bytes, in order.

    The chunk has at least one dimension and one element. Where one row of the first dimension is too much, rows of a
    later one are taken, so that the limit holds for every shape.
    """
    dim, row = len(shape) - 1, itemsize
    while dim > 0 and row * shape[dim] <= limit:
        row *= shape[dim]
        dim -= 1
    rows, at = max(1, limit // row), 0
    for outer in itertools.product(*map(range, shape[:dim])):
        for low in range(0, shape[dim], rows):
            high = min(low + rows, shape[dim])
            yield Window(outer, low, high, at, at + (high - low) * row)
            at += (high - low) * row


def rows_in(window: Window, read: TensorRead) -> tuple[int, int] | None:
    """Which rows of a window a read wants, if any."""
    for index, offset, length in zip(window.outer, read.storage_offsets, read.lengths, strict=False):
        if not offset <= index < offset + length:
            return None
    dim = len(window.outer)
    low = max(window.low, read.storage_offsets[dim])
    high = min(window.high, read.storage_offsets[dim] + read.lengths[dim])
    return (low, high) if low < high and all(read.lengths) else None


def copy_rows(block: torch.Tensor, window: Window, rows: tuple[int, int], read: TensorRead) -> None:
    """Copies rows of a window, whose content is ``block``, to their place in the target."""
    dim = len(window.outer)
    low, high = rows
    with torch.inference_mode():  # no_grad would refuse targets that were made in inference mode
        part = block.narrow(0, low - window.low, high - low)
        for inner in range(1, part.dim()):
            part = part.narrow(inner, read.storage_offsets[dim + inner], read.lengths[dim + inner])
        target = read.target
        for index, offset in zip(window.outer, read.storage_offsets, strict=False):
            target = target.select(0, index - offset)
        target.narrow(0, low - read.storage_offsets[dim], high - low).copy_(part)


def copy_boxes(chunk: torch.Tensor, reads: Sequence[TensorRead]) -> None:
    """Copies each read's box of a whole chunk to its target."""
    with torch.inference_mode():
        for read in reads:
            part = chunk
            for dim, (offset, length) in enumerate(zip(read.storage_offsets, read.lengths, strict=True)):
                part = part.narrow(dim, offset, length)
            read.target.copy_(part)
