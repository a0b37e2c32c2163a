"""Whether the shards that the ranks hold make up each tensor exactly once; in words that name key, boxes and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

#: Boxes of one tensor that are compared pairwise at most; regular grids, the usual case, need none of that.
_PAIRWISE = 4096


class Chunk(NamedTuple):
    """A box of a global tensor that one rank holds.

    Attributes:
        key: name of the global tensor.
        offset, sizes: the box.
        size: shape of the global tensor.
    """

    key: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def dcp_index(self) -> MetadataIndex:
        """DCP's key of it."""
        return MetadataIndex(self.key, torch.Size(self.offset))


def coverage_problems(key: str, held: Sequence[tuple[Chunk, int]]) -> Iterator[str]:
    """What is wrong with the chunks of one tensor, given with the ranks that hold them; nothing if they cover it exactly once."""
    first, rank = held[0]
    for chunk, other in held:
        if (chunk.size, chunk.dtype) != (first.size, first.dtype):
            yield (
                f"{key!r} is {_shape(first.size)} {first.dtype} on rank {rank} "
                f"and {_shape(chunk.size)} {chunk.dtype} on rank {other}"
            )
            return
    size = first.size
    outside = [
        (chunk, rank)
        for chunk, rank in held
        if len(chunk.offset) != len(size)
        or any(low < 0 or low + n > end for low, n, end in zip(chunk.offset, chunk.sizes, size, strict=True))
    ]
    for chunk, rank in outside[:3]:
        yield f"{key!r}: rank {rank} holds {_box(chunk)}, beyond the edge of {_shape(size)}"
    if outside:
        return
    filled = [(chunk, rank) for chunk, rank in held if math.prod(chunk.sizes)]
    overlap = _overlap(filled)
    if overlap is not None:
        (one, rank), (two, other) = overlap
        yield f"{key!r}: {_box(one)} of rank {rank} and {_box(two)} of rank {other} overlap"
        return
    missing = math.prod(size) - sum(math.prod(chunk.sizes) for chunk, _ in filled)
    if missing:
        shown = ", ".join(f"{_box(chunk)} of rank {rank}" for chunk, rank in filled[:4])
        more = f" and {len(filled) - 4} more" if len(filled) > 4 else ""
        yield f"{key!r}: {missing} of {math.prod(size)} elements of {_shape(size)} are on no rank; there are {shown or 'none'}{more}"


def _overlap(held: Sequence[tuple[Chunk, int]]) -> tuple[tuple[Chunk, int], tuple[Chunk, int]] | None:
    if len(held) < 2:
        return None
    seen: dict[tuple[int, ...], tuple[Chunk, int]] = {}
    for entry in held:
        other = seen.setdefault(entry[0].offset, entry)
        if other is not entry:
            return other, entry
    sizes = held[0][0].sizes
    if all(
        chunk.sizes == sizes and all(low % n == 0 for low, n in zip(chunk.offset, sizes, strict=True))
        for chunk, _ in held
    ):
        return None  # cells of one grid, each of them once
    # By the start of the axis that tells most of them apart: only boxes whose ranges on it meet are compared.
    axis = max(range(len(sizes)), key=lambda a: len({chunk.offset[a] for chunk, _ in held}))
    order = sorted(held, key=lambda entry: entry[0].offset[axis])
    active: list[tuple[Chunk, int]] = []
    for entry in order:
        start = entry[0].offset[axis]
        active = [other for other in active if other[0].offset[axis] + other[0].sizes[axis] > start]
        for other in active[:_PAIRWISE]:
            if _meet(other[0], entry[0]):
                return other, entry
        active.append(entry)
    return None


def _meet(one: Chunk, two: Chunk) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(one.offset, one.sizes, two.offset, two.sizes, strict=True))


def _box(chunk: Chunk) -> str:
    ranges = (f"{low}:{low + n}" for low, n in zip(chunk.offset, chunk.sizes, strict=True))
    return f"[{', '.join(ranges)}]"


def _shape(size: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, size))})"
