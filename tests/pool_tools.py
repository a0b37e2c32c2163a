"""What the tests of the staging pool share: a look at this process's memory, a waiting thread, a refusing system."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_engine.staging.pool import Extent, ExtentPool

SOON = 20.0  # deadline of waits that are expected to end at once; generous, since machines stall


def rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise LookupError("no VmRSS in /proc/self/status")


def map_at(address: int) -> dict[str, str] | None:
    """The fields of /proc/self/smaps for the map that holds an address."""
    found: dict[str, str] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            if found is not None:
                return found
            low, high = (int(part, 16) for part in head.split("-"))
            found = {} if low <= address < high else None
        elif found is not None:
            found[head.rstrip(":")] = rest.strip()
    return found


def fill(extent: Extent) -> None:
    ctypes.memset(extent.address, 0x5A, extent.nbytes)


def take(pool: ExtentPool) -> Extent:
    extent = pool.acquire(timeout=SOON)
    assert extent is not None
    return extent


class Waiter(threading.Thread):
    """An acquire() in a thread of its own."""

    def __init__(self, pool: ExtentPool, **options: Any) -> None:
        super().__init__(daemon=True)
        self._pool, self._options = pool, options
        self.got: Extent | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.got = self._pool.acquire(**self._options)
        except BaseException as error:
            self.error = error

    def is_stuck_for(self, seconds: float) -> bool:
        self.join(seconds)
        return self.is_alive()

    def finish(self) -> Extent | None:
        self.join(SOON)
        assert not self.is_alive(), "acquire() didn't come back"
        if self.error is not None:
            raise self.error
        return self.got


class Refusing:
    """Stands in for mmap.mmap: lets ``allow`` maps through, then fails like a system without memory."""

    def __init__(self, allow: int, make_error: Callable[[], BaseException]) -> None:
        self.allow, self.make_error, self.calls = allow, make_error, 0
        self._real = mmap.mmap

    def __call__(self, *args: Any, **kwargs: Any) -> mmap.mmap:
        self.calls += 1
        if self.allow <= 0:
            raise self.make_error()
        self.allow -= 1
        return self._real(*args, **kwargs)
