"""The engine: plan -> stage -> persist -> commit, and back.

::

    caller's thread                               writer threads                  committer thread
    ---------------                               --------------                  ----------------
    flatten, agree, plan, lay out
    copy into extents  -- staging queue -->       seal (crc), pwrite, fsync -->   vote over the Store
    save() returns: the tensors are yours again                                   rank 0: commit record, rename, trackers
                                                                                  verdict -> handle, callbacks, retention

No thread but the caller's (and the copy threads while it waits for them) touches the caller's tensors. Ranks talk through the
c10d Store only, with deadlines.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ckpt_engine.agreeing import SaveAgreement, Unheard, attempt, opened, warn_if_short
from ckpt_engine.commit.coordinator import Coordinator, pack_error, unpack_error
from ckpt_engine.commit.directory import CheckpointDirectory
from ckpt_engine.committing import MetadataComposer, commit
from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import (
    CheckpointError,
    CommitTimeoutError,
    EngineClosedError,
    NotCommittedError,
)
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.planning import Planner
from ckpt_engine.restore.verify import VerifyReport, verify_checkpoint
from ckpt_engine.restoring import Restorer
from ckpt_engine.results import CheckpointInfo, Restored, SaveHandle, SaveStats
from ckpt_engine.saving import RankLayout, SaveJob, Vote
from ckpt_engine.storage.fs import free_bytes, remove_tree
from ckpt_engine.train_state import TrainState
from ckpt_engine.version import __version__
from ckpt_engine.workers import Workers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("ckpt_engine")

Callback = Callable[[CheckpointInfo], None]


class CheckpointEngine:
    """Saves and restores the state of a training run. One per directory and rank; a context manager.

    With ``torch.distributed`` initialised, every rank of ``process_group`` makes an engine on the same directory, and
    ``save`` and ``restore`` are called by all of them in the same order (``poll``, ``wait``, ``steps``, ``latest`` and
    ``verify`` by any of them). Without it, the engine works for one rank.

    Args:
        directory: where checkpoints go; made if missing. Has to be the same for all ranks.
        config: settings.
        process_group: ranks that save together; the default group if ``None``. Any backend: no collective is used.

    Raises:
        ConfigError: the directory can't be used, or the rank isn't in the group.
        MemoryBudgetError: the staging budget is below what the engine can work with.
    """

    def __init__(
        self,
        directory: str | bytes | os.PathLike[Any],
        config: EngineConfig | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.config = config if config is not None else EngineConfig()
        self._directory = CheckpointDirectory(directory)
        self._coordinator = Coordinator.for_group(process_group, timeout=self.config.commit_timeout)
        self.rank, self.world_size = self._coordinator.rank, self._coordinator.world_size
        self._open_together()
        self._workers = Workers(self.config)
        self._geometry, self._pool = self._workers.geometry, self._workers.pool
        self._committer = concurrent.futures.ThreadPoolExecutor(1, "ckpt-commit")
        self._background = self._coordinator.for_thread()
        self._agreement = SaveAgreement(
            self._coordinator, self._directory, Planner(self.rank, self.config.verify_replicas)
        )
        self._restorer = Restorer(self._coordinator, self._directory, self.config, threads=self._workers.copy_threads)
        self._templates = TemplateCache()
        self._layout: RankLayout | None = None
        self._composer = MetadataComposer()
        self._in_flight: collections.deque[tuple[int, SaveHandle]] = collections.deque()
        self._failed: collections.deque[tuple[int, SaveHandle]] = collections.deque()
        self._committed: collections.deque[CheckpointInfo] = collections.deque()
        self._callbacks: list[Callback] = []
        self._lock = threading.RLock()
        self._seq = 0
        self._closed = False
        _open_engines.add(self)

    def __enter__(self) -> CheckpointEngine:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            log.error("a save failed, too, while the trainer's own exception was on its way: %s", failed)

    # -- save -------------------------------------------------------------------------------------------------------

    def save(self, state: Mapping[str, Any], step: int, train_state: TrainState | None = None) -> SaveHandle:
        """Takes a private copy of ``state`` and writes it in the background. Collective.

        Returns as soon as the copy is complete: everything in ``state`` may be changed at once. A copy that doesn't fit
        into the staging budget streams through it, and the call returns when the last part is staged. What fails after
        the ranks have agreed to save is told by the handle, :meth:`poll`, :meth:`wait`, :meth:`close` or the next save.

        Args:
            state: nested dict of tensors, DTensors, objects with ``state_dict``/``load_state_dict``, ``PerRank`` and
                picklable values.
            step: training step, 0 or more. A committed checkpoint of this step with the same structure is replaced,
                atomically, when this one commits.
            train_state: progress counters that belong to these weights; rank 0's are written.

        Raises:
            StateError: something in ``state`` can't be saved exactly (nothing was written).
            StepExistsError: the step is committed with another structure, or is being written.
            CheckpointError: an earlier background save failed; it is raised here, once, on every rank, and this call did
                nothing else.
        """
        with self._lock:
            self._check_open()
            started = time.perf_counter()
            self._await_room()
            self._workers.fit()
            self._seq += 1
            agreed = self._agreement.agree(
                self._seq, state, step, train_state, in_flight=self._steps_in_flight(), unheard=self._unheard()
            )
            if isinstance(agreed, Unheard):
                raise self._hear(agreed)
            if self._layout is None or self._layout.plan_id != agreed.plan.plan_id:
                self._layout = RankLayout(
                    agreed.plan, self.rank, self._geometry.writers, self._templates, checksum=self.config.checksum
                )
            handle = SaveHandle(step, patience=self.config.commit_timeout)
            job = SaveJob(
                self._seq,
                step,
                agreed,
                self._layout,
                handle,
                self._pool,
                rank=self.rank,
                world_size=self.world_size,
                extent_bytes=self._geometry.extent_bytes,
                config=self.config,
                started=started,
            )
            handle._track(lambda: job.queue.progress)
            warn_if_short(free_bytes(job.directory), job.size, step, job.directory)
            # Submitted before staging: when the interpreter exits in the middle of it, these still run to their end.
            self._in_flight.append((self._seq, handle))
            self._workers.write(job.queue)
            self._committer.submit(self._finish, job)
            planned = time.perf_counter()
            try:
                job.stage(agreed.tensors, self._workers.copiers)
            except BaseException as error:
                job.queue.fail(error)  # the handle tells it, on every rank
                if not isinstance(error, Exception):
                    raise  # an interrupt is the trainer's own
            finally:
                now = time.perf_counter()
                job.stats = SaveStats(
                    stall_seconds=now - started,
                    plan_seconds=planned - started,
                    stage_seconds=now - planned,
                    staged_bytes=job.size,
                    budget_bytes=self._pool.stats().budget,
                    extent_bytes=self._geometry.extent_bytes,
                    writers=self._geometry.writers,
                    reused_plan=agreed.reused,
                )
                job.staged.set()
            log.info("step %d staged: %d bytes on rank %d in %.3f s", step, job.size, self.rank, now - started)
            return handle

    def _finish(self, job: SaveJob) -> None:
        """On the committer thread: vote, verdict, and what hangs off it. Saves come here in their order."""

        def vote() -> bytes:
            return pickle.dumps(job.persisted())

        def judge(payloads: list[bytes]) -> bytes:
            votes: list[Vote] = [pickle.loads(payload) for payload in opened(payloads)]
            return pickle.dumps(commit(job, votes, self._directory, self._composer, __version__))

        outcome: CheckpointInfo | CheckpointError
        try:
            payload, _ = attempt(vote, rank=self.rank, step=job.step, phase="write")
            verdict = self._background.decide(f"commit/{job.seq}", payload, judge, phase="commit", step=job.step)
            path, size = pickle.loads(verdict)
            job.layout.committed = True
            outcome = CheckpointInfo(job.step, path, size, job.finished_stats())
        except BaseException as error:
            outcome = unpack_error(pack_error(error, rank=self.rank, step=job.step, phase="commit"))
            if self.rank == 0:
                self._directory.discard(job.directory)
        job.release()
        self._settle(job, outcome)

    def _settle(self, job: SaveJob, outcome: CheckpointInfo | CheckpointError) -> None:
        if isinstance(outcome, CheckpointError):
            log.error("step %d failed: %s", job.step, outcome)
            if self.config.on_error == "raise":
                self._failed.append((job.seq, job.handle))
        else:
            self._committed.append(outcome)
            rate = outcome.bytes / max(outcome.stats.durable_seconds, 1e-9) / 1e9
            log.log(
                logging.INFO if self.rank == 0 else logging.DEBUG,
                "step %d committed: %d bytes in %.3f s (%.2f GB/s) at %s",
                *(outcome.step, outcome.bytes, outcome.stats.durable_seconds, rate, outcome.path),
            )
        retired: list[str] = []
        if self.rank == 0 and isinstance(outcome, CheckpointInfo):
            with self._tidy(job.step):
                retired = self._directory.retire(job.step, self.config.keep_last, self.config.keep_every)
        job.handle._resolve(outcome)
        if isinstance(outcome, CheckpointInfo):
            for callback in tuple(self._callbacks):
                try:
                    callback(outcome)
                except Exception:
                    log.exception("a callback for the committed step %d failed", outcome.step)
        with self._tidy(job.step):
            for path in retired:
                remove_tree(path)
        self._in_flight.remove((job.seq, job.handle))

    @contextlib.contextmanager
    def _tidy(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # what is committed stays committed
            log.warning("step %d is committed, but an older checkpoint could not be removed: %s", step, error)

    def on_committed(self, callback: Callback) -> None:
        """Has ``callback(info)`` called on the committer thread for each save that commits from now on, in save order."""
        self._callbacks.append(callback)

    # -- what became of it ------------------------------------------------------------------------------------------

    def poll(self) -> list[CheckpointInfo]:
        """The saves that committed since the last call. Never blocks.

        Raises:
            CheckpointError: a background save failed; raised once.
        """
        while self._failed:
            _, handle = self._failed.popleft()
            if not handle.heard:
                handle.result(0)
        finished = []
        while self._committed:
            finished.append(self._committed.popleft())
        return finished

    def wait(self, timeout: float | None = None) -> list[CheckpointInfo]:
        """Waits until no save is on its way, then :meth:`poll`. Not collective.

        Args:
            timeout: seconds for all of them together; ``None`` waits as long as they make progress.

        Raises:
            CommitTimeoutError: some are still on their way.
            CheckpointError: a background save failed; raised once.
        """
        self._drain(timeout)
        return self.poll()

    def close(self, timeout: float | None = None) -> None:
        """Drains the saves and gives back threads, memory and the directory. Idempotent; also runs at interpreter exit.

        Raises:
            CommitTimeoutError: saves are still on their way; the engine stays open, and may be closed again.
            CheckpointError: a background save failed and nobody has been told yet.
        """
        with self._lock:
            if self._closed:
                return
            self._drain(timeout)
            self._closed = True
            _open_engines.discard(self)
            self._committer.shutdown(wait=True)
            self._workers.close()
            self._directory.unlock()
            self._background.close()
            self._coordinator.close()
            self._layout = None
        self.poll()

    # -- back -------------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: dict[str, Any],
        step: int | Literal["latest"] = "latest",
        *,
        strict: bool = True,
        path: str | None = None,
    ) -> Restored | None:
        """Loads a checkpoint into ``state``, in place. Collective. Saves on their way are waited for first.

        Tensors are filled where they are, values are replaced, objects get ``load_state_dict``. Empty containers (and an
        optimizer without state) take what the checkpoint has. The number of ranks and the sharding may differ from those
        of the save.

        Args:
            state: as for :meth:`save`.
            step: a step, or ``"latest"``: the newest committed checkpoint that is whole. A broken one is skipped with a warning.
            strict: raise when keys are missing or unexpected, or dtypes differ; otherwise the report lists them.
            path: a checkpoint directory anywhere, also one written by stock ``torch.distributed.checkpoint``, instead of a step.

        Returns:
            What was restored, or ``None`` if ``"latest"`` finds nothing.

        Raises:
            NotCommittedError: the step asked for isn't there.
            CorruptionError: the checkpoint asked for is damaged. ``state`` may be partly loaded then.
            KeyMismatchError: keys, shapes or dtypes don't fit.
        """
        with self._lock:
            self._check_open()
            for _, handle in tuple(self._in_flight):
                handle._wait(None)
            return self._restorer.restore(state, step, strict=strict, path=path)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints in the directory, ascending. Reads the commit records, not the data."""
        return self._directory.steps()

    def latest(self) -> int | None:
        """The newest committed step, or ``None``."""
        return max(self.steps(), default=None)

    def verify(self, step: int) -> VerifyReport:
        """Reads every byte of a checkpoint and compares all checksums. Not collective.

        Raises:
            NotCommittedError: there is no directory of that step.
        """
        if not os.path.isdir(self._directory.path_of(step)):
            raise NotCommittedError(f"there is no checkpoint of step {step}", step=step, phase="verify")
        return dataclasses.replace(verify_checkpoint(self._directory.path_of(step)), step=step)

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _open_together(self) -> None:
        def usable() -> bytes:
            self._directory.check_usable()
            return b""

        payload, original = attempt(usable, rank=self.rank, step=None, phase="config")
        try:
            self._coordinator.decide(
                "open", payload, lambda payloads: b"".join(opened(payloads)), phase="config", step=None
            )
        except CheckpointError:
            if original is not None:
                raise original from None
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this engine is closed", hint="make a new CheckpointEngine", phase="config")

    def _await_room(self) -> None:
        while (
            len(waiting := [handle for _, handle in tuple(self._in_flight) if not handle.done()])
            >= self.config.max_in_flight
        ):
            waiting[0]._wait(None)

    def _drain(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for _, handle in tuple(self._in_flight):
            handle._wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _steps_in_flight(self) -> set[int]:
        return {handle.step for _, handle in tuple(self._in_flight) if not handle.done()}

    def _unheard(self) -> tuple[Unheard, ...]:
        found = []
        for seq, handle in tuple(self._failed):
            error = handle._error
            if error is not None and not handle.heard:
                found.append(
                    Unheard(
                        seq, pack_error(error, rank=error.rank or 0, step=error.step, phase=error.phase or "commit")
                    )
                )
        return tuple(found)

    def _hear(self, failure: Unheard) -> CheckpointError:
        for entry in tuple(self._failed):
            if entry[0] <= failure.seq:
                entry[1].heard = True
                self._failed.remove(entry)
        return unpack_error(failure.error)

    def _at_exit(self) -> None:
        """The threads have been joined by now, hence every save has its verdict; what nobody heard is said at last."""
        try:
            self.close(timeout=self.config.commit_timeout)
        except CommitTimeoutError as error:
            log.error("the interpreter exits with a save on its way: %s", error)
        except CheckpointError as error:
            log.error("a checkpoint was lost, and nobody asked for it: %s", error)


_open_engines: weakref.WeakSet[CheckpointEngine] = weakref.WeakSet()


@atexit.register
def _close_engines() -> None:
    for engine in list(_open_engines):
        engine._at_exit()
