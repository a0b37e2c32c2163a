"""Pickled values of a checkpoint: their checked bytes, and what they hold. Runs no code from them unless allowed."""

from __future__ import annotations

import io
import os
import pickle
import re
from typing import Any

import torch

from ckpt_engine.errors import CheckpointError, CorruptionError
from ckpt_engine.restore.raw import HINT, ShardReader
from ckpt_engine.restore.source import CheckpointSource, RecordInfo
from ckpt_engine.restore.zips import check_record, read_record, record_file
from ckpt_engine.storage.checksum import crc32

_GLOBAL = re.compile(r"GLOBAL (\S+)")


def check_crc(info: RecordInfo, found: int, *, step: int | None, phase: str) -> None:
    """Compares the CRC-32 of a payload with the one in the manifest, if there is one.

    Raises:
        CorruptionError: they differ; names file and tensor.
    """
    if info.crc32 is None or found == info.crc32:
        return
    name = os.path.basename(info.path)
    raise CorruptionError(
        f"{info.title!r} in {name} is damaged: CRC-32 of its {info.nbytes} bytes is {found:08x}, "
        f"expected {info.crc32:08x}",
        file=name,
        tensor=info.fqn,
        step=step,
        path=info.path,
        phase=phase,
        hint=HINT,
    )


def read_object(source: CheckpointSource, fqn: str, *, verify: bool) -> bytes:
    """The record of a pickled value, checked.

    Raises:
        CorruptionError: its checksum differs, or the file is too short.
        KeyMismatchError: the checkpoint has no such value.
    """
    info = source.record(fqn, None)
    with ShardReader(step=source.step, phase="restore") as reader:
        if info.payload is None:
            if verify:
                check_record(reader, info, record_file(reader, info))
            return bytes(read_record(reader, info))
        data = read_record(reader, info)
    if verify:
        check_crc(info, crc32(data), step=source.step, phase="restore")
    return bytes(data)


def load_object(data: bytes, *, fqn: str, trusted: bool) -> Any:
    """The value in a record that :func:`read_object` returned.

    Args:
        trusted: whether code that the record names may run, if it can't be loaded without.

    Raises:
        CheckpointError: it would need such code; names ``fqn`` and what was refused.
        CorruptionError: the bytes are no record.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = error
    except Exception as error:
        raise CorruptionError(
            f"{fqn!r} is damaged: torch.load says {type(error).__name__}: {str(error)[:200]}",
            tensor=fqn,
            phase="restore",
            hint=HINT,
        ) from error
    if not trusted:
        found = _GLOBAL.search(str(refused))
        what = found.group(1) if found else str(refused).splitlines()[0][:200]
        raise CheckpointError(
            f"{fqn!r} needs {what}, which isn't loaded from a checkpoint that isn't trusted",
            phase="restore",
            hint="allow_pickle=True loads it; only do that with checkpoints of your own",
        ) from refused
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointError(
            f"{fqn!r} can't be loaded: {type(error).__name__}: {str(error)[:200]}",
            phase="restore",
            hint="whatever class it is of has to be importable, as it was when it was saved",
        ) from error
