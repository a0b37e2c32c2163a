"""The threads and the staging memory that saves share: made once, used by one save after the other.

Promises: no more memory than the budget that :mod:`ckpt_engine.staging.guard` grants. The limits are looked at again
before each save (:meth:`Workers.fit`) and while extents change hands; a budget that has become too small for the extents is
cut into smaller ones for the saves to come, and back on relief. A system that refuses memory or threads is an error only
below two extents of 1 MiB, one copy thread and one writer thread, and then before the first byte. Threads are those of
``ThreadPoolExecutor``, so that work submitted before the interpreter exits still runs to its end.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import time

from ckpt_engine.config import MIN_BUDGET_BYTES, MIN_EXTENT_BYTES, EngineConfig
from ckpt_engine.errors import MemoryBudgetError
from ckpt_engine.results import MemoryReport
from ckpt_engine.staging.geometry import FLOOR_EXTENTS, Geometry, choose_geometry
from ckpt_engine.staging.guard import local_rank_count, stack_bytes
from ckpt_engine.staging.pool import ExtentPool
from ckpt_engine.staging.pressure import PressureGauge
from ckpt_engine.storage.writer import WriteQueue
from ckpt_engine.threads import Crew

log = logging.getLogger("ckpt_engine")

#: Part of a limit on address space or committed memory that may go into the stacks of the engine's threads.
_STACKS_SHARE = 1 / 4

#: Threads of the engine that are started by others: committer, store client.
_OTHER_THREADS = 2

#: Larger extents come back only when the budget has this much more than they need, so that it doesn't go to and fro.
_REGROW_SHARE = 0.75


#: So long after a refused map no larger extents are tried.
_REFUSED_SECONDS = 30.0


class Workers:
    """Copy threads, writer threads and the pool of extents.

    Args:
        config: settings.
        local_ranks: ranks on this node, as far as the caller knows. ``LOCAL_WORLD_SIZE`` counts if it is larger.
        gauge: instead of one made from the two.

    Attributes:
        copiers, writers: see above. :meth:`fit` may replace pool and geometry; a save keeps those that it began with.

    Raises:
        MemoryBudgetError: the staging budget is below what the engine can work with, or no thread can be started.
    """

    def __init__(
        self, config: EngineConfig, *, local_ranks: int | None = None, gauge: PressureGauge | None = None
    ) -> None:
        self.config = config
        ranks = max(local_rank_count(os.environ), local_ranks or 1)
        self.gauge = gauge if gauge is not None else PressureGauge(config.staging_budget, local_ranks=ranks)
        self.copy_threads, self._writer_threads = self._affordable_threads()
        self.copiers = Crew(self.copy_threads, "ckpt-copy")
        self.writers = Crew(config.writers, "ckpt-write")
        self._pumps: set[concurrent.futures.Future[None]] = set()
        self._peak = 0
        self._refused_at = -_REFUSED_SECONDS
        self.gauge.stacks = (self.copy_threads + self._writer_threads + _OTHER_THREADS) * stack_bytes()
        decision = self.gauge.weigh()
        decision.check()
        decision.warn_if_cut()
        log.info("%s", decision.explain())
        geometry = choose_geometry(decision.granted, config.extent_bytes, config.writers)
        # One object, replaced in one step: an interrupt between two would leave extents of one size with a pool of another.
        self._cut = geometry, self._make_pool(geometry, decision.granted)
        try:
            # With little address space it is held while the threads start: glibc takes 64 MiB of it for the malloc of each
            # thread if it can get them, and does without if it can't.
            scarce = not config.populate and any(limit.name == "RLIMIT_AS" for limit in decision.limits)
            if scarce:
                self.pool.reserve(self.geometry.extents)
            self._start_threads()
            if scarce:
                self.pool.trim()
        except BaseException:
            self.close()
            raise
        self.gauge.stacks = _OTHER_THREADS * stack_bytes()

    @property
    def geometry(self) -> Geometry:
        """How the budget is cut up for the next save."""
        return self._cut[0]

    @property
    def pool(self) -> ExtentPool:
        """The extents of the next save."""
        return self._cut[1]

    def _affordable_threads(self) -> tuple[int, int]:
        copiers, writers = self.config.copy_threads or min(4, os.cpu_count() or 1), self.config.writers
        rooms = [limit.room for limit in self.gauge.weigh().limits if limit.promised]
        if rooms:
            most = int(min(rooms) * _STACKS_SHARE) // stack_bytes()
            while copiers + writers > max(most, 2):
                copiers, writers = (copiers - 1, writers) if copiers > writers else (copiers, writers - 1)
        return copiers, writers

    def _start_threads(self) -> None:
        self.copiers.start(1)
        self.writers.start(1)  # before the second of the others: one of each is enough
        self.copiers.start(self.copy_threads)
        self.writers.start(self._writer_threads)

    def _make_pool(self, geometry: Geometry, budget: int) -> ExtentPool:
        size = geometry.extent_bytes
        if self.config.populate:
            try:
                return ExtentPool(size, budget, populate=True, gauge=self.gauge)
            except MemoryBudgetError as error:
                log.warning("the staging pool can't be populated: %s", error)
        return ExtentPool(size, budget, gauge=self.gauge)

    def fit(self) -> None:
        """Looks at the limits again: another process may have grown since, or gone. Call it before each save.

        Raises:
            MemoryBudgetError: there is no memory for two extents of 1 MiB, or no thread. Nothing was written, and the next
                call looks again.
        """
        self._start_threads()
        idle = self.pool.stats().in_use == 0  # extents of a save on its way are of the old size
        if idle:
            self._follow()
        self.pool.look(now=True)
        if idle:
            self._secure()

    def _follow(self) -> None:
        """Cuts the budget anew if it has become too small for the extents, or large enough for larger ones."""
        stats = self.pool.stats()
        decision = self.gauge.weigh(mapped=stats.mapped, resident=stats.resident)
        if decision.granted < MIN_BUDGET_BYTES and stats.extents_mapped < FLOOR_EXTENTS:
            decision.check()
        now, config = self.geometry, self.config

        def cut(budget: float) -> Geometry:
            return choose_geometry(max(int(budget), MIN_BUDGET_BYTES), config.extent_bytes, config.writers)

        wanted = cut(decision.granted)
        if (wanted.extent_bytes, wanted.writers) > (now.extent_bytes, now.writers):
            if not decision.complete:
                wanted = cut(decision.granted * _REGROW_SHARE)
            refused = time.monotonic() - self._refused_at < _REFUSED_SECONDS
            if refused or (wanted.extent_bytes, wanted.writers) <= (now.extent_bytes, now.writers):
                return
        if (wanted.extent_bytes, wanted.writers) != (now.extent_bytes, now.writers):
            self._replace(wanted, max(decision.granted, MIN_BUDGET_BYTES), decision.ruled_by)

    def _secure(self) -> None:
        """Has the floor of memory in hand before the first byte of a save; in smaller extents if the system refuses."""
        while (got := self.pool.reserve(FLOOR_EXTENTS)) < FLOOR_EXTENTS:
            now, budget = self.geometry, self.pool.stats().budget
            if now.extent_bytes <= MIN_EXTENT_BYTES:
                raise MemoryBudgetError(
                    f"the system refuses memory: {got} extents of {now.extent_bytes} bytes could be had, expected at least "
                    f"{FLOOR_EXTENTS}",
                    phase="stage",
                    hint="free host memory, or look at the container limit, RLIMIT_AS, vm.overcommit_memory",
                )
            self._refused_at = time.monotonic()
            half = max(now.extent_bytes // 8192 * 4096, MIN_EXTENT_BYTES)
            smaller = choose_geometry(max(now.extent_bytes, MIN_BUDGET_BYTES), half, now.writers)
            self._replace(smaller, budget, "the system, which refuses more")

    def _replace(self, geometry: Geometry, budget: int, reason: str) -> None:
        old, pool = self._cut
        self._peak = max(self._peak, pool.stats().peak_in_use)
        pool.trim()
        self._cut = geometry, self._make_pool(geometry, max(budget, geometry.extent_bytes))
        pool.close()
        log.info(
            "staging in extents of %d bytes with %d writers from now on, so far %d bytes with %d; ruled by %s",
            *(geometry.extent_bytes, geometry.writers, old.extent_bytes, old.writers, reason),
        )

    def memory(self) -> MemoryReport:
        """What the limits are, and what is held."""
        stats = self.pool.stats()
        decision = self.gauge.weigh(mapped=stats.mapped, resident=stats.resident)
        last = self.gauge.last
        return MemoryReport(
            requested=decision.requested,
            granted=decision.granted,
            ruled_by=decision.ruled_by,
            limits=decision.limits,
            ceiling=stats.budget,
            state=last.state if last is not None else "hold",
            reason=last.reason if last is not None else decision.ruled_by,
            mapped=stats.mapped,
            in_use=stats.in_use,
            peak_in_use=max(self._peak, stats.peak_in_use),
            refused=stats.refused,
            local_ranks=decision.local_ranks,
            extent_bytes=self.geometry.extent_bytes,
            writers=min(self.geometry.writers, self.writers.size),
            threads=self.copiers.size + self.writers.size,
        )

    def write(self, queue: WriteQueue) -> None:
        """Has all writer threads work on a save, from its first extent to its last."""
        self._pumps = {pump for pump in self._pumps if not pump.done()}
        for _ in range(min(self.geometry.writers, self.writers.size)):
            self._pumps.add(self.writers.submit(queue.pump))

    def close(self, timeout: float | None = None) -> bool:
        """Gives threads and memory back.

        Returns:
            ``False`` if writer threads were still in a call to the storage after ``timeout`` seconds; they go when it answers.
        """
        _, stuck = concurrent.futures.wait(self._pumps, timeout)
        self.copiers.shutdown(wait=True)
        self.writers.shutdown(wait=not stuck)
        self.pool.close()
        return not stuck
