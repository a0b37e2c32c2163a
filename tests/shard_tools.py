"""What the tests of shard files share: aligned memory, failing calls, and a look at what is left open."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckpt_engine.storage import fs
from ckpt_engine.storage.shard_file import ShardFile

PAGE = 4096
MIB = 1 << 20


def aligned(nbytes: int, seed: int = 0) -> memoryview:
    """Page-aligned memory with content that differs from page to page; zeros after ``nbytes`` up to a whole page."""
    memory = mmap.mmap(-1, max(PAGE, -(-nbytes // PAGE) * PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = os.urandom(PAGE - 8)
    for start in range(0, nbytes, PAGE):
        memory[start : start + PAGE] = (start + seed).to_bytes(8, "little") + page
    memory[nbytes:] = bytes(len(memory) - nbytes)
    return memoryview(memory)


def fail(code: int) -> Callable[..., Any]:
    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return failing


def write_all(file: ShardFile, data: memoryview, extent: int = MIB) -> None:
    for start in range(0, data.nbytes, extent):
        file.write(data[start : start + extent], start)


@contextlib.contextmanager
def no_descriptor_left_open() -> Iterator[None]:
    """Fails if a shard file that was opened inside is still open at the end."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    targets = {fd: target_of(fd) for fd in set(os.listdir("/proc/self/fd")) - before}
    assert not {fd: target for fd, target in targets.items() if target and ".distcp" in target}


def target_of(fd: str) -> str | None:
    """What a descriptor of this process is open on, None if it isn't open."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return None


def takes_direct(directory: Path) -> bool:
    """Whether files in a directory can be opened with O_DIRECT."""
    probe = directory / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | fs.O_DIRECT))
        return True
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
