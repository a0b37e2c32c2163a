"""How fast this machine's device takes bytes, measured with plain system calls and none of the engine's code.

Two threads write two files of their own in 16 MiB pieces past the page cache, then fsync: the best that a checkpoint of
that size could do here. Where the file system refuses O_DIRECT the figure is of buffered writes, and says so.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import pathlib
import threading
import time

_PIECE = 16 << 20
_WRITERS = 2


@dataclasses.dataclass(frozen=True)
class DeviceSpeed:
    gb_per_second: float
    how: str


def raw_write_speed(folder: pathlib.Path, size: int, *, rounds: int = 3) -> DeviceSpeed:
    """The fastest of a few rounds of writing about ``size`` bytes (64 MB to 1 GB) below ``folder``."""
    pieces = max(2, min(max(size, 64 << 20), 1 << 30) // _PIECE // _WRITERS)
    direct = getattr(os, "O_DIRECT", 0)
    try:
        best = max(_one_round(folder, pieces, direct) for _ in range(rounds))
    except OSError:
        if not direct:
            raise
        direct = 0
        best = max(_one_round(folder, pieces, direct) for _ in range(rounds))
    how = "O_DIRECT" if direct else "buffered (O_DIRECT refused here)"
    return DeviceSpeed(best, f"{_WRITERS} threads, {how}, fsync (best of {rounds})")


def _one_round(folder: pathlib.Path, pieces: int, direct: int) -> float:
    paths = [folder / f".speed-{number}" for number in range(_WRITERS)]
    buffers = [mmap.mmap(-1, _PIECE) for _ in paths]
    failures: list[OSError] = []

    def write(path: pathlib.Path, buffer: mmap.mmap) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | direct, 0o600)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(descriptor, 0, pieces * _PIECE)
                for number in range(pieces):
                    if os.pwrite(descriptor, buffer, number * _PIECE) != _PIECE:
                        raise OSError(f"short write to {path}")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            failures.append(error)

    try:
        for buffer in buffers:
            buffer.write(os.urandom(1 << 20) * (_PIECE >> 20))
        threads = [threading.Thread(target=write, args=pair) for pair in zip(paths, buffers, strict=True)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
        if failures:
            raise failures[0]
        return _WRITERS * pieces * _PIECE / seconds / 1e9
    finally:
        for buffer in buffers:
            buffer.close()
        for path in paths:
            path.unlink(missing_ok=True)
