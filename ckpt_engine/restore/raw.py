"""Reads from shard files into memory that is already there: everything asked for, or a typed error.

Holds no bulk data of its own but one bounded scratch buffer per thread. Bulk work is in calls that release the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Sequence

import torch

from ckpt_engine.errors import CorruptionError, StorageError

#: No scratch buffer and no single read is larger.
WINDOW = 16 << 20

#: Vectored reads take at most this many buffers.
IOV_MAX = 1024

HINT = "restore an older step; engine.verify(step) tells which ones are whole"


@functools.lru_cache(maxsize=4096)  # making an array type costs ten times as much as an array; states have few sizes
def _array_of(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * nbytes


def memory_at(address: int, nbytes: int) -> memoryview:
    """Memory that somebody else keeps alive, as a writable view."""
    return memoryview(_array_of(nbytes).from_address(address))


class Scratch:
    """One thread's scratch buffer, as a tensor and as a view of the same memory."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8)  # 64-byte aligned, so that it can be viewed as any dtype
        self.view = memory_at(self.tensor.data_ptr(), nbytes) if nbytes else memoryview(bytearray())


class ShardReader:
    """Reads files from several threads; a context manager that closes them all.

    Args:
        step, phase: for the errors.
    """

    _KEEP = 64  # descriptors kept open: files are read mostly one after the other, whatever their number

    def __init__(self, *, step: int | None, phase: str) -> None:
        self.step = step
        self.phase = phase
        self._lock = threading.Lock()
        self._files: dict[str, list[int]] = {}  # path -> [descriptor, users]

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for descriptor, _users in self._files.values():
                os.close(descriptor)
            self._files.clear()

    @contextlib.contextmanager
    def using(self, path: str) -> Iterator[int]:
        """A descriptor of the file, not closed while in use."""
        with self._lock:
            entry = self._files.get(path)
            if entry is None:
                entry = self._files[path] = [self._open(path), 0]
            entry[1] += 1
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1
                if not entry[1] and len(self._files) > self._KEEP:
                    os.close(self._files.pop(path)[0])

    def _open(self, path: str) -> int:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe must not block for ever
        except FileNotFoundError:
            raise CorruptionError(
                f"{os.path.basename(path)} is missing",
                file=os.path.basename(path),
                step=self.step,
                path=path,
                phase=self.phase,
                hint=HINT,
            ) from None
        except OSError as error:
            raise self._refused(path, error) from error

    def fill(self, path: str, buffers: Sequence[memoryview], offset: int, *, tensor: str | None) -> None:
        """Reads the file from ``offset`` on into the buffers, one after the other.

        Raises:
            CorruptionError: the file ends before they are full. ``tensor`` names what was being read.
            StorageError: the file system refused.
        """
        with self.using(path) as descriptor:
            wanted = sum(map(len, buffers))
            done = self._preadv(descriptor, path, buffers, offset)
            while done < wanted:
                rest, skip = [], done
                for buffer in buffers:
                    if skip < len(buffer):
                        rest.append(buffer[skip:] if skip else buffer)
                    skip = max(0, skip - len(buffer))
                more = self._preadv(descriptor, path, rest, offset + done)
                if more == 0:
                    raise self._short(path, offset + done, offset + wanted, tensor)
                done += more

    def _preadv(self, descriptor: int, path: str, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            return os.preadv(descriptor, buffers, offset)
        except OSError as error:
            raise self._refused(path, error, offset) from error

    def _short(self, path: str, found: int, wanted: int, tensor: str | None) -> CorruptionError:
        name = os.path.basename(path)
        what = "" if tensor is None else f" while reading {tensor!r}"
        return CorruptionError(
            f"{name} ends at byte {found}{what}, expected {wanted} or more",
            file=name,
            tensor=tensor,
            step=self.step,
            path=path,
            phase=self.phase,
            hint=HINT,
        )

    def _refused(self, path: str, error: OSError, offset: int | None = None) -> StorageError:
        where = "" if offset is None else f" at byte {offset}"
        return StorageError(
            f"{os.path.basename(path)} can't be read{where}: {error.strerror or error}",
            step=self.step,
            path=path,
            phase=self.phase,
            errno=error.errno,
            hint="check the disk or the mount; the checkpoint itself may be whole",
        )
