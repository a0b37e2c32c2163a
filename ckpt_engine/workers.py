"""The threads and the staging memory that saves share: made once, used by one save after the other.

Promises: no more memory than the budget that :mod:`ckpt_engine.staging.guard` grants; the limits are looked at again
before each save (:meth:`Workers.fit`); threads are those of ``ThreadPoolExecutor``, so that work submitted before the
interpreter exits still runs to its end.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os

from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import MemoryBudgetError
from ckpt_engine.staging.guard import decide_budget, local_rank_count
from ckpt_engine.staging.pool import ExtentPool, choose_geometry
from ckpt_engine.storage.writer import WriteQueue

log = logging.getLogger("ckpt_engine")


class Workers:
    """Copy threads, writer threads and the pool of extents.

    Attributes:
        pool, copiers, writers: see above.
        geometry: sizes in use.

    Raises:
        MemoryBudgetError: the staging budget is below what the engine can work with.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        budget = decide_budget(config.staging_budget, local_ranks=local_rank_count(os.environ))
        log.info("%s", budget.explain())
        self.geometry = choose_geometry(budget.granted, config.extent_bytes, config.writers)
        self.pool = ExtentPool(self.geometry.extent_bytes, budget.granted, populate=config.populate)
        self.copy_threads = config.copy_threads or min(4, os.cpu_count() or 1)
        self.copiers = concurrent.futures.ThreadPoolExecutor(self.copy_threads, "ckpt-copy")
        self.writers = concurrent.futures.ThreadPoolExecutor(self.geometry.writers, "ckpt-write")
        self._pumps: set[concurrent.futures.Future[None]] = set()

    def fit(self) -> None:
        """Looks at the limits again: another process may have grown since, or gone."""
        try:
            decision = decide_budget(
                self.config.staging_budget,
                local_ranks=local_rank_count(os.environ),
                already_held=self.pool.stats().mapped,
            )
            granted = decision.granted
        except MemoryBudgetError as error:
            log.warning("saving with the smallest staging budget: %s", error)
            granted = 0
        self.pool.resize(max(granted, 2 * self.geometry.extent_bytes))

    def write(self, queue: WriteQueue) -> None:
        """Has all writer threads work on a save, from its first extent to its last."""
        self._pumps = {pump for pump in self._pumps if not pump.done()}
        for _ in range(self.geometry.writers):
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
