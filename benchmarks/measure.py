"""How things are measured: memory, page cache, CPU of a plain copy, and what a compute loop feels of a save.

Each tool measures this process only, and says what it can't see:

* :class:`RssSampler` looks every few milliseconds, so a shorter peak is missed.
* :func:`cached_bytes` asks the kernel which pages of a file are in memory; it works on files of this user only.
* :func:`plain_copy` is the cheapest staging copy there is: one thread, ``memcpy`` into memory that is already mapped.
* :class:`ComputeLoop` is a trainer that never waits: the same Python and small matrix products over and over.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_PAGE = mmap.PAGESIZE
_MAP_FAILED = ctypes.c_void_p(-1).value


# -- memory ----------------------------------------------------------------------------------------------------------


class RssSampler:
    """Peak of this process's resident memory above what it was at entry. A context manager.

    Attributes:
        extra: peak minus baseline, in bytes; never negative.
        cpu_seconds: what the sampling itself cost, to be taken off the process's CPU time.
    """

    def __init__(self, interval: float = 0.005) -> None:
        self.extra = 0
        self.cpu_seconds = 0.0
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rss-sampler", daemon=True)
        self._fd = -1
        self._baseline = 0
        self._peak = 0

    def __enter__(self) -> RssSampler:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._baseline = self._peak = self._resident()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, self._resident())
        os.close(self._fd)
        self.extra = self._peak - self._baseline

    def _resident(self) -> int:
        return int(os.pread(self._fd, 200, 0).split()[1]) * _PAGE

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._peak = max(self._peak, self._resident())
        self.cpu_seconds = time.thread_time()


def machine_cpu_seconds() -> float:
    """CPU seconds of the whole machine since it started, kernel threads included, in steps of some milliseconds.

    What it grows by beyond this process's own CPU time is what others took: the noise in a measurement. 0.0 where the
    kernel doesn't tell.
    """
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in file.readline().split()[1:8])
    except (OSError, ValueError):
        return 0.0
    return float(user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def settle(pause: float) -> None:
    """Brings the process and the disk to rest: garbage freed and given back, everything written back, then a pause.

    Without the give-back a peer would find the heap of the one before it and look smaller than it is.
    """
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
    os.sync()
    time.sleep(pause)


# -- page cache ------------------------------------------------------------------------------------------------------


def files_under(root: str) -> Iterator[str]:
    """Regular files below ``root``."""
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            if os.path.isfile(path) and not os.path.islink(path):
                yield path


def cached_bytes(path: str) -> int:
    """Bytes of the file that are in the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return 0
        # Through ctypes, since Python's mmap object keeps its address to itself. Mapping reads nothing.
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap", path)
        try:
            pages = (ctypes.c_ubyte * -(-size // _PAGE))()
            if _libc.mincore(address, size, ctypes.byref(pages)) != 0:
                raise OSError(ctypes.get_errno(), "mincore", path)
        finally:
            _libc.munmap(address, size)
        flags = bytes(pages)
        return min(size, sum(flags.count(value) for value in range(1, 256, 2)) * _PAGE)
    finally:
        os.close(fd)


def drop_cache(paths: Iterable[str]) -> None:
    """Puts the files' pages on the disk and out of memory, so that the next peer starts with the same room."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


# -- the plain copy --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cost:
    """Wall-clock and CPU seconds."""

    seconds: float
    cpu_seconds: float


def plain_copy(tensors: Iterable[torch.Tensor], room: int) -> Cost:
    """Copies all bytes once with ``memcpy``, on one thread, into ``room`` bytes of mapped memory used over and over."""
    sources = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    total = sum(nbytes for _, nbytes in sources)
    target = mmap.mmap(-1, max(_PAGE, min(total, room)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            target.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages
    size = len(target)
    anchor = ctypes.c_char.from_buffer(target)
    base = ctypes.addressof(anchor)
    ctypes.memset(base, 1, size)
    at = 0
    wall, cpu = time.perf_counter(), time.thread_time()
    for address, nbytes in sources:
        while nbytes:
            part = min(nbytes, size - at)
            ctypes.memmove(base + at, address, part)
            address, nbytes, at = address + part, nbytes - part, (at + part) % size
    cost = Cost(time.perf_counter() - wall, time.thread_time() - cpu)
    del anchor  # an exported buffer would keep the mapping open
    target.close()
    return cost


# -- the compute loop ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LoopRun:
    """What the loop felt.

    Attributes:
        turns, seconds: how long it ran.
        alone: seconds of an average turn with nothing else going on, measured right before.
        alone_hiccup: how much longer the longest turn took even then: the machine's own noise.
        slowdown: of the average turn; 1.0 = none.
        hiccup: how much longer than ``alone`` the longest turn took.
    """

    turns: int
    seconds: float
    alone: float
    alone_hiccup: float
    slowdown: float
    hiccup: float


class ComputeLoop:
    """A fixed piece of work on the calling thread, half Python and half matrix products, about 1 ms a turn.

    The products are so small since BLAS libraries spread larger ones over all cores: the loop would then fight with the
    save for the last core, which no trainer with an accelerator does.
    """

    def __init__(self) -> None:
        self._matrix = torch.rand(16, 16)
        self._alone: list[float] = []

    def calibrate(self, seconds: float = 0.3) -> None:
        """Runs alone. To be called right before what :meth:`run_until` is to be compared with: machines drift."""
        for _ in range(20):
            self._turn()
        deadline = time.perf_counter() + seconds
        self._alone = self._timed(lambda: time.perf_counter() > deadline)

    def run_until(self, done: Callable[[], bool]) -> LoopRun:
        """Works until ``done()``, one turn at least."""
        turns = self._timed(done)
        alone, seconds = statistics.mean(self._alone), sum(turns)
        return LoopRun(
            turns=len(turns),
            seconds=seconds,
            alone=alone,
            alone_hiccup=max(self._alone) - alone,
            slowdown=seconds / len(turns) / alone,
            hiccup=max(0.0, max(turns) - alone),
        )

    def _turn(self) -> int:
        total = 0
        for number in range(8_000):
            total += number & 7
        product = self._matrix
        for _ in range(100):
            product = torch.mm(product, self._matrix)
            product = product / product.sum()
        return total

    def _timed(self, done: Callable[[], bool]) -> list[float]:
        turns: list[float] = []
        before = time.perf_counter()
        while True:
            self._turn()
            now = time.perf_counter()
            turns.append(now - before)
            before = now
            if done():
                return turns
