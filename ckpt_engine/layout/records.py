"""Records: the bytes that ``torch.save`` writes around the raw data of one contiguous tensor.

A record is a small zip archive with uncompressed members::

    header   local headers and small members (data.pkl, byteorder, ...), up to the payload
    payload  the raw bytes of the tensor, C-contiguous, at a multiple of 64 from the start of the record
    tail     data descriptor of the payload, remaining members, central directory

Header and tail depend on shape and dtype alone, except for the payload's CRC-32, which stands twice in the tail. They come
from ``torch.save`` itself under ``torch.serialization.skip_data()``, written to a sink that notes where the payload would
be instead of storing it: exact for every version of torch, and of no cost that grows with the tensor.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import struct
from typing import Any

import torch
from torch.serialization import skip_data

from ckpt_engine.errors import StateError
from ckpt_engine.storage.checksum import crc32

#: Records start at multiples of this, so that payloads are aligned in the file as they are in the record.
ALIGNMENT = 64

_DESCRIPTOR = b"PK\x07\x08"
_ENTRY = b"PK\x01\x02"
_CRC = struct.Struct("<I")


@dataclasses.dataclass(frozen=True)
class RecordTemplate:
    """The frame of a record.

    Attributes:
        header: bytes before the payload.
        tail: bytes after the payload, zero padding up to :data:`ALIGNMENT` included, CRC fields zero.
        nbytes: size of the payload in bytes.
        length: size of the record in bytes, without the padding.
        crc_at: positions in ``tail`` of the payload's CRC-32 fields (little-endian).
        header_crc: CRC-32 of ``header``.
    """

    header: bytes
    tail: bytes
    nbytes: int
    length: int
    crc_at: tuple[int, ...]
    header_crc: int

    @property
    def span(self) -> int:
        """Bytes from the start of this record to the start of the next."""
        return len(self.header) + self.nbytes + len(self.tail)


class _Sink:
    """A file for ``torch.save`` that keeps what is written and only notes what is skipped."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.after: bytearray | None = None

    def write(self, data: Any) -> int:
        chunk = bytes(data)
        (self.before if self.after is None else self.after).extend(chunk)
        return len(chunk)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 1 or self.after is not None:
            raise OSError(f"unexpected seek({offset}, {whence}) while making a record template")
        self.after = bytearray()
        return 0

    def flush(self) -> None:
        pass


def make_template(shape: tuple[int, ...], dtype: torch.dtype) -> RecordTemplate:
    """The frame for a contiguous tensor of this shape and dtype; about 0.3 ms, whatever its size.

    Raises:
        StateError: torch can't save this dtype, or writes it in a way that this module doesn't know.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    sink = _Sink()
    try:
        tensor = _stand_in(shape, dtype)
        with skip_data(materialize_fake_tensors=True):
            torch.save(tensor, sink)  # type: ignore[arg-type]
    except (RuntimeError, TypeError, ValueError, OSError) as error:
        raise StateError(
            f"torch.save can't write a {dtype} tensor of shape {tuple(shape)}: {error}", phase="plan"
        ) from error
    header, tail = bytes(sink.before), bytes(sink.after or b"")
    if nbytes == 0:
        header, tail = header + tail, b""
    length = len(header) + nbytes + len(tail)
    padding = -length % ALIGNMENT
    crc_at = _crc_positions(tail, len(header)) if nbytes else ()
    if nbytes and len(header) % ALIGNMENT:
        raise StateError(
            f"payload of a {dtype} record starts at {len(header)}, expected a multiple of {ALIGNMENT}", phase="plan"
        )
    return RecordTemplate(header, tail + bytes(padding), nbytes, length, crc_at, crc32(header))


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor to make a record of. Its memory is only promised, never touched; where not even that can be had (an address
    space limit, no overcommit), it lies over memory that isn't there.

    Not a fake tensor: the first of those costs half a second and 100 MiB of modules, just where memory is short. The storage is
    made first: ``torch.empty`` fills what it makes when ``torch.use_deterministic_algorithms`` is on, and makes it on the default
    device when none is named.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    try:
        storage = torch.UntypedStorage(nbytes, device="cpu")  # type: ignore[no-untyped-call]
    except RuntimeError:
        claimed = (ctypes.c_char * nbytes).from_address(_NOWHERE)
        storage = torch.frombuffer(claimed, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)


#: Where the memory of stand-ins claims to start. Nothing can be mapped so low: whoever touched it would not go unnoticed.
_NOWHERE = 4096


def _crc_positions(tail: bytes, header_size: int) -> tuple[int, ...]:
    """Where the payload's CRC stands: in its data descriptor and in its entry of the central directory."""
    entry = tail.find(_ENTRY)
    while entry >= 0:
        name_size = struct.unpack_from("<H", tail, entry + 28)[0]
        if tail[entry + 46 : entry + 46 + name_size].endswith(b"/data/0"):
            break
        entry = tail.find(_ENTRY, entry + 1)
    if not tail.startswith(_DESCRIPTOR) or entry < 0:
        raise StateError("torch.save wrote a record without data descriptor or central directory entry", phase="plan")
    return 4, entry + 16


def fill_crc(tail: bytearray | memoryview, crc_at: tuple[int, ...], crc: int) -> None:
    """Writes the payload's CRC-32 into a tail."""
    for position in crc_at:
        _CRC.pack_into(tail, position, crc)


class TemplateCache:
    """Templates by shape and dtype. A state has few such classes, however many tensors it has."""

    def __init__(self) -> None:
        self._templates: dict[tuple[tuple[int, ...], torch.dtype], RecordTemplate] = {}

    def get(self, shape: tuple[int, ...], dtype: torch.dtype) -> RecordTemplate:
        key = (tuple(shape), dtype)
        found = self._templates.get(key)
        if found is None:
            found = self._templates[key] = make_template(key[0], dtype)
        return found

    def keep_only(self, used: set[tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Drops templates of structures that are gone."""
        for key in self._templates.keys() - used:
            del self._templates[key]
