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

from ckpt_engine.agreeing import Adopted, Agreed, SaveAgreement, Unheard, attempt, opened, warn_if_short
from ckpt_engine.background import Background, Callback
from ckpt_engine.commit.coordinator import Coordinator
from ckpt_engine.commit.directory import CheckpointDirectory
from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import CheckpointError, CommitTimeoutError, EngineClosedError, NotCommittedError
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.planning import Planner
from ckpt_engine.preflight import Preflight, SavePlanReport
from ckpt_engine.restore.verify import VerifyReport, verify_checkpoint
from ckpt_engine.restoring import Restorer
from ckpt_engine.results import CheckpointInfo, MemoryReport, Restored, SaveHandle, SaveStats
from ckpt_engine.saving import RankLayout, SaveJob
from ckpt_engine.staging.guard import node_identity
from ckpt_engine.storage.fs import free_bytes
from ckpt_engine.train_state import TrainState
from ckpt_engine.workers import Workers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("ckpt_engine")


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
        self._workers, self._background = self._open_together()
        planner = Planner(self.rank, self.config.verify_replicas)
        self._agreement = SaveAgreement(self._coordinator, self._directory, planner)
        self._preflight = Preflight(self._coordinator, self._directory, planner, self._workers)
        self._restorer = Restorer(self._coordinator, self._directory, self.config, threads=self._workers.copy_threads)
        self._templates = TemplateCache()
        self._layout: RankLayout | None = None
        self._lock = threading.RLock()
        self._busy = False
        self._closed = False
        self._pid = os.getpid()
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
            MemoryBudgetError: some rank has no memory for two extents of 1 MiB (nothing was written).
            CheckpointError: an earlier background save failed; it is raised here, once, on every rank, and this call did
                nothing else.
        """
        with self._alone("save"):
            started = time.perf_counter()
            # Counted before anything can fail or be interrupted: an uncounted call would put the ranks out of step.
            seq = self._agreement.next()
            while len(waiting := self._background.waiting()) >= self.config.max_in_flight:
                waiting[0]._wait(None)
            in_flight = {handle.step for handle in self._background.waiting()}
            unheard = self._background.unheard()
            agreed = self._agreement.agree(
                seq, state, step, train_state, in_flight=in_flight, unheard=unheard, ready=self._workers.fit
            )
            if isinstance(agreed, Unheard):
                raise self._background.hear(agreed)
            handle = SaveHandle(step, patience=self.config.commit_timeout)
            job: SaveJob | None = None
            adopted: Adopted | None = None
            failure: BaseException | None = None
            voted = False
            try:
                self._background.enter(agreed.seq, handle)
                try:
                    adopted = self._agreement.adopt(agreed)
                    job = self._make_job(agreed, adopted, handle, started)
                    # Submitted before staging, which needs the extents that writers free; and when the interpreter exits
                    # in the middle of it, what has been submitted still runs to its end.
                    self._workers.write(job.queue)
                except BaseException as error:
                    failure = error
                    if job is not None:
                        job.queue.fail(error)
                self._background.submit(agreed.seq, handle, agreed.directory, job, failure)
                voted = True
                if job is not None and adopted is not None:
                    failure = self._stage(job, adopted, agreed.reused, started) or failure
            except BaseException as interrupt:
                # Between any two of these steps. The others wait for a vote, and the writers for extents that won't come.
                if job is not None:
                    job.queue.fail(interrupt)
                    job.staged.set()
                if not voted:
                    self._background.submit(agreed.seq, handle, agreed.directory, job, interrupt)
                raise
            if failure is not None and job is None and self.world_size == 1:
                with contextlib.suppress(CheckpointError):
                    handle.result(self._patience())  # told here, and nothing is left of it
                raise failure
            if failure is not None and not isinstance(failure, Exception):
                raise failure  # an interrupt is the trainer's own; all else the handle tells, on every rank
            return handle

    def _make_job(self, agreed: Agreed, adopted: Adopted, handle: SaveHandle, started: float) -> SaveJob:
        plan = adopted.plan
        if self._layout is None or self._layout.plan_id != plan.plan_id:
            writers = self._workers.geometry.writers
            self._templates.keep_only({(spec.shape, spec.dtype) for spec in plan.specs})
            self._layout = RankLayout(plan, self.rank, writers, self._templates, checksum=self.config.checksum)
        job = SaveJob(
            agreed,
            plan,
            self._layout,
            handle,
            self._workers.pool,
            rank=self.rank,
            world_size=self.world_size,
            extent_bytes=self._workers.geometry.extent_bytes,
            config=self.config,
            started=started,
        )
        handle._track(lambda: job.queue.progress)
        warn_if_short(free_bytes(job.directory), job.size, job.step, job.directory)
        return job

    def _stage(self, job: SaveJob, adopted: Adopted, reused: bool, started: float) -> BaseException | None:
        """Copies the tensors; what fails fails the save, and is returned."""
        failure: BaseException | None = None
        planned = time.perf_counter()
        try:
            job.stage(adopted.tensors, self._workers.copiers)
        except BaseException as error:
            job.queue.fail(error)
            failure = error
        finally:
            now = time.perf_counter()
            job.stats = SaveStats(
                stall_seconds=now - started,
                plan_seconds=planned - started,
                stage_seconds=now - planned,
                staged_bytes=job.size,
                budget_bytes=self._workers.pool.stats().budget,
                extent_bytes=self._workers.geometry.extent_bytes,
                writers=self._workers.geometry.writers,
                reused_plan=reused,
            )
            job.staged.set()
        if failure is None:
            log.info("step %d staged: %d bytes on rank %d in %.3f s", job.step, job.size, self.rank, now - started)
        return failure

    def plan(self, state: Mapping[str, Any], *, probe: bool = True) -> SavePlanReport:
        """What a save of ``state`` will take: files, memory, disk and time; ``str()`` of it is a table. Collective.

        Writes nothing that stays, and changes nothing that a later save depends on.

        Args:
            state: as for :meth:`save`.
            probe: measure, for about a second, how fast memory and storage are; otherwise no times are told.

        Raises:
            StateError: the state can't be saved, or the ranks disagree about it: as :meth:`save` would.
        """
        with self._alone("plan"):
            return self._preflight.plan(state, probe=probe)

    def on_committed(self, callback: Callback) -> None:
        """Has ``callback(info)`` called on the committer thread for each save that commits from now on, in save order.

        The callback must not wait for saves (``wait``, ``save``, ``restore``, ``close`` refuse it), and what it raises is
        logged.
        """
        self._background.callbacks.append(callback)

    # -- what became of it ------------------------------------------------------------------------------------------

    def poll(self) -> list[CheckpointInfo]:
        """The saves that committed since the last call. Never blocks.

        Raises:
            CheckpointError: a background save failed; raised once.
        """
        # A failure that a callback gets would be told to nobody else.
        self._refuse_waiting_for_itself("poll")
        self._workers.pool.look()
        return self._background.poll()

    def wait(self, timeout: float | None = None) -> list[CheckpointInfo]:
        """Waits until no save is on its way, then :meth:`poll`. Not collective.

        Args:
            timeout: seconds for all of them together; ``None`` waits as long as they make progress.

        Raises:
            CommitTimeoutError: some are still on their way.
            CheckpointError: a background save failed; raised once.
        """
        self._refuse_waiting_for_itself("wait")
        self._background.drain(timeout)
        return self.poll()

    def close(self, timeout: float | None = None) -> None:
        """Drains the saves and gives back threads, memory and the directory. Idempotent; also runs at interpreter exit.

        Raises:
            CommitTimeoutError: saves are still on their way; the engine stays open, and may be closed again.
            CheckpointError: a background save failed and nobody has been told yet.
        """
        if self._pid != os.getpid():
            return  # a forked child: the saves, the threads and the directory are its parent's
        end = time.monotonic() + (self._patience() if timeout is None else timeout)
        with self._alone("close", end - time.monotonic()):
            if self._closed:
                return
            self._background.drain(timeout)
            stuck = not self._workers.close(max(0.0, end - time.monotonic()))
            self._closed = True
            _open_engines.discard(self)
            self._background.close()
            self._directory.unlock()
            self._coordinator.close()
            self._layout = None
        self._background.poll()
        if stuck:
            raise CommitTimeoutError(
                "writer threads are stuck in the storage; their memory and descriptors come back when it answers",
                phase="close",
            )

    def memory(self) -> MemoryReport:
        """What limits the engine's memory on this rank at this moment, and what it holds. ``str()`` of it is one line."""
        return self._workers.memory()

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
        with self._alone("restore"):
            for handle in self._background.waiting():
                handle._wait(None)
            self._workers.pool.trim()  # idle now, and nobody looks at the limits until the next save
            return self._restorer.restore(state, step, strict=strict, path=path)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints in the directory, ascending. Reads the commit records, not the data."""
        return self._directory.steps()

    def latest(self) -> int | None:
        """The step that was committed last, or ``None``. After going back to an earlier step, that isn't the largest number."""
        return next(iter(self._directory.newest_first()), None)

    def verify(self, step: int) -> VerifyReport:
        """Reads every byte of a checkpoint and compares all checksums. Not collective.

        Raises:
            NotCommittedError: there is no directory of that step.
        """
        if not os.path.isdir(self._directory.path_of(step)):
            raise NotCommittedError(f"there is no checkpoint of step {step}", step=step, phase="verify")
        report = verify_checkpoint(self._directory.path_of(step))
        if report.step not in (None, step):
            wrong = f"commit.json is of step {report.step}, expected {step}"
            report = dataclasses.replace(report, ok=False, problems=(*report.problems, wrong))
        return dataclasses.replace(report, step=step)

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _open_together(self) -> tuple[Workers, Background]:
        """Either every rank can use the directory and has its threads and memory, or all raise."""
        workers: Workers | None = None
        background: Background | None = None
        host = node_identity()

        def usable() -> bytes:
            if not self._directory.check_readable():
                self._directory.check_usable()  # one that is there and can only be read is good for restores
            return host.encode()

        def equipped() -> bytes:
            nonlocal workers, background
            background = Background(self._coordinator.for_thread(), self._directory, self.config)
            workers = Workers(self.config, local_ranks=hosts.count(host))
            return b""

        try:
            hosts = [name.decode() for name in self._opening_round("open", usable)]
            self._opening_round("equip", equipped)
            if workers is None or background is None:
                raise RuntimeError("the ranks agreed on an engine that this rank doesn't have")
            return workers, background
        except BaseException:
            for part in (workers, background):
                if part is not None:
                    part.close()
            self._coordinator.close()
            raise

    def _opening_round(self, tag: str, work: Callable[[], bytes]) -> list[bytes]:
        """What each rank says; what one of them raises is raised on all."""
        payload, original = attempt(work, rank=self.rank, step=None, phase="config")
        try:
            verdict = self._coordinator.decide(
                tag, payload, lambda payloads: pickle.dumps(opened(payloads)), phase="config", step=None
            )
        except CheckpointError:
            if original is not None and self.world_size == 1:
                raise original from None
            raise
        said: list[bytes] = pickle.loads(verdict)
        return said

    @contextlib.contextmanager
    def _alone(self, call: str, timeout: float | None = None) -> Iterator[None]:
        """One save, restore or close at a time, and none from within another one (a signal handler) or a callback."""
        self._refuse_waiting_for_itself(call)
        if not self._lock.acquire(timeout=self._patience() if timeout is None else max(0.0, timeout)):
            raise CommitTimeoutError(
                f"{call}() waited in vain for another thread's call on this engine", phase="config"
            )
        try:
            if self._busy:
                raise CheckpointError(
                    f"{call}() was called from within another call on the same engine, by a signal handler or a state_dict()",
                    phase="config",
                    hint="set a flag there, and act on it after the call",
                )
            if self._closed and call != "close":
                raise EngineClosedError("this engine is closed", hint="make a new CheckpointEngine", phase="config")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
        finally:
            self._lock.release()

    def _refuse_waiting_for_itself(self, call: str) -> None:
        if self._pid != os.getpid():
            raise CheckpointError(
                f"{call}() was called in a forked child; the engine belongs to the process that made it",
                phase="config",
                hint="make an engine in the child if it has to save on its own",
            )
        if self._background.inside():
            raise CheckpointError(
                f"{call}() was called by a callback, on the thread that has to commit the saves that it would wait for",
                phase="config",
                hint="have the callback tell the trainer's thread to do it",
            )

    def _patience(self) -> float:
        return 4 * self.config.commit_timeout + 10

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
