"""Records of stock checkpoints: small zip archives; the CRC-32 that ``torch.save`` put into them is the only check.

A zip's CRCs cover what its members hold; a flipped bit in a header that no reader looks at goes unnoticed, unlike in
our own checkpoints.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from typing import Any

import torch

from ckpt_engine.errors import CheckpointError, CorruptionError
from ckpt_engine.restore.raw import HINT, ShardReader
from ckpt_engine.restore.source import RecordInfo

_SMALL = 1 << 20


class _RecordView(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, reader: ShardReader, info: RecordInfo) -> None:
        self._reader = reader
        self._info = info
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._info.length)[whence]
        if at < 0:
            raise ValueError(f"seek to {at}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        size = min(len(view), max(0, self._info.length - self._at))
        if size:
            info = self._info
            self._reader.fill(info.path, [view[:size]], info.offset + self._at, tensor=info.title)
            self._at += size
        return size


def record_file(reader: ShardReader, info: RecordInfo) -> io.BytesIO | io.RawIOBase:
    """The record as a file; a small one is read at once."""
    if info.transforms:
        raise CheckpointError(
            f"{info.title!r} was written through {', '.join(info.transforms)}, which only DCP itself undoes",
            step=reader.step,
            path=info.path,
            phase=reader.phase,
            hint="load it with torch.distributed.checkpoint.load",
        )
    return io.BytesIO(read_record(reader, info)) if info.length <= _SMALL else _RecordView(reader, info)


def read_record(reader: ShardReader, info: RecordInfo) -> bytearray:
    """The bytes of a record."""
    data = bytearray(info.length)
    reader.fill(info.path, [memoryview(data)], info.offset, tensor=info.title)
    return data


def check_record(reader: ShardReader, info: RecordInfo, file: io.BytesIO | io.RawIOBase) -> None:
    """Compares the CRCs in a zip record with what its members hold.

    Raises:
        CorruptionError: one differs, or this is no zip.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
        problem = None if bad is None else f"zip member {bad!r} fails its CRC-32"
    except CheckpointError:
        raise
    except Exception as error:  # damaged archives raise nearly everything
        problem = f"the zip is unreadable ({type(error).__name__}: {str(error)[:200]})"
    file.seek(0)
    if problem is not None:
        raise damaged(reader, info, problem)


def load_record(reader: ShardReader, info: RecordInfo, *, verify: bool) -> torch.Tensor:
    """The tensor in a stock record."""
    file = record_file(reader, info)
    if verify:
        check_record(reader, info, file)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{info.title!r} isn't a plain tensor: {str(error).splitlines()[0][:200]}",
            step=reader.step,
            path=info.path,
            phase=reader.phase,
            hint="load it with torch.distributed.checkpoint.load",
        ) from error
    except Exception as error:
        raise damaged(reader, info, f"torch.load says {type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(found, torch.Tensor):
        raise damaged(reader, info, f"it holds a {type(found).__name__}, expected a tensor")
    if info.shape is not None and tuple(found.shape) != info.shape:
        raise damaged(reader, info, f"it has shape {tuple(found.shape)}, .metadata says {info.shape}")
    return found


def damaged(reader: ShardReader, info: RecordInfo, problem: str) -> CorruptionError:
    """The error for a record that isn't what it should be."""
    name = os.path.basename(info.path)
    return CorruptionError(
        f"{info.title!r} in {name} is damaged: {problem}",
        file=name,
        tensor=info.fqn,
        step=reader.step,
        path=info.path,
        phase=reader.phase,
        hint=HINT,
    )
