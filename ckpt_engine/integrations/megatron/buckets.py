"""From Megatron's write buckets to shard file images, and from those to the results that DCP's ``finish`` takes.

A bucket is one shard file::

    (full path, storage key, ([(WriteItem, BytesIO), ...], [(WriteItem, tensor), ...]))

Tensors keep the order that Megatron gives them; values follow. Results refer to offsets, which are known before a byte
is written. What depends on names, shapes and dtypes alone is kept from save to save, by structure, never by storage.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ckpt_engine.commit.manifest import PartStatic
from ckpt_engine.errors import StateError
from ckpt_engine.layout.image import FileImage, TensorSpec
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.persisting import describe_tensors

#: Structures whose layout is kept: a trainer saves one, verl three per step.
_LAYOUTS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The repeating part of a save.

    Attributes:
        images: one per bucket.
        results: of the tensors.
        owner: (rank, checksum, storage keys, tensors per bucket) that it was made for; ``indexes`` and ``specs``: of the tensors.
    """

    images: list[FileImage]
    static: PartStatic
    results: list[WriteResult]
    owner: tuple[Any, ...]
    indexes: list[MetadataIndex]
    specs: list[TensorSpec]

    def fits(self, owner: tuple[Any, ...], buckets: Buckets) -> bool:
        """Whether the buckets have this structure. Allocates nothing that stays: the collector has no reason to run."""
        if owner != self.owner:
            return False
        for index, tensor, known, spec in zip(buckets.indexes, buckets.tensors, self.indexes, self.specs, strict=True):
            if tensor.dtype is not spec.dtype or tensor.shape != spec.shape:
                return False
            if index is not known and (index.fqn != known.fqn or index.offset != known.offset):
                return False
        return True


@dataclasses.dataclass
class Buckets:
    """The content of one save on this rank, taken apart.

    Attributes:
        paths: storage key to full path.
        tensors: all tensors, bucket after bucket. Emptied once they are staged.
        values: per bucket: (index, pickled value).
    """

    paths: dict[str, str]
    indexes: list[MetadataIndex]
    counts: list[int]
    tensors: list[torch.Tensor]
    values: list[list[tuple[MetadataIndex, bytes]]]

    @classmethod
    def of(cls, buckets: Sequence[Any]) -> Buckets:
        """Takes buckets apart. Values are copied here, tensors are not.

        Raises:
            StateError: something in them isn't what it should be.
        """
        found = cls({}, [], [], [], [])
        for path, key, (values, tensors) in buckets:
            if key in found.paths:
                raise StateError(f"two write buckets are for the file {key!r}", phase="plan")
            found.paths[key] = os.fspath(path)
            kept = [(item.index, _bytes_of(item, value)) for item, value in values]
            count = 0
            for item, tensor in tensors:
                if not isinstance(tensor, torch.Tensor):
                    raise StateError(
                        f"{item.index.fqn!r} is a {type(tensor).__name__}, expected a tensor",
                        key=item.index.fqn,
                        phase="plan",
                    )
                if _is_plain(tensor):
                    found.indexes.append(item.index)
                    found.tensors.append(tensor.detach())
                    count += 1
                else:
                    kept.append((item.index, _pickled(tensor)))
            found.counts.append(count)
            found.values.append(kept)
        return found


def layout_of(buckets: Buckets, templates: TemplateCache, known: list[Layout], *, rank: int, checksum: bool) -> Layout:
    """The layout for this structure, made anew if ``known``, the most recently used one last, doesn't have it."""
    owner = (rank, checksum, tuple(buckets.paths), tuple(buckets.counts))
    for layout in reversed(known):
        if layout.fits(owner, buckets):
            known.remove(layout)
            break
    else:
        layout = _make(buckets, templates, owner, rank=rank, checksum=checksum)
        del known[: len(known) + 1 - _LAYOUTS]
    known.append(layout)
    return layout


def _make(buckets: Buckets, templates: TemplateCache, owner: tuple[Any, ...], *, rank: int, checksum: bool) -> Layout:
    specs = [TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in buckets.tensors]
    images: list[FileImage] = []
    results: list[WriteResult] = []
    first = 0
    for name, count in zip(buckets.paths, buckets.counts, strict=True):
        image = FileImage(name)
        for item in range(first, first + count):
            spec = specs[item]
            template = templates.get(spec.shape, spec.dtype)
            image.add(item, template)
            place = _StorageInfo(name, image.starts[-1], template.length)
            results.append(WriteResult(buckets.indexes[item], template.length, place))
        first += count
        images.append(image)
    static = describe_tensors(
        images,
        [index.fqn for index in buckets.indexes],
        [None if index.offset is None else list(index.offset) for index in buckets.indexes],
        specs,
        rank=rank,
        checksum=checksum,
    )
    return Layout(images, static, results, owner, list(buckets.indexes), specs)


def value_results(
    names: Sequence[str], indexes: Sequence[MetadataIndex], placed: Sequence[tuple[int, int, int]]
) -> list[WriteResult]:
    """Results of the values of a save, from where :class:`ckpt_engine.persisting.ShardSave` placed them."""
    return [
        WriteResult(index, length, _StorageInfo(names[file], offset, length))
        for index, (file, offset, length) in zip(indexes, placed, strict=True)
    ]


def emptied(buckets: Sequence[Any]) -> list[Any]:
    """The same buckets in Megatron's layout without anything in them: what is staged needs them no longer."""
    return [(path, key, ([], [])) for path, key, _ in buckets]


def _bytes_of(item: WriteItem, value: Any) -> bytes:
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    raise StateError(
        f"{item.index.fqn!r} is a {type(value).__name__}, expected a BytesIO", key=item.index.fqn, phase="plan"
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a record of shape, dtype and raw bytes is all there is to this tensor."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _pickled(tensor: torch.Tensor) -> bytes:
    """A tensor of another kind (a low-precision subclass, a sparse one), as stock writes it."""
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu(), buffer)
    return buffer.getvalue()
