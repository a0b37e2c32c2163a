"""Large pickled values lie in an unlinked file next to the checkpoint until they are written, not in memory.

Their pages are file cache, which the kernel writes out and drops when it needs room, and which is gone with the last reference.
Pickling itself is torch's: of what isn't a tensor it makes the whole pickle in memory first.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import tempfile
import weakref
from typing import Any, TypeAlias

log = logging.getLogger("ckpt_engine")

#: A pickled value: bytes-like, with a length.
Pickled: TypeAlias = "bytes | mmap.mmap"

#: Values up to this size stay in memory: nearly all do.
SPOOL_BYTES = 1 << 20


class Spool:
    """A file to pickle into. In memory up to :data:`SPOOL_BYTES`, then in an unlinked file of ``directory``.

    What the file system refuses (no space, no descriptor) costs memory, not the value.

    Args:
        directory: where such a file may be; ``None`` keeps everything in memory.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._memory = io.BytesIO()
        self._fd: int | None = None
        self._size = 0

    def write(self, data: Any) -> int:
        """Appends bytes."""
        view = memoryview(data).cast("B")
        if self._fd is None and self._directory is not None and self._size + len(view) > SPOOL_BYTES:
            self._move_to_file(self._directory)
        if self._fd is not None:
            try:
                _write_all(self._fd, view)
            except OSError as error:
                self._back_to_memory(error)
        if self._fd is None:
            self._memory.write(view)
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing: what is written here is read back by this process only."""

    def take(self) -> Pickled:
        """All of it; the spool is empty afterwards."""
        if self._fd is not None:
            try:
                mapped = mmap.mmap(self._fd, self._size, mmap.MAP_SHARED, mmap.PROT_READ)
                _waiting.add(mapped)
                return mapped
            except OSError as error:
                self._back_to_memory(error)
            finally:
                self.close()
        data, self._memory = self._memory.getvalue(), io.BytesIO()
        return data

    def close(self) -> None:
        """Gives the file up, if there is one. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _move_to_file(self, directory: str) -> None:
        if len(_waiting) >= _MOST_FILES:
            self._directory = None
            return
        try:
            self._fd = _unlinked_file(directory)
            _write_all(self._fd, self._memory.getbuffer())
        except OSError as error:
            log.debug("a large value is kept in memory, no file can be made in %s: %s", directory, str(error))
            self.close()
            self._directory = None
        else:
            self._memory = io.BytesIO()

    def _back_to_memory(self, error: OSError) -> None:
        """Takes back what the file has: ``_size`` bytes of it are whole writes."""
        fd = self._fd
        if fd is None:
            return
        log.debug("a large value goes back into memory: %s", str(error))
        self._memory, at = io.BytesIO(), 0
        while at < self._size and (piece := os.pread(fd, min(self._size - at, 1 << 24), at)):
            self._memory.write(piece)
            at += len(piece)
        self.close()
        self._directory = None


#: Each value in a file holds a descriptor until it is written, and the trainer needs some, too.
_MOST_FILES = 64

_waiting: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _unlinked_file(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError):  # not on every file system, nor on every system
        fd, path = tempfile.mkstemp(prefix=".ckpt-value-", dir=directory)
        os.unlink(path)
        return fd


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
