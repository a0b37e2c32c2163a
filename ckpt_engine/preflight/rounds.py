"""The rehearsal of a save by all ranks: planned by the code of a save, nothing prepared, nothing locked.

::

    begin    each rank flattens and pickles its state     rank 0: plan P of the last save, or anew?
    plan     (if anew) each rank's write items            rank 0: the global plan, or why there is none
    facts    files, memory, disk, limits, a short probe   rank 0: the report, the same on every rank

The rounds have a count of their own, so that a rehearsal never puts the saves of two ranks out of step. The plan is kept: the
first save of the same structure uses it.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_engine.agreeing import attempt, opened
from ckpt_engine.commit.coordinator import Coordinator
from ckpt_engine.commit.directory import CheckpointDirectory
from ckpt_engine.errors import CheckpointError, MemoryBudgetError
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.planning import Planner, RankPlan, is_blob, judge_begin, pickle_value, resolve
from ckpt_engine.preflight.judging import judge
from ckpt_engine.preflight.needs import RankFacts, Staging, look_at, rank_needs, with_times
from ckpt_engine.preflight.probe import FREE_SHARE, PATIENCE, WRITE_BYTES, measure
from ckpt_engine.preflight.report import Problem, SavePlanReport, Speeds
from ckpt_engine.spool import Pickled
from ckpt_engine.state import FlatState, flatten
from ckpt_engine.workers import Workers

log = logging.getLogger("ckpt_engine")

#: ``.metadata`` holds about so much for each item besides DCP's description of it: its file, offset and length.
_STORAGE_BYTES = 120


class Preflight:
    """Says what saves will take. One per engine; for the thread that saves.

    Args:
        coordinator, directory, planner, workers: those of the engine's saves.
    """

    def __init__(
        self, coordinator: Coordinator, directory: CheckpointDirectory, planner: Planner, workers: Workers
    ) -> None:
        self._coordinator = coordinator
        self._directory = directory
        self._planner = planner
        self._workers = workers
        self._rank, self._world_size = coordinator.rank, coordinator.world_size
        self._number = 0

    def plan(self, state: Mapping[str, Any], *, probe: bool = True) -> SavePlanReport:
        """What a save of ``state`` takes. Collective; writes nothing that stays, and takes no lock.

        Args:
            state: as for ``save``.
            probe: copy and write for about a second to estimate how long a save takes.

        Raises:
            StateError: something in ``state`` can't be saved exactly, or the ranks don't agree about it: as ``save`` would.
            CommitTimeoutError: a rank was silent.
        """
        tag = self._next()
        flat = FlatState()
        blobs: dict[str, Pickled] = {}
        seconds = 0.0

        def propose() -> bytes:
            nonlocal flat, seconds
            begin = time.perf_counter()
            flat = flatten(state, rank=self._rank)
            spool = self._directory.path
            blobs.update((key, pickle_value(key, value, spool)) for key, value in flat.values.items() if is_blob(value))
            proposal = self._planner.begin(flat, 0, blobs, None)
            seconds = time.perf_counter() - begin
            return pickle.dumps(proposal)

        def judge_opening(payloads: list[bytes]) -> bytes:
            reuse = judge_begin([pickle.loads(payload) for payload in opened(payloads)])
            return pickle.dumps(reuse and self._planner.plan is not None)

        if not self._round(f"{tag}/begin", propose, judge_opening):

            def judge_plans(payloads: list[bytes]) -> bytes:
                return self._planner.judge_plan(opened(payloads))[0]

            verdict = self._round_bytes(f"{tag}/plan", lambda: self._planner.local_plan(flat, blobs), judge_plans)
        else:
            verdict = None

        def facts() -> bytes:
            if verdict is not None:
                self._planner.adopt(verdict, flat)
            if self._planner.plan is None:
                raise RuntimeError("the ranks agreed on a plan that this rank doesn't have")
            return pickle.dumps(self._facts(self._planner.plan, flat, blobs, seconds, probe))

        def judge_facts(payloads: list[bytes]) -> bytes:
            found: list[RankFacts] = [pickle.loads(payload) for payload in opened(payloads)]
            return pickle.dumps(
                judge(self._directory.path, found, existing_checkpoints(self._directory), self._workers.config)
            )

        report: SavePlanReport = self._round(f"{tag}/facts", facts, judge_facts)
        log.log(logging.WARNING if report.problems else logging.INFO, "%s", report)
        return report

    # -- this rank ------------------------------------------------------------------------------------------------------

    def _facts(
        self, plan: RankPlan, flat: FlatState, blobs: Mapping[str, Pickled], seconds: float, probe: bool
    ) -> RankFacts:
        workers, config = self._workers, self._workers.config
        problem: Problem | None = None
        try:
            workers.fit()
        except MemoryBudgetError as error:
            problem = Problem("memory", f"host memory: {error.message}", rank=self._rank)
        tensors = resolve(plan.tensors, flat)
        needs, layout = rank_needs(
            plan,
            blobs,
            Staging.of(workers),
            config,
            rank=self._rank,
            world_size=self._world_size,
            templates=TemplateCache(),
        )
        system = look_at(self._directory.path)
        speeds: Speeds | None = None
        if probe and problem is None:
            room = writable_room(
                needs.bytes, system.free, needs.memory.local_ranks, self._world_size, needs.limits.file_bytes
            )
            speeds, problem = measure(
                layout.images,
                tensors,
                workers,
                system.path,
                room=room,
                patience=min(PATIENCE, config.commit_timeout / 2),
            )
            if problem is not None:
                problem = dataclasses.replace(problem, rank=self._rank, message=f"rank {self._rank}: {problem.message}")
        return RankFacts(with_times(needs, speeds, seconds), system, metadata_bytes(plan), problem)

    # -- all ranks ------------------------------------------------------------------------------------------------------

    def _next(self) -> str:
        """Tag of the next rehearsal: later than those that the others have given up because this rank never came.

        Without this, a rank that missed one call would answer every later one a round late, for ever.
        """
        self._number += 1
        while self._coordinator.failed(f"preflight/{self._number}/begin") is not None:
            log.warning("this rank missed rehearsal %d of a save, which the others gave up", self._number)
            self._number += 1
        return f"preflight/{self._number}"

    def _round(self, tag: str, work: Callable[[], bytes], judged: Callable[[list[bytes]], bytes]) -> Any:
        return pickle.loads(self._round_bytes(tag, work, judged))

    def _round_bytes(self, tag: str, work: Callable[[], bytes], judged: Callable[[list[bytes]], bytes]) -> bytes:
        payload, original = attempt(work, rank=self._rank, step=None, phase="plan")
        alone = self._world_size == 1
        try:
            return self._coordinator.decide(tag, payload, judged, phase="plan", step=None)
        except CheckpointError as error:
            if alone:
                error.remote_traceback = None  # it isn't remote, and Python shows its own
            # With several ranks all raise the verdict; an interrupt is the trainer's own.
            if original is not None and (alone or not isinstance(original, Exception)):
                raise original from None
            raise


def existing_checkpoints(directory: CheckpointDirectory) -> list[tuple[int, int]]:
    """(step, bytes) of the committed checkpoints, the one committed last first."""
    records = ((step, directory.committed(step)) for step in directory.newest_first())
    return [(step, record.bytes) for step, record in records if record is not None]


def writable_room(nbytes: int, free: int, local_ranks: int, world_size: int, longest: int | None) -> int:
    """Bytes that a probe of one rank may write: no more than the save would, and never what could fill the disk."""
    room = min(WRITE_BYTES // local_ranks, int(free * FREE_SHARE) // world_size, max(nbytes, 8 << 20))
    return room if longest is None else min(room, longest)


def metadata_bytes(plan: RankPlan) -> int:
    """About the size of ``.metadata``; 0 where it isn't this rank that writes it."""
    if plan.metadata is None:
        return 0
    items = sum(len(tensors) + len(values) for tensors, values in plan.all_items)
    return len(pickle.dumps(plan.metadata)) + _STORAGE_BYTES * items
