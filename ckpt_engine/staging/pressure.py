"""How much of its grant the staging pool may use at this moment: the memory guard, asked again while the engine runs.

::

    state    when                                                            the ceiling
    ------   -------------------------------------------------------------   ------------------------------------------
    shrink   a limit leaves less than the ceiling, or tasks stall for memory falls at once, to the floor at the lowest
    hold     anything in between                                             stays
    grow     clearly more room than the ceiling for RELIEF_SECONDS           rises to what the guard grants

What it holds: :class:`PressureGauge`, the last decision, and the ceiling that follows from it.

What it promises: the ceiling is never above what the guard grants, hence never above what the user has set, nor so high
that the tightest limit is left with less than :data:`NEAR_EXTENTS` extents or :data:`NEAR_BYTES` (the floor excepted); more
room never means a lower ceiling; asking costs nothing while the last look is fresh, and looking takes at most
:data:`LOOK_SHARE` of one processor. No thread of its own: the pool asks whenever an extent changes hands.

What it does not do: it maps and unmaps nothing (:mod:`ckpt_engine.staging.pool` does), and between two calls it sees nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

from ckpt_engine.config import MIB, MIN_BUDGET_BYTES
from ckpt_engine.staging.guard import NODE, BudgetDecision, pressure_files, weigh_budget

log = logging.getLogger("ckpt_engine")

State = Literal["shrink", "hold", "grow"]

#: Extents that stay free under the tightest limit: another process can take as much between two looks.
NEAR_EXTENTS = 2

#: ... and bytes, unless they are more than this part of what is left: file pages that are being read count as cache, but can't be
#: dropped before they are there, and one reader's read-ahead is 8 MiB on many disks.
NEAR_BYTES, NEAR_SHARE = 16 * MIB, 1 / 4

#: Seconds between two looks, at least; half of it after one that found pressure ...
LOOK_SECONDS = 0.1

#: ... and so long that looking (about a millisecond of reading small files) takes no more than this part of a processor's time.
LOOK_SHARE = 0.02

#: Seconds without pressure before the ceiling rises: a neighbour that breathes must not make the pool map and unmap all the time.
RELIEF_SECONDS = 1.0

#: Part of the ceiling that has to be gained for it to rise, unless it reaches all that was asked for.
GROW_SHARE = 1 / 8

#: Part of the time that some task waits for memory: from here on there is pressure, and from there on down there is none.
STALLED_HIGH, STALLED_LOW = 0.10, 0.02

#: Seconds over which stalls are measured.
STALL_WINDOW_SECONDS = 0.5

#: The node's stalls may be those of a group at a limit of its own; they count when the node has less than this part left.
NODE_SHORT_SHARE = 0.2

#: Seconds between two log lines, and change of the ceiling that is worth one.
LOG_SECONDS, LOG_SHARE = 10.0, 1 / 4


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """One look at the limits.

    Attributes:
        state: what the ceiling did.
        ceiling: bytes that the pool may hold now.
        reason: the limit, or the stalls, that ruled.
        decision: of the guard.
    """

    state: State
    ceiling: int
    reason: str
    decision: BudgetDecision


class PressureGauge:
    """The ceiling of one rank's pool. Thread-safe.

    Args:
        requested: bytes, or ``"auto"``.
        local_ranks: ranks on this node, each with a pool of its own.
        stacks: address space that threads take that are yet to be started.
        proc, cgroup_root, environ: see :func:`ckpt_engine.staging.guard.weigh_budget`.
        clock: the monotonic one.
        cpu_clock: CPU time of the calling thread; what ``clock`` tells where that isn't the system's.
    """

    def __init__(
        self,
        requested: int | Literal["auto"],
        *,
        local_ranks: int = 1,
        stacks: int = 0,
        proc: str = "/proc",
        cgroup_root: str = "/sys/fs/cgroup",
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] | None = None,
    ) -> None:
        self.requested = requested
        self.local_ranks = max(local_ranks, 1)
        self.stacks = stacks
        self._proc, self._cgroup_root, self._environ, self._clock = proc, cgroup_root, environ, clock
        self._cpu_clock = cpu_clock or (time.thread_time if clock is time.monotonic else clock)
        self._lock = threading.Lock()
        self._stalls = [_Stalls(name, path) for name, path in pressure_files(proc, cgroup_root).items()]
        self._next_look = 0.0
        self._ceiling: int | None = None
        self._pressed_at = -RELIEF_SECONDS  # when there was pressure last
        self._stall_cap: int | None = None
        self._stall_cap_at = 0.0
        self._logged: tuple[float, int] | None = None
        self._weighed: BudgetDecision | None = None
        self.last: Reading | None = None

    def weigh(self, *, mapped: int = 0, resident: int = 0) -> BudgetDecision:
        """What the guard grants now, without any consequence.

        Args:
            mapped, resident: bytes that the pool has mapped, and those of them that have been touched.
        """
        try:
            self._weighed = weigh_budget(
                self.requested,
                local_ranks=self.local_ranks,
                already_held=resident,
                already_mapped=mapped,
                stacks=self.stacks,
                proc=self._proc,
                cgroup_root=self._cgroup_root,
                environ=self._environ,
            )
        except OSError as error:  # no descriptor to read the limits with: the last ones hold
            log.debug("the limits can't be read, those known so far hold: %s", str(error))
            if self._weighed is None:
                reason = "the least that can be worked with, since no limit could be read"
                return BudgetDecision(MIN_BUDGET_BYTES, self.requested, reason, (), self.local_ranks, None)
        return self._weighed

    def due(self) -> bool:
        """Whether the last look is old enough for the next one."""
        return self._clock() >= self._next_look

    def look(self, *, mapped: int, resident: int, extent_bytes: int, floor: int) -> int:
        """Reads the limits; returns the ceiling, which is at least ``floor``.

        Args:
            mapped, resident: bytes that the pool has mapped, and those of them that have been touched.
            extent_bytes: size of the pool's extents.
            floor: bytes that the pool may hold whatever happens.
        """
        with self._lock:
            begin, spent = self._clock(), self._cpu_clock()
            decision = self.weigh(mapped=mapped, resident=resident)
            allowed, reason = decision.granted, decision.ruled_by
            if decision.share is not None:
                near = max(NEAR_EXTENTS * extent_bytes, int(min(NEAR_BYTES, decision.share * NEAR_SHARE)))
                if decision.share - near < allowed:
                    allowed, reason = decision.share - near, decision.limits[0].name
            allowed = max(allowed, floor)
            stalled = self._stalled(decision, begin)
            if stalled is not None:
                self._pressed_at = begin
            cap = self._follow_stalls(stalled is not None, begin, allowed, floor)
            if cap < allowed:
                allowed, reason = cap, stalled or "recent stalls"
            now = allowed if self._ceiling is None else self._ceiling
            complete = decision.complete and allowed == decision.granted  # the last bit of it is worth having, too
            margin = extent_bytes if complete else max(extent_bytes, int(now * GROW_SHARE))
            state: State = "hold"
            if allowed < now:
                state, self._pressed_at = "shrink", begin
            elif allowed >= now + margin and begin - self._pressed_at >= RELIEF_SECONDS:
                state = "grow"
            ceiling = now if state == "hold" else allowed
            self._ceiling = ceiling = max(ceiling, floor)
            self.last = Reading(state, ceiling, reason, decision)
            end = self._clock()
            pause = LOOK_SECONDS / 2 if state == "shrink" else LOOK_SECONDS
            # CPU time: on a busy machine a look of 0.3 ms waits 20 ms for the GIL, and the next one would be a second away,
            # while a neighbour grows.
            self._next_look = end + max(pause, (self._cpu_clock() - spent) / LOOK_SHARE)
            self._tell(self.last, end)
            return ceiling

    def _follow_stalls(self, stalled: bool, now: float, allowed: int, floor: int) -> int:
        """The ceiling as far as stalls rule it: a quarter less in each window with stalls, twice as much in each without."""
        if now - self._stall_cap_at >= STALL_WINDOW_SECONDS:
            if stalled:
                current = allowed if self._ceiling is None else min(self._ceiling, allowed)
                self._stall_cap = max(current - current // 4, floor)
                self._stall_cap_at = now
            elif self._stall_cap is not None and now - self._pressed_at >= RELIEF_SECONDS:
                self._stall_cap = None if 2 * self._stall_cap >= allowed else 2 * self._stall_cap
                self._stall_cap_at = now
        return allowed if self._stall_cap is None else self._stall_cap

    def _stalled(self, decision: BudgetDecision, now: float) -> str | None:
        """What tasks stall on, in words, if they do."""
        found = None
        for stalls in self._stalls:
            part = stalls.measure(now)
            if part >= (STALLED_LOW if self._stall_cap is not None else STALLED_HIGH) and (
                stalls.name != NODE or _node_is_short(decision)
            ):
                found = found or f"memory pressure of {stalls.name} ({part:.0%} of the time stalled)"
        return found

    def _tell(self, reading: Reading, now: float) -> None:
        if self._logged is None:
            self._logged = (now - LOG_SECONDS, reading.ceiling)
        when, before = self._logged
        change = reading.ceiling - before
        if now - when < LOG_SECONDS or abs(change) < max(before, 1) * LOG_SHARE:
            return
        self._logged = (now, reading.ceiling)
        log.log(
            logging.WARNING if change < 0 else logging.INFO,
            "the staging pool may hold %.1f MiB now, %s %.1f MiB; ruled by %s%s",
            *(reading.ceiling / MIB, "down from" if change < 0 else "up from", before / MIB, reading.reason),
            "".join(f"; {limit.name}: {limit.detail}" for limit in reading.decision.limits[:1]),
        )


class _Stalls:
    """How long tasks have waited for memory, from one pressure file of the kernel."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self._path = path
        self._before: tuple[float, int] | None = None
        self._part = 0.0

    def measure(self, now: float) -> float:
        """Part of the time, over the last window, that some task was stalled; 0 where that can't be read."""
        if self._before is not None and now - self._before[0] < STALL_WINDOW_SECONDS:
            return self._part
        try:
            with open(self._path, encoding="ascii", errors="replace") as file:
                some = _SOME.search(file.read())
        except OSError:  # a kernel without it, or one that has it switched off
            some = None
        if some is None:
            self._before, self._part = None, 0.0
            return 0.0
        total = int(some[2])
        if self._before is None:
            self._part = float(some[1]) / 100  # the last ten seconds
        else:
            self._part = max(total - self._before[1], 0) / 1e6 / (now - self._before[0])
        self._before = now, total
        return self._part


_SOME = re.compile(r"^some avg10=([0-9]+(?:\.[0-9]+)?)[^\n]* total=([0-9]+)", re.MULTILINE)


def _node_is_short(decision: BudgetDecision) -> bool:
    return any(
        limit.name == "MemAvailable" and limit.room < NODE_SHORT_SHARE * limit.bound for limit in decision.limits
    )
