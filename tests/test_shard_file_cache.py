"""Shard files and the page cache: bounded while writing, gone afterwards (B083)."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.storage import shard_file
from ckpt_engine.storage.shard_file import ShardFile
from tests.shard_tools import MIB, aligned, no_descriptor_left_open, write_all

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with no_descriptor_left_open():
        yield str(tmp_path / "__0_0.distcp")


# -- page cache ------------------------------------------------------------------------------------------------------


def resident(path: str) -> float:
    """Share of a file's pages that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
            pages = -(-size // mmap.PAGESIZE)
            vector = ctypes.create_string_buffer(pages)
            start = ctypes.c_char.from_buffer(memory)
            failed = libc.mincore(ctypes.addressof(start), size, vector)
            del start
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(byte & 1 for byte in vector.raw) / pages


@pytest.mark.parametrize("direct", ["auto", False])
def test_no_page_of_the_file_is_cached_after_finish(direct: Any, path: str, tmp_path: Path) -> None:
    """B083: node memory monitors count the page cache of a save as used memory."""
    size = 64 * MIB + 100
    data = aligned(size)
    plain = str(tmp_path / "plain")
    Path(plain).write_bytes(data[: 8 * MIB])
    assert resident(plain) > 0.9, "the measurement doesn't see cached pages"
    file = ShardFile.create(path, size, direct=direct)
    write_all(file, data, 16 * MIB)
    file.finish()
    share = resident(path)
    assert share < 0.01, f"{share:.1%} of the file is in the page cache"


def dirty_bytes(fd: int) -> int | None:
    """Dirty and under-writeback bytes of a file, from cachestat(2); None where the kernel has no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    everything, answer = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if libc.syscall(ctypes.c_long(451), ctypes.c_int(fd), everything, answer, ctypes.c_uint(0)) != 0:
        return None
    return int(answer[1] + answer[2]) * mmap.PAGESIZE


def test_buffered_writes_of_several_threads_keep_fewer_than_64_mib_dirty(path: str) -> None:
    """B083: dirty pages are bounded while writing, however large the file."""
    data = aligned(16 * MIB)
    file = ShardFile.create(path, 160 * MIB, direct=False)
    with open(path, "rb") as watch:
        if dirty_bytes(watch.fileno()) is None:
            file.abort()
            pytest.skip("this kernel has no cachestat(2)")
        seen, stop = [0], threading.Event()

        def look() -> None:
            while not stop.is_set():
                seen.append(dirty_bytes(watch.fileno()) or 0)
                time.sleep(0.002)

        def write(numbers: range) -> None:
            for number in numbers:
                file.write(data, number * 16 * MIB)

        watcher = threading.Thread(target=look)
        watcher.start()
        writers = [threading.Thread(target=write, args=(range(n, 10, 2),)) for n in range(2)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
        stop.set()
        watcher.join(10)
    file.finish()
    assert 0 < max(seen) < 64 * MIB, f"{max(seen) / MIB:.0f} MiB were dirty at once"
    assert shard_file.WINDOW_BYTES + shard_file.PIECE_BYTES < 64 * MIB
