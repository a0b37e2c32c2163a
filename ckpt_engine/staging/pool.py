"""The staging pool: page-aligned host memory in extents, mapped and unmapped by the engine itself.

What it holds: anonymous private maps, one for each extent, made when they are first needed. An extent is idle (in the
pool) or in use (with whoever acquired it).

What it promises: never more than the budget is mapped; :meth:`ExtentPool.acquire` waits until one comes back instead of
growing; a system that refuses memory makes the pool smaller and is an error only if nothing is left; with a gauge
(:mod:`ckpt_engine.staging.pressure`), which is asked whenever an extent changes hands, the pool gives memory back while
it is in use, down to :data:`FLOOR_EXTENTS` extents, and grows again; what is trimmed, shrunk or closed goes back to the
system at once, because it never was in an allocator's arena. The maps are kept out of core dumps and out of forked
children: a fork while O_DIRECT reads from private memory can corrupt what is written, and children of the data loader
would pay for the copies.

What it does not do: it doesn't choose the budget (:mod:`ckpt_engine.staging.guard` does), doesn't clear memory between
uses, and doesn't know what the bytes mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from ckpt_engine.errors import ConfigError, EngineClosedError, MemoryBudgetError
from ckpt_engine.staging.geometry import FLOOR_EXTENTS
from ckpt_engine.staging.geometry import Geometry as Geometry
from ckpt_engine.staging.geometry import choose_geometry as choose_geometry

log = logging.getLogger("ckpt_engine")

_PAGE = mmap.PAGESIZE
_MADV_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it

_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise  # unlike mmap.madvise this gives the GIL up, and populating 16 MiB takes about 10 ms
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


@dataclasses.dataclass(slots=True, eq=False)
class Extent:
    """One piece of staging memory.

    Attributes:
        view: the writable bytes. Replaced when the extent is unmapped, so that a use after that raises.
        address: where they start, on a page.
        nbytes: how many there are.
        index: number of the map, counted from 0 and never used twice in one pool.
        touched: its pages are there. Set by whoever fills it; until then the system doesn't count them as used.
    """

    view: memoryview
    address: int
    nbytes: int
    index: int
    touched: bool = False


class Gauge(Protocol):
    """Tells how much a pool may hold at this moment."""

    def due(self) -> bool: ...

    def look(self, *, mapped: int, resident: int, extent_bytes: int, floor: int) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool holds at one moment, in bytes unless it says otherwise.

    Attributes:
        budget: the most that may be mapped.
        mapped: what is mapped, idle or in use (extents that are being mapped or unmapped right now included);
            ``resident``: those that have been touched.
        in_use: what is acquired and not released.
        peak_in_use: the most that ``in_use`` has been.
        extents_mapped: ``mapped`` as a number of extents.
        waits: number of calls of ``acquire`` that had to wait.
        wait_seconds: time that those spent waiting, in total.
        refused: number of times that the system refused memory.
    """

    budget: int
    mapped: int
    resident: int
    in_use: int
    peak_in_use: int
    extents_mapped: int
    waits: int
    wait_seconds: float
    refused: int


class ExtentPool:
    """Extents of one size within a budget. All methods may be called from any thread.

    Args:
        extent_bytes: size of an extent, a multiple of the page size.
        budget: the most bytes that may be mapped at once.
        populate: map and touch everything now, and every extent that is mapped later, so that no copy pays for page
            faults. If the system refuses some of it the pool starts with what it got.
        gauge: asked for a new budget from time to time.

    Raises:
        MemoryBudgetError: the budget doesn't hold one extent, or populating got not even one.
        ConfigError: ``extent_bytes`` isn't whole pages.
    """

    def __init__(self, extent_bytes: int, budget: int, *, populate: bool = False, gauge: Gauge | None = None) -> None:
        if extent_bytes <= 0 or extent_bytes % _PAGE:
            raise ConfigError(f"extent_bytes is {extent_bytes}, expected a multiple of {_PAGE}", phase="config")
        self._extent_bytes = extent_bytes
        self._budget = budget
        self._allowed = self._extents_in(budget)
        self._populate = populate
        self._gauge = gauge
        self._looking = threading.Lock()
        self._changed = threading.Condition()
        self._idle: list[Extent] = []  # the last one released is the next to go out: its pages are in the CPU's caches
        self._in_use: dict[int, Extent] = {}
        self._slots = 0  # extents that exist, plus those that are being mapped or unmapped outside the lock
        self._next_index = 0
        self._wakes = 0
        self._closed = False
        self._peak = 0
        self._waits = 0
        self._wait_seconds = 0.0
        self._refused = 0
        self._refusal: tuple[int, str] = (0, "")
        _pools.add(self)
        if populate and self.reserve(self._allowed) == 0:
            raise self._nothing_left()

    @property
    def extent_bytes(self) -> int:
        """Size of an extent."""
        return self._extent_bytes

    def acquire(
        self,
        *,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        taken: Callable[[Extent], None] | None = None,
    ) -> Extent | None:
        """Takes an extent, waiting for one to be released if the budget is in use.

        Args:
            timeout: seconds to wait, or ``None`` for no deadline.
            cancelled: asked before each attempt and after each :meth:`wake`, without any lock of the pool held.
            taken: told of the extent as soon as it is in use, so that an interrupt on the way back to the caller loses none.

        Returns:
            The extent, with arbitrary contents, or ``None`` once ``cancelled()`` is true.

        Raises:
            TimeoutError: nothing came back in time.
            MemoryBudgetError: the system refuses memory and the pool has no extent at all to wait for.
            EngineClosedError: the pool is closed.
        """
        self.look()
        deadline = None if timeout is None else time.monotonic() + timeout
        waited_from: float | None = None
        may_map = True
        try:
            while True:
                seen = self._wakes  # before cancelled(): a wake() between that call and the wait must not be missed
                if cancelled is not None and cancelled():
                    return None
                with self._changed:
                    self._refuse_if_closed()
                    if self._idle:
                        return self._hand_out(None, taken)
                    mapping = may_map and self._slots < self._allowed
                    if mapping:
                        self._slots += 1
                    elif not may_map and self._slots == 0:
                        raise self._nothing_left()
                    elif self._wakes == seen:
                        if waited_from is None:
                            waited_from = time.monotonic()
                            self._waits += 1
                        self._wait(deadline, timeout)
                        may_map = True
                if mapping:
                    extent = self._map_reserved()
                    if extent is None:
                        may_map = False  # until something changes: asking again at once would only spin
                        continue
                    with self._changed:
                        if not self._closed:
                            return self._hand_out(extent, taken)
                    self._unmap([extent])
        finally:
            if waited_from is not None:
                with self._changed:
                    self._wait_seconds += time.monotonic() - waited_from

    def release(self, extent: Extent) -> None:
        """Gives an extent back. Its bytes may be overwritten or unmapped from now on.

        Raises:
            ValueError: the extent isn't in use in this pool, so it was released twice or belongs to another one.
        """
        with self._changed:
            if self._in_use.get(extent.index) is not extent:
                # Not ignored: an extent that is idle twice goes to two users, and one's bytes land in the other's file.
                raise ValueError(f"extent {extent.index} isn't in use in this pool: released twice, or of another pool")
            del self._in_use[extent.index]
            extent.touched = True
            surplus = self._closed or self._slots > self._allowed
            if not surplus:
                self._idle.append(extent)
                self._changed.notify_all()
        if surplus:
            self._unmap([extent])
        self.look()

    def look(self, *, now: bool = False) -> None:
        """Follows the gauge, if it is time to ask it, or ``now``."""
        if self._gauge is None or self._closed or not (now or self._gauge.due()):
            return
        if not self._looking.acquire(blocking=now):
            return  # another thread is at it
        try:
            stats = self.stats()
            floor = FLOOR_EXTENTS * self._extent_bytes
            budget = self._gauge.look(
                mapped=stats.mapped, resident=stats.resident, extent_bytes=self._extent_bytes, floor=floor
            )
            if budget != self._budget:
                self.resize(budget)
        finally:
            self._looking.release()

    def reserve(self, count: int) -> int:
        """Maps extents until there are ``count``, in use and idle together. Returns how many there are; fewer if refused."""
        while True:
            with self._changed:
                self._refuse_if_closed()
                if self._slots >= count:
                    return self._slots
                self._slots += 1
            extent = self._map_reserved()
            with self._changed:
                if extent is None:
                    return self._slots
                if not self._closed:
                    self._idle.append(extent)
                    self._changed.notify_all()
                    continue
            self._unmap([extent])

    def wake(self) -> None:
        """Makes every waiting ``acquire`` ask ``cancelled()`` again."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def resize(self, budget: int) -> None:
        """Sets a new budget. Idle extents beyond it are unmapped now, those in use when they are released.

        Raises:
            MemoryBudgetError: it doesn't hold one extent; the budget stays as it was.
        """
        allowed = self._extents_in(budget)
        with self._changed:
            self._budget, self._allowed = budget, allowed
            surplus = max(self._slots - allowed, 0)
            keep = max(len(self._idle) - surplus, 0)
            cold = len(self._idle) - keep
            leaving, self._idle = self._idle[:cold], self._idle[cold:]
            self._wakes += 1
            self._changed.notify_all()
        self._unmap(leaving)

    def trim(self) -> int:
        """Unmaps all idle extents. Returns the bytes given back to the system."""
        with self._changed:
            leaving, self._idle = self._idle, []
        size = len(leaving) * self._extent_bytes
        self._unmap(leaving)
        return size

    def close(self) -> None:
        """Unmaps the idle extents; those in use follow when they are released. Waits for nothing. Idempotent."""
        with self._changed:
            self._closed = True
            self._wakes += 1
            self._changed.notify_all()
        self.trim()

    def stats(self) -> PoolStats:
        """What the pool holds now."""
        with self._changed:
            return PoolStats(
                budget=self._budget,
                mapped=self._slots * self._extent_bytes,
                resident=sum(e.touched for e in (*self._idle, *self._in_use.values())) * self._extent_bytes,
                in_use=len(self._in_use) * self._extent_bytes,
                peak_in_use=self._peak * self._extent_bytes,
                extents_mapped=self._slots,
                waits=self._waits,
                wait_seconds=self._wait_seconds,
                refused=self._refused,
            )

    # Called with the lock held ----------------------------------------------------------------------------------------

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineClosedError("the staging pool is closed", phase="stage", hint="make a new engine")

    def _hand_out(self, extent: Extent | None, taken: Callable[[Extent], None] | None) -> Extent:
        """A fresh extent, or an idle one: taken from the idle ones here, next to where it counts as in use."""
        if extent is None:
            extent = self._idle.pop()
        self._in_use[extent.index] = extent
        if taken is not None:
            taken(extent)
        self._peak = max(self._peak, len(self._in_use))
        return extent

    def _wait(self, deadline: float | None, timeout: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError(
                f"no extent of {self._extent_bytes} bytes came back within {timeout:g} s: {len(self._in_use)} in use, "
                f"{self._slots} mapped, {self._allowed} allowed"
            )
        # Long waits are cut up: a wait beyond threading.TIMEOUT_MAX raises OverflowError.
        self._changed.wait(None if left is None else min(left, 3600.0))

    def _nothing_left(self) -> MemoryBudgetError:
        code, reason = self._refusal
        return MemoryBudgetError(
            f"the system refused the first {self._extent_bytes} bytes of staging memory: {reason}",
            phase="stage",
            errno=code,
            hint="free host memory, or look at the container limit, RLIMIT_AS, vm.overcommit_memory, vm.max_map_count",
        )

    # Called without it ------------------------------------------------------------------------------------------------

    def _extents_in(self, budget: int) -> int:
        if budget < self._extent_bytes:
            raise MemoryBudgetError(
                f"the staging budget is {budget} bytes, expected at least one extent of {self._extent_bytes} bytes",
                phase="stage",
                hint="raise staging_budget, or use smaller extents",
            )
        return budget // self._extent_bytes

    def _map_reserved(self) -> Extent | None:
        """Maps one extent into a slot that the caller has reserved. ``None``, and no slot, if the system refuses."""
        try:
            view, address = _map(self._extent_bytes, populate=self._populate)
        except BaseException as error:
            refused = isinstance(error, (OSError, MemoryError))
            with self._changed:
                self._slots -= 1
                if refused:
                    self._refused += 1
                    # Not the error itself, here or in the log: whoever keeps it keeps its frames, and so the pool.
                    code = getattr(error, "errno", None) or errno.ENOMEM
                    self._refusal = (code, os.strerror(code))
                if self._slots == 0 or not refused:
                    # Only then is there news for other waiters. Telling them of every refusal would have two of them
                    # wake each other for ever, each to be refused again.
                    self._changed.notify_all()
                first, have, reason = self._refused == 1, self._slots, self._refusal[1]
            if not refused:
                raise
            if first and have:
                log.warning(
                    "the system refused %d more bytes of staging memory (%s); going on with the %d bytes there are",
                    self._extent_bytes,
                    reason,
                    have * self._extent_bytes,
                )
            return None
        with self._changed:
            index = self._next_index
            self._next_index += 1
        return Extent(view, address, self._extent_bytes, index, touched=self._populate)

    def _unmap(self, extents: list[Extent]) -> None:
        """Unmaps extents that are neither idle nor in use any more, and frees their slots."""
        if not extents:
            return
        for extent in extents:
            _unmap(extent)
        with self._changed:
            self._slots -= len(extents)
            self._changed.notify_all()

    def _forget_in_child(self) -> None:
        """In a forked child: the maps aren't there, and nothing may unmap addresses that others may use by now."""
        for extent in (*self._idle, *self._in_use.values()):
            # A reference that nobody gives back: a list of the module would be cleared at the interpreter's exit.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(extent.view))
        self._changed = threading.Condition()  # a thread that doesn't exist here may have held the old one
        self._looking = threading.Lock()
        self._idle, self._in_use, self._slots = [], {}, 0
        self._closed = True


def _map(size: int, *, populate: bool) -> tuple[memoryview, int]:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        for name in ("MADV_DONTFORK", "MADV_DONTDUMP", "MADV_HUGEPAGE"):
            advice = getattr(mmap, name, None)
            if advice is None:
                continue
            try:
                mapping.madvise(advice)
            except OSError as error:
                if error.errno == errno.ENOMEM:  # too many maps: as good as a refused one
                    raise
                log.debug("%s isn't supported here: %s", name, str(error))
        # The ctypes object exports the buffer, and an exported map can't be closed: it lives for this line only.
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if populate:
            _touch(mapping, address, size)
        return memoryview(mapping), address
    except BaseException:
        mapping.close()
        raise


def _touch(mapping: mmap.mmap, address: int, size: int) -> None:
    if _madvise(address, size, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    for offset in range(0, size, _PAGE):  # a kernel before 5.14
        mapping[offset] = 0


def _unmap(extent: Extent) -> None:
    # The pages go back now. The addresses are unmapped with the last reference to the view, which as a rule is the one
    # dropped here. mmap.close() would be wrong: torch.frombuffer() keeps a reference but no buffer export, so the map
    # would be closed under a tensor that lives on, in the frames of a kept traceback for instance, and the next look at
    # that tensor would end the process.
    if _madvise(extent.address, extent.nbytes, _MADV_DONTNEED) != 0:
        log.debug("MADV_DONTNEED: %s", os.strerror(ctypes.get_errno()))  # locked pages; unmapping frees those too
    extent.view = _GONE


#: View of an extent that is no more. Every use of it raises ValueError.
_GONE = memoryview(b"")
_GONE.release()


#: Every live pool, for the one hook below.
_pools: weakref.WeakSet[ExtentPool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Somebody else's fork; this package makes none. The extents are MADV_DONTFORK, so the child has holes where they
    # were, and its own memory may come to lie there: an unmap, by close() at exit or by the garbage collector, would
    # hit that.
    for pool in list(_pools):
        with contextlib.suppress(Exception):
            pool._forget_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
