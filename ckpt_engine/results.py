"""What the engine hands back: frozen values, and the handle of a save that is on its way."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Literal

from ckpt_engine.config import MIB
from ckpt_engine.errors import CheckpointError, CommitTimeoutError
from ckpt_engine.staging.guard import Limit
from ckpt_engine.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class SaveStats:
    """Figures of one save on this rank. Times in seconds, sizes in bytes.

    Attributes:
        stall_seconds: length of the ``save()`` call.
        plan_seconds: part of it before the first copy: flattening, agreement, planning.
        stage_seconds: part of it that copied tensors, waiting for free extents included.
        durable_seconds: from the call to the verdict that all ranks' bytes are committed.
        write_seconds: time in write calls, summed over the writer threads.
        checksum_cpu_seconds: CPU time for checksums and record frames, summed over the writer threads.
        staged_bytes: bytes that this rank wrote to shard files.
        budget_bytes: staging budget; ``peak_staged_bytes``: the most that was in use during the save.
        extent_bytes, writers: geometry in use.
        direct_io: whether the shard files were written with O_DIRECT.
        reused_plan: whether the structure was unchanged and the plan of the save before was used again.
    """

    stall_seconds: float = 0.0
    plan_seconds: float = 0.0
    stage_seconds: float = 0.0
    durable_seconds: float = 0.0
    write_seconds: float = 0.0
    checksum_cpu_seconds: float = 0.0
    staged_bytes: int = 0
    budget_bytes: int = 0
    peak_staged_bytes: int = 0
    extent_bytes: int = 0
    writers: int = 0
    direct_io: bool = False
    reused_plan: bool = False


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint: ``path`` is its directory, ``bytes`` the size of all ranks' shard files."""

    step: int
    path: str
    bytes: int
    stats: SaveStats


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        missing: keys of the given state that the checkpoint doesn't have (their values are untouched).
        unexpected: keys of the checkpoint that no rank asked for.
        skipped: newer steps that were passed over, and why.
        notes: anything else worth knowing, such as per-rank values taken from another rank.
        bytes: bytes that this rank read.
        verified: whether checksums were compared.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    skipped: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()
    bytes: int = 0
    verified: bool = True


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint."""

    step: int
    train_state: TrainState | None
    report: RestoreReport
    path: str


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Host memory of this rank: the limits, and what is held. Sizes in bytes.

    Attributes:
        requested: ``staging_budget`` of the config.
        granted: what the limits grant at this moment; ``ruled_by``: name of the limit that decided, or what else did.
        limits: every limit that was found, the tightest first.
        ceiling: what the pool may hold now: ``granted``, less while there is pressure.
        state: what the last look did to the ceiling: "shrink", "hold" or "grow"; ``reason``: what ruled it.
        mapped: what the pool has mapped; ``in_use``: part of it with saves on their way; ``peak_in_use``: the most so far.
        refused: number of times that the system refused memory.
        local_ranks: ranks that share the node.
        extent_bytes, writers: geometry of the next save.
        threads: copy and writer threads there are.
    """

    requested: int | Literal["auto"]
    granted: int
    ruled_by: str
    limits: tuple[Limit, ...]
    ceiling: int
    state: Literal["shrink", "hold", "grow"]
    reason: str
    mapped: int
    in_use: int
    peak_in_use: int
    refused: int
    local_ranks: int
    extent_bytes: int
    writers: int
    threads: int

    def explain(self) -> str:
        """All of it in one line."""
        asked = "auto" if self.requested == "auto" else f"{self.requested / MIB:.1f} MiB"
        limits = "; ".join(f"{limit.name}: {limit.room / MIB:.1f} MiB left ({limit.detail})" for limit in self.limits)
        return (
            f"staging memory: {self.ceiling / MIB:.1f} MiB may be held now ({self.state}, ruled by {self.reason}), "
            f"{self.granted / MIB:.1f} MiB granted by {self.ruled_by} (asked: {asked}, ranks on this node: "
            f"{self.local_ranks}); {self.mapped / MIB:.1f} MiB mapped, {self.in_use / MIB:.1f} MiB in use, peak "
            f"{self.peak_in_use / MIB:.1f} MiB, refused {self.refused} times; extents of {self.extent_bytes / MIB:.1f} MiB, "
            f"{self.writers} writers, {self.threads} threads. Limits: {limits or 'none could be read'}"
        )

    __str__ = explain


class SaveHandle:
    """A save on its way. Thread-safe."""

    def __init__(self, step: int, *, patience: float) -> None:
        self.step = step
        self.heard = False
        self._patience = patience
        self._progress: Callable[[], int] | None = None
        self._event = threading.Event()
        self._info: CheckpointInfo | None = None
        self._error: CheckpointError | None = None

    def done(self) -> bool:
        """Whether the save is committed or has failed."""
        return self._event.is_set()

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Waits for the verdict.

        Args:
            timeout: seconds; ``None`` waits as long as the save makes progress, and ``commit_timeout`` beyond that.

        Raises:
            CommitTimeoutError: no verdict by then (the save goes on).
            CheckpointError: the save failed; the same error on every rank.
        """
        self._wait(timeout)
        if self._error is not None:
            self.heard = True
            raise self._error
        if self._info is None:
            raise CheckpointError("verdict without information", step=self.step, phase="commit")
        return self._info

    def exception(self, timeout: float | None = None) -> CheckpointError | None:
        """Like :meth:`result`, but returns the save's error instead of raising it."""
        self._wait(timeout)
        if self._error is not None:
            self.heard = True
        return self._error

    def _wait(self, timeout: float | None) -> None:
        """Waits for the verdict; without a timeout, for as long as bytes are being written."""
        if timeout is not None:
            if not self._event.wait(timeout):
                raise CommitTimeoutError(f"no verdict within {timeout:g} s", step=self.step, phase="commit")
            return
        # Bytes first, then the agreement, which has a deadline of its own: hence two times the patience at the end.
        progress, seen = self._progress, -1
        while not self._event.wait(2 * self._patience + 5):
            now = progress() if progress is not None else seen
            if now == seen:
                raise CommitTimeoutError(
                    f"no progress for {2 * self._patience + 5:g} s ({now} bytes written)",
                    step=self.step,
                    phase="commit",
                )
            seen = now

    def _track(self, progress: Callable[[], int]) -> None:
        self._progress = progress

    def _resolve(self, outcome: CheckpointInfo | CheckpointError) -> None:
        if isinstance(outcome, CheckpointError):
            self._error = outcome
        else:
            self._info = outcome
        self._progress = None  # a kept handle keeps nothing else alive
        self._event.set()
