"""How the ranks agree on a save before the first byte is copied.

One round when the structure is unchanged, two when it is new, over the Store. Whatever goes wrong on one rank up to here (a
value that can't be pickled, a directory that can't be made) becomes the same error on all of them, and nothing was written.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ckpt_engine.commit.coordinator import Coordinator, pack_error, unpack_error
from ckpt_engine.commit.directory import CheckpointDirectory
from ckpt_engine.errors import CheckpointError, ConfigError, StepExistsError
from ckpt_engine.planning import Planner, Proposal, RankPlan, is_blob, judge_begin, pickle_value, resolve
from ckpt_engine.spool import Pickled
from ckpt_engine.state import FlatState, flatten
from ckpt_engine.train_state import TrainState

log = logging.getLogger("ckpt_engine")

_OK, _ERROR = b"=", b"!"


def attempt(
    work: Callable[[], bytes], *, rank: int, step: int | None, phase: str
) -> tuple[bytes, BaseException | None]:
    """Runs ``work``; what it raises becomes part of the payload, so that the other ranks hear of it, an interrupt included."""
    try:
        return _OK + work(), None
    except BaseException as error:
        return _ERROR + pack_error(error, rank=rank, step=step, phase=phase), error


def opened(payloads: Sequence[bytes]) -> list[bytes]:
    """The contents of payloads made by :func:`attempt`; raises the first error among them."""
    for payload in payloads:
        if payload[:1] == _ERROR:
            raise unpack_error(payload[1:])
    return [payload[1:] for payload in payloads]


@dataclasses.dataclass(frozen=True)
class Unheard:
    """A failed save that some rank's trainer has not been told of."""

    seq: int
    error: bytes


@dataclasses.dataclass
class Agreed:
    """A save that may start: from here on the other ranks wait for this rank's vote.

    Attributes:
        seq: the number of the save that the ranks met in.
        save_id: random, the same on all ranks.
        directory: where to write.
        flat: the state; ``blobs``: its pickled values by key; ``train_state``: bytes.
        new_plan: what was decided about a new structure; ``None`` if the plan of the save before is used again.
    """

    seq: int
    save_id: str
    directory: str
    flat: FlatState
    blobs: dict[str, Pickled]
    train_state: bytes | None
    new_plan: bytes | None

    @property
    def reused(self) -> bool:
        """Whether the plan is the one of the save before."""
        return self.new_plan is None


@dataclasses.dataclass
class Adopted:
    """What this rank writes: ``tensors``, local, are parallel to the plan's."""

    plan: RankPlan
    tensors: list[torch.Tensor]


class SaveAgreement:
    """Leads the rounds. One per engine."""

    def __init__(self, coordinator: Coordinator, directory: CheckpointDirectory, planner: Planner) -> None:
        self._coordinator = coordinator
        self._directory = directory
        self._planner = planner
        self._rank = coordinator.rank
        self._locked = False
        self._seq = 0

    def next(self) -> int:
        """The number of the next save."""
        self._seq += 1
        return self._seq

    def _caught_up(self, seq: int, step: int) -> int:
        """The round to take part in: later than ``seq`` if the others have given up saves that this rank never came to.

        Without this, a rank that missed one call would answer every later one a round late, for ever.
        """
        while (missed := self._coordinator.failed(f"begin/{seq}")) is not None and missed.step != step:
            log.warning(
                "this rank missed the save of step %s, which failed on the others: %s", missed.step, missed.message
            )
            seq = self.next()
        return seq

    def agree(
        self,
        seq: int,
        state: Mapping[str, Any],
        step: int,
        train_state: TrainState | None,
        *,
        in_flight: Collection[int],
        unheard: tuple[Unheard, ...],
        ready: Callable[[], None],
    ) -> Agreed | Unheard:
        """Runs the rounds of save number ``seq``.

        Args:
            in_flight: steps that are being written.
            unheard: failures that this rank's trainer hasn't heard of.
            ready: raises if this rank can't save; then no rank does.

        Returns:
            The agreement, or the failure that every rank has to raise now instead of saving.

        Raises:
            CheckpointError: the same on every rank; on the rank where it began, the original.
        """
        seq = self._caught_up(seq, step)
        flat = FlatState()
        blobs: dict[str, Pickled] = {}
        frozen: bytes | None = None

        def propose() -> bytes:
            nonlocal flat, frozen
            ready()
            _check_arguments(step, train_state)
            flat = flatten(state, rank=self._rank)
            spool = self._directory.path
            blobs.update((key, pickle_value(key, value, spool)) for key, value in flat.values.items() if is_blob(value))
            frozen = train_state.to_bytes() if train_state is not None else None
            return pickle.dumps((self._planner.begin(flat, step, blobs, frozen), unheard))

        def judge_opening(payloads: list[bytes]) -> bytes:
            opening: list[tuple[Proposal, tuple[Unheard, ...]]] = [pickle.loads(p) for p in opened(payloads)]
            failures = [failure for _, rank_failures in opening for failure in rank_failures]
            if failures:
                return pickle.dumps(min(failures, key=lambda f: f.seq))
            reuse = judge_begin([proposal for proposal, _ in opening])
            save_id = uuid.uuid4().hex
            plan = self._planner.plan
            path = self._prepare(step, save_id, plan.digest, in_flight) if reuse and plan is not None else None
            return pickle.dumps((save_id, path))

        verdict = self._round(f"begin/{seq}", propose, judge_opening, step)
        if isinstance(verdict, Unheard):
            return verdict
        save_id, path = verdict
        plan_verdict: bytes | None = None
        if path is None:

            def judge_plans(payloads: list[bytes]) -> bytes:
                made, digest = self._planner.judge_plan(opened(payloads))
                return pickle.dumps((self._prepare(step, save_id, digest, in_flight), made))

            path, plan_verdict = self._round(
                f"plan/{seq}", lambda: self._planner.local_plan(flat, blobs), judge_plans, step
            )
        return Agreed(seq, save_id, path, flat, blobs, frozen, plan_verdict)

    def adopt(self, agreed: Agreed) -> Adopted:
        """This rank's part of the plan. What it raises is this rank's alone: the caller has to vote against the save.

        Raises:
            StateError: a tensor isn't what it said it was.
        """
        if agreed.new_plan is not None:
            self._planner.adopt(agreed.new_plan, agreed.flat)
        plan = self._planner.plan
        if plan is None:
            raise RuntimeError("the ranks agreed on a plan that this rank doesn't have")
        return Adopted(plan, resolve(plan.tensors, agreed.flat))

    def _round(self, tag: str, work: Callable[[], bytes], judge: Callable[[list[bytes]], bytes], step: int) -> Any:
        payload, original = attempt(work, rank=self._rank, step=step, phase="plan")
        try:
            return pickle.loads(self._coordinator.decide(tag, payload, judge, phase="plan", step=step))
        except CheckpointError as error:
            if self._coordinator.world_size == 1:
                error.remote_traceback = None  # it isn't remote, and Python shows its own
            # With several ranks all raise the verdict, or they would part ways here; an interrupt is the trainer's own.
            if original is not None and (self._coordinator.world_size == 1 or not isinstance(original, Exception)):
                raise original from None
            raise

    def _prepare(self, step: int, save_id: str, digest: str, in_flight: Collection[int]) -> str:
        """On rank 0: the directory to write into, made durably."""
        if step in in_flight:
            raise StepExistsError(
                f"step {step} is being written by an earlier save", step=step, phase="plan", hint="wait() for it"
            )
        record = self._directory.committed(step)
        if record is not None and record.structure_digest != digest:
            raise StepExistsError(
                f"step {step} is already committed with another structure "
                f"({record.structure_digest[:12]} on disk, {digest[:12]} now)",
                step=step,
                path=self._directory.path_of(step),
                phase="plan",
                hint="save under another step, or remove that checkpoint first",
            )
        foreign = self._directory.foreign(step)
        if foreign is not None:
            raise StepExistsError(
                f"{os.path.basename(self._directory.path_of(step))} is there and isn't ours to replace: {foreign}",
                step=step,
                path=self._directory.path_of(step),
                phase="plan",
                hint="save under another step, or move it away",
            )
        if not self._locked:
            self._directory.check_usable()
            self._directory.lock()
            self._locked = True
            for path in self._directory.clear_leftovers():
                log.warning("removed the left-over of an unfinished save: %s", path)
        return self._directory.begin(step, save_id)


def _check_arguments(step: int, train_state: TrainState | None) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
        raise ConfigError(f"step is {step!r}, expected a whole number, 0 or more", phase="config")
    if train_state is None:
        return
    if not isinstance(train_state, TrainState):
        raise ConfigError(
            f"train_state is a {type(train_state).__name__}, expected a TrainState", step=step, phase="config"
        )
    if train_state.step != step:
        raise ConfigError(
            f"train_state.step is {train_state.step}, expected {step}, the step of the save", step=step, phase="config"
        )


def warn_if_short(free: int, needed: int, step: int, path: str) -> None:
    """A full disk found before the bytes are written costs a log line instead of a save."""
    if free < needed:
        log.warning(
            "step %d needs %d bytes in %s, but the file system has %d free", step, needed, os.path.dirname(path), free
        )
