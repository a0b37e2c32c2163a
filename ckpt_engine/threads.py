"""Threads that are there before a save counts on them.

``ThreadPoolExecutor`` starts its threads when work comes. If the system refuses one, ``submit`` raises *and keeps the
work*: it runs later on another thread, after the caller has taken it for failed, and reads tensors that the trainer has
changed since. And each stack is 8 MiB of address space that nobody has counted.

A :class:`Crew` starts its threads at once. It works with fewer than asked for, tries again when told to, and takes work
without fail once it has one thread.

Work that was submitted before the interpreter exits runs to its end, as with every ``ThreadPoolExecutor``.
"""

from __future__ import annotations

import concurrent.futures
import errno
import logging
import threading

from ckpt_engine.errors import MemoryBudgetError

log = logging.getLogger("ckpt_engine")


class Crew(concurrent.futures.ThreadPoolExecutor):
    """A thread pool whose threads are started by :meth:`start`.

    Args:
        size: the most threads.
        name: prefix of their names.
    """

    def __init__(self, size: int, name: str) -> None:
        super().__init__(size, name)
        self._name = name
        self._told = False
        self._refused = False

    @property
    def size(self) -> int:
        """Threads that there are."""
        return len(self._threads)

    def start(self, wanted: int) -> int:
        """Starts threads until there are ``wanted``, or as many as the system lets. Returns how many there are.

        Raises:
            MemoryBudgetError: there is none, and none can be started.
        """
        if self.size >= wanted:
            return self.size
        hold = threading.Event()
        try:
            # Each of these keeps a thread, so that the next one needs another; on busy threads they wait in line, do nothing.
            # A stock executor that could not start a thread counts one too many as idle afterwards: hence not a fixed number.
            self._refused = False
            while self.size < wanted and not self._refused:
                self.submit(hold.wait)
        finally:
            hold.set()
        if self.size < wanted and not self._told:  # once: every save tries again
            self._told = True
            log.warning("%d of %d threads %s could be started; going on with those", self.size, wanted, self._name)
        return self.size

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except (RuntimeError, MemoryError) as error:
            if not self._threads:
                raise MemoryBudgetError(
                    f"not one thread {self._name} could be started: {error}",
                    phase="stage",
                    errno=errno.EAGAIN,
                    hint="look at RLIMIT_AS, RLIMIT_NPROC, pids.max, vm.overcommit_memory, or free host memory",
                ) from None
            self._refused = True
            log.debug("one more thread %s could not be started: %s", self._name, str(error))
