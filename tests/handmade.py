"""Makes checkpoints in the engine's format without the engine: ``torch.save`` records in a row, and manifests.

What the engine writes and what its readers expect could share a mistake; these directories are made from the drawing in
``commit/manifest.py`` alone.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import io
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_engine.commit.manifest import (
    CommitRecord,
    FileEntry,
    PartEntry,
    PartStatic,
    compose_commit,
    compose_part,
    part_name,
)

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def example(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor with arbitrary bytes that are valid for its dtype."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).to(dtype)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality that tells NaNs and signed zeros apart."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.numel() == 0 or raw_bytes(left) == raw_bytes(right)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@dataclasses.dataclass
class Chunk:
    """Part of a tensor, at ``offsets`` of the whole."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclasses.dataclass
class Item:
    """Where a record lies, for tests that damage it."""

    fqn: str
    file: str
    offset: int
    length: int
    payload: int
    nbytes: int
    end: int = 0


def record_of(value: Any) -> tuple[bytes, int, int]:
    """A ``torch.save`` record; start and size of its tensor payload in it (for a tensor)."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = buffer.getvalue()
    if isinstance(value, torch.Tensor) and value.numel():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            info = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
        name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
        return data, info.header_offset + 30 + name + extra, info.file_size
    return data, len(data), 0


def write_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor | Sequence[Chunk]],
    values: Mapping[str, Any] | None = None,
    *,
    step: int = 100,
    save_id: str = "5a5e1d",
    ranks: int = 1,
    files: int = 1,
    checksum: bool = True,
    train_state: bytes | None = None,
) -> list[Item]:
    """Writes a committed checkpoint; items go round robin over ranks and files. Returns where they lie."""
    root = os.fspath(path)
    os.makedirs(os.path.join(root, "ckpt_engine"), exist_ok=True)
    entries: dict[str, Any] = {}
    todo: list[tuple[str, tuple[int, ...] | None, Any]] = []
    for fqn, given in tensors.items():
        chunks = [Chunk((0,) * given.dim(), given)] if isinstance(given, torch.Tensor) else list(given)
        size = torch.Size(
            [max(c.offsets[d] + c.tensor.shape[d] for c in chunks) for d in range(chunks[0].tensor.dim())]
        )
        entries[fqn] = TensorStorageMetadata(
            TensorProperties(dtype=chunks[0].tensor.dtype),
            size,
            [ChunkStorageMetadata(torch.Size(c.offsets), c.tensor.shape) for c in chunks],
        )
        todo += [(fqn, chunk.offsets, chunk.tensor) for chunk in chunks]
    for fqn, value in (values or {}).items():
        entries[fqn] = BytesStorageMetadata()
        todo.append((fqn, None, value))
    storage: dict[MetadataIndex, _StorageInfo] = {}
    items: list[Item] = []
    parts: list[PartEntry] = []
    total = 0
    for rank in range(ranks):
        part, sizes, found = _write_rank(root, todo[rank::ranks], rank, ranks, files, step, save_id, checksum)
        for (fqn, offsets, _), item in zip(todo[rank::ranks], found, strict=True):
            storage[MetadataIndex(fqn, offsets)] = _StorageInfo(item.file, item.offset, item.length)
        items += found
        total += sum(sizes)
        write(os.path.join(root, "ckpt_engine", part_name(rank)), part)
        parts.append(PartEntry(rank, part_name(rank), len(part), hashlib.sha256(part).hexdigest()))
    paths = {fqn: tuple(fqn.split(".")) for fqn in entries}
    contents = {".metadata": pickle.dumps(Metadata(entries, paths, storage, StorageMeta(save_id=save_id)))}
    if train_state is not None:
        contents["train_state.pt"] = train_state
    for name, content in contents.items():
        write(os.path.join(root, name), content)
    record = CommitRecord(
        step=step,
        save_id=save_id,
        world_size=ranks,
        bytes=total,
        created="2026-12-01T12:00:00+00:00",
        engine="0.1.0",
        checksum="crc32" if checksum else None,
        parts=tuple(parts),
        files={name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()},
    )
    write(os.path.join(root, "ckpt_engine", "commit.json"), compose_commit(record))
    return items


def _write_rank(
    root: str,
    todo: Sequence[tuple[str, tuple[int, ...] | None, Any]],
    rank: int,
    ranks: int,
    files: int,
    step: int,
    save_id: str,
    checksum: bool,
) -> tuple[bytes, list[int], list[Item]]:
    names = [f"__{rank}_{number}.distcp" for number in range(files)]
    contents = [bytearray() for _ in names]
    items: list[Item] = []
    last: dict[int, Item] = {}
    for number, (fqn, _, value) in enumerate(todo):
        file = number % files
        content = contents[file]
        content += bytes(-len(content) % 64)
        if file in last:
            last[file].end = len(content)
        data, payload, nbytes = record_of(value)
        if not isinstance(value, torch.Tensor):
            payload, nbytes = 0, len(data)
        item = Item(fqn, names[file], len(content), len(data), len(content) + payload, nbytes)
        content += data
        last[file] = item
        items.append(item)
    for file, item in last.items():
        contents[file] += bytes(-len(contents[file]) % 64)
        item.end = len(contents[file])
    for name, content in zip(names, contents, strict=True):
        write(os.path.join(root, name), content)
    # Pickled values come last in a manifest's columns, tensors in the order of their file.
    tensors = [(t, i) for t, i in zip(todo, items, strict=True) if isinstance(t[2], torch.Tensor)]
    tensors.sort(key=lambda pair: (pair[1].file, pair[1].offset))
    blobs = [(t, i) for t, i in zip(todo, items, strict=True) if not isinstance(t[2], torch.Tensor)]
    static = PartStatic(
        rank=rank,
        checksum=checksum,
        file_names=names,
        fqn=[i.fqn for _, i in tensors],
        chunk=[t[1] for t, _ in tensors],
        dtype=[str(t[2].dtype) for t, _ in tensors],
        shape=[tuple(t[2].shape) for t, _ in tensors],
        file=[names.index(i.file) for _, i in tensors],
        offset=[i.offset for _, i in tensors],
        length=[i.length for _, i in tensors],
        payload=[i.payload for _, i in tensors],
        nbytes=[i.nbytes for _, i in tensors],
    )

    def sums(found: Sequence[tuple[Any, Item]], *, frame: bool) -> array.array[int]:
        crcs = array.array("I")
        for _, item in found:
            content = contents[names.index(item.file)]
            tail = item.payload + item.nbytes
            before, after = content[item.offset : item.payload], content[tail : item.end]
            crcs.append(zlib.crc32(before + after) if frame else zlib.crc32(content[item.payload : tail]))
        return crcs

    part = compose_part(
        static,
        save_id=save_id,
        step=step,
        world_size=ranks,
        file_bytes=[len(content) for content in contents],
        crcs=sums(tensors, frame=False),
        frame_crcs=sums(tensors, frame=True),
        blobs=[(i.fqn, names.index(i.file), i.offset, i.length) for _, i in blobs],
        blob_crcs=sums(blobs, frame=False),
        blob_frame_crcs=sums(blobs, frame=True),
    )
    return part, [len(content) for content in contents], items


def write(path: str, data: bytes | bytearray) -> None:
    with open(path, "wb") as file:
        file.write(data)


def flip(path: str | os.PathLike[str], position: int, bit: int = 0) -> None:
    """Flips one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def stock_save(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Saves with DCP itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)
