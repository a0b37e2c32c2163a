"""The committer thread of an engine, and the book of its saves: which are on their way, committed, failed, and heard of.

Promises: saves get their verdicts in the order in which they were begun; every save that was entered gets one, whatever fails
on the way, and so does every other rank; a failure is told once. What hangs off a commit (retention, callbacks) can't undo it.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ckpt_engine.agreeing import Unheard, attempt, opened
from ckpt_engine.commit.coordinator import Coordinator, pack_error, unpack_error
from ckpt_engine.commit.directory import CheckpointDirectory
from ckpt_engine.committing import MetadataComposer, commit
from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import CheckpointError, CommitTimeoutError
from ckpt_engine.results import CheckpointInfo, SaveHandle
from ckpt_engine.saving import SaveJob, Vote
from ckpt_engine.storage.fs import remove_tree
from ckpt_engine.threads import Crew
from ckpt_engine.version import __version__

log = logging.getLogger("ckpt_engine")

Callback = Callable[[CheckpointInfo], None]

#: Committed saves that a trainer hears of at its next poll; one that never polls must not collect them for ever.
_REMEMBERED = 4096


class Background:
    """Brings saves to their verdict on one thread.

    Args:
        coordinator: for this thread alone; closed with it.
    """

    def __init__(self, coordinator: Coordinator, directory: CheckpointDirectory, config: EngineConfig) -> None:
        self.callbacks: list[Callback] = []
        self._coordinator = coordinator
        self._directory = directory
        self._config = config
        self._rank = coordinator.rank
        self._composer = MetadataComposer()
        self._thread = Crew(1, "ckpt-commit")
        self._thread.start(1)
        self._ident: int | None = None
        self._finished = 0  # number of the last save that got its verdict
        self._in_flight: collections.deque[tuple[int, SaveHandle]] = collections.deque()
        self._failed: collections.deque[tuple[int, SaveHandle]] = collections.deque()
        self._committed: collections.deque[CheckpointInfo] = collections.deque(maxlen=_REMEMBERED)

    # -- a save begins ----------------------------------------------------------------------------------------------

    def enter(self, seq: int, handle: SaveHandle) -> None:
        """From here on this save gets a verdict."""
        self._in_flight.append((seq, handle))

    def submit(
        self, seq: int, handle: SaveHandle, directory: str, job: SaveJob | None, error: BaseException | None
    ) -> None:
        """Has the save voted for: with its outcome, or with ``error`` if it could not even be begun on this rank."""
        if (seq, handle) not in self._in_flight:
            self.enter(seq, handle)  # an interrupt came before that
        try:
            self._thread.submit(self._finish_here, seq, handle, directory, job, error)
        except BaseException as refused:
            if job is not None:
                job.queue.fail(refused)
                job.staged.set()
            if not isinstance(refused, Exception):
                raise  # queued or not: whoever interrupted this submits it again, and the second time does nothing
            # No thread to be had, or the interpreter is shutting down: the others still wait for a vote.
            self._finish(seq, handle, directory, job, error or refused)

    # -- on the committer thread ------------------------------------------------------------------------------------

    def _finish_here(self, *save: Any) -> None:
        self._ident = threading.get_ident()
        self._finish(*save)

    def _finish(
        self, seq: int, handle: SaveHandle, directory: str, job: SaveJob | None, error: BaseException | None
    ) -> None:
        if seq <= self._finished:
            with contextlib.suppress(ValueError):
                self._in_flight.remove((seq, handle))
            return  # submitted twice
        self._finished = seq

        def vote() -> bytes:
            if job is None:
                raise error if error is not None else RuntimeError("a save without job and without error")
            return pickle.dumps(job.persisted())

        def judge(payloads: list[bytes]) -> bytes:
            votes: list[Vote] = [pickle.loads(payload) for payload in opened(payloads)]
            if job is None:
                raise RuntimeError("rank 0 votes for a save that it has not begun")
            return pickle.dumps(commit(job, votes, self._directory, self._composer, __version__))

        outcome: CheckpointInfo | CheckpointError
        try:
            payload, _ = attempt(vote, rank=self._rank, step=handle.step, phase="write" if job is not None else "stage")
            verdict = self._coordinator.decide(f"commit/{seq}", payload, judge, phase="commit", step=handle.step)
            if job is None:
                raise RuntimeError("a save was committed that this rank has not begun")
            path, size = pickle.loads(verdict)
            job.layout.committed = True
            outcome = CheckpointInfo(handle.step, path, size, job.finished_stats())
        except BaseException as caught:
            # A copy without frames: a traceback would keep the tensors of the trainer alive.
            outcome = unpack_error(pack_error(caught, rank=self._rank, step=handle.step, phase="commit"))
            if self._rank == 0:
                self._directory.discard(directory)
        if job is not None:
            job.release()
        try:
            self._settle(seq, handle, outcome)
        finally:
            self._in_flight.remove((seq, handle))

    def _settle(self, seq: int, handle: SaveHandle, outcome: CheckpointInfo | CheckpointError) -> None:
        if isinstance(outcome, CheckpointError):
            log.error("step %d failed: %s", handle.step, outcome)
            if self._config.on_error == "raise":
                self._failed.append((seq, handle))
            handle._resolve(outcome)
            return
        self._committed.append(outcome)
        rate = outcome.bytes / max(outcome.stats.durable_seconds, 1e-9) / 1e9
        log.log(
            logging.INFO if self._rank == 0 else logging.DEBUG,
            "step %d committed: %d bytes in %.3f s (%.2f GB/s) at %s",
            *(outcome.step, outcome.bytes, outcome.stats.durable_seconds, rate, outcome.path),
        )
        retired: list[str] = []
        if self._rank == 0:
            with _whatever_happens(outcome.step, "older checkpoints could not be retired"):
                retired = self._directory.retire(outcome.step, self._config.keep_last, self._config.keep_every)
        handle._resolve(outcome)
        for callback in tuple(self.callbacks):
            with _whatever_happens(outcome.step, f"the callback {callback!r} failed"):
                callback(outcome)
        for path in retired:
            with _whatever_happens(outcome.step, f"{path} could not be removed"):
                remove_tree(path)

    def inside(self) -> bool:
        """Whether this is the committer thread, which must not wait for a save: it would wait for itself."""
        return threading.get_ident() == self._ident

    # -- what became of them ----------------------------------------------------------------------------------------

    def waiting(self) -> list[SaveHandle]:
        """Saves without a verdict, oldest first."""
        return [handle for _, handle in tuple(self._in_flight) if not handle.done()]

    def poll(self) -> list[CheckpointInfo]:
        """Committed since the last call; raises the first failure that nobody has heard of."""
        for entry in tuple(self._failed):
            handle = entry[1]
            if not handle.done():
                continue  # entered a moment before its verdict
            with contextlib.suppress(ValueError):  # another thread was faster
                self._failed.remove(entry)
                if not handle.heard:
                    handle.result(0)
        finished = []
        with contextlib.suppress(IndexError):
            while True:
                finished.append(self._committed.popleft())
        return finished

    def drain(self, timeout: float | None) -> None:
        """Waits until no save is on its way and nothing hangs off the last one any more.

        Raises:
            CommitTimeoutError: some still are.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for _, handle in tuple(self._in_flight):
            handle._wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        while self._in_flight and all(handle.done() for _, handle in tuple(self._in_flight)):
            if deadline is not None and time.monotonic() > deadline:
                raise CommitTimeoutError(
                    "callbacks or removals still run", step=self._in_flight[0][1].step, phase="publish"
                )
            time.sleep(0.001)

    def unheard(self) -> tuple[Unheard, ...]:
        """Failures that this rank's trainer hasn't heard of."""
        found = []
        for seq, handle in tuple(self._failed):
            error = handle._error
            if error is not None and not handle.heard:
                found.append(Unheard(seq, pack_error(error, rank=self._rank, step=error.step, phase="commit")))
        return tuple(found)

    def hear(self, failure: Unheard) -> CheckpointError:
        """Every rank is being told of this failure now, and of those before it."""
        for entry in tuple(self._failed):
            if entry[0] <= failure.seq:
                entry[1].heard = True
                with contextlib.suppress(ValueError):
                    self._failed.remove(entry)
        return unpack_error(failure.error)

    def close(self) -> None:
        """Ends the thread; call :meth:`drain` before."""
        self._thread.shutdown(wait=True)
        self._ident = None  # a later thread may get the same one
        self._coordinator.close()


@contextlib.contextmanager
def _whatever_happens(step: int, what: str) -> Iterator[None]:
    """What is committed stays committed: a SystemExit of a callback, too, is only told."""
    try:
        yield
    except BaseException as error:
        log.error("step %d is committed, but %s: %s: %s", step, what, type(error).__name__, error)
