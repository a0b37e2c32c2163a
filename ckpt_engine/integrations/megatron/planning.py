"""How the ranks of a Megatron save agree on it: one round over the Store while the structure stays the same, two when it is new.

Megatron's own planning gathers every rank's plan and every rank's write results at every save. Here a rank says which plan
it knows for its structure. If all name the same one it is used again; if not, rank 0 gets the chunks of all ranks once,
checks that they cover every tensor exactly once, and makes the metadata. A structure is compared by names, offsets, shapes and
dtypes, never assumed to be constant: a key that appears later is written, not forgotten.

What goes wrong on one rank up to here (a value that can't be pickled, no such directory, shards that overlap) is the same
typed error on all of them, and nothing was written.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import pickle
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_engine.agreeing import attempt, opened
from ckpt_engine.commit.manifest import COMMIT_NAME
from ckpt_engine.commit.names import PART_DIRECTORY
from ckpt_engine.coverage import Chunk, coverage_problems
from ckpt_engine.errors import CheckpointError, ConfigError, StateError
from ckpt_engine.integrations.megatron.items import Content
from ckpt_engine.integrations.megatron.layouts import FileLayout, Wanted, lay_out
from ckpt_engine.integrations.megatron.places import place_of
from ckpt_engine.integrations.megatron.session import Core, Session, step_of
from ckpt_engine.state import collector_paused
from ckpt_engine.storage.place import LocalPlace, Place

#: Structures whose plan is kept: a trainer saves one, verl three per step.
_PLANS = 8

#: Problems that an error lists; more of them have the same cause.
_SHOWN = 20

_NUMBERED = re.compile(r"__[0-9]+_([0-9]{1,9})\.distcp")


@dataclasses.dataclass
class Planned:
    """What rank 0 composes ``.metadata`` from: see :class:`ckpt_engine.committing.MetadataComposer`."""

    plan_id: str
    metadata: Metadata | None
    all_items: list[tuple[list[MetadataIndex], list[MetadataIndex]]]


@dataclasses.dataclass(eq=False)
class Plan:
    """What a rank writes for one structure.

    Attributes:
        plan_id: the same on every rank.
        chunks, odd, objects: the structure, as in :class:`Content`; ``wanted``: the files.
        planned: on rank 0, for the metadata.
        layouts: by number of the first file.
    """

    plan_id: str
    chunks: list[Chunk]
    odd: list[Chunk]
    objects: list[str]
    wanted: Wanted
    planned: Planned
    layouts: dict[int, FileLayout] = dataclasses.field(default_factory=dict)

    @property
    def value_names(self) -> list[str]:
        """Keys of the pickled values, in the order of :attr:`Content.values`."""
        return self.objects + [chunk.key for chunk in self.odd]

    def fits(self, content: Content, wanted: Wanted) -> bool:
        """Whether this is the plan of that structure."""
        return (
            wanted == self.wanted
            and content.objects == self.objects
            and content.chunks == self.chunks
            and content.odd == self.odd
        )

    def layout(self, core: Core, rank: int, first: int) -> FileLayout:
        """Where everything goes, if the files are numbered from ``first``."""
        found = self.layouts.get(first)
        if found is None:
            found = lay_out(
                self.chunks,
                self.value_names,
                self.wanted,
                core.templates,
                rank=rank,
                first=first,
                checksum=core.config.checksum,
            )
            if len(self.layouts) > 1:  # a directory that is saved into again and again counts on
                self.layouts.pop(next(iter(self.layouts)))
            self.layouts[first] = found
        return found


@dataclasses.dataclass(frozen=True)
class Opening:
    """A save that the ranks have agreed on.

    Attributes:
        number: counts the saves of the process group.
        save_id: random, the same on all ranks.
        place: the checkpoint directory.
        first: number of the first shard file.
        train_state: content of ``train_state.pt``.
    """

    number: int
    save_id: str
    place: Place
    step: int
    first: int
    plan: Plan
    content: Content
    train_state: bytes | None


def open_save(
    core: Core,
    session: Session,
    state: Any,
    directory: Any,
    *,
    wanted: Wanted,
    settings: str,
    train_state: Callable[[str], bytes | None],
) -> Opening:
    """Opens a save: all ranks call this in the same order.

    Args:
        state: the sharded state dict.
        settings: has to be the same on all ranks.
        train_state: makes the content of ``train_state.pt`` for the directory.

    Raises:
        CommitTimeoutError: a rank doesn't take part: the engine isn't in use there.
        CheckpointError: the same on every rank; names the rank where it happened.
    """
    step = step_of(os.fspath(directory))
    content: Content | None = None
    place: Place | None = None
    progress: bytes | None = None

    def propose() -> bytes:
        nonlocal content, place, progress
        place = place_of(directory)
        progress = train_state(place.path)
        content = Content.of(state, place.path if isinstance(place, LocalPlace) else None)
        known = next((plan for plan in reversed(core.plans) if plan.fits(content, wanted)), None)
        return pickle.dumps((None if known is None else known.plan_id, settings, place.path))

    def judge_opening(payloads: list[bytes]) -> bytes:
        proposals = [pickle.loads(payload) for payload in opened(payloads)]
        _same("settings", [proposal[1] for proposal in proposals])
        _same("directories", [proposal[2] for proposal in proposals])
        plan_ids = {proposal[0] for proposal in proposals}
        plan_id = plan_ids.pop() if len(plan_ids) == 1 else None
        return pickle.dumps((uuid.uuid4().hex, plan_id, _prepare(place or place_of(directory))))

    with collector_paused():
        number = session.next_number(step)
        payload, original = attempt(propose, rank=session.rank, step=step, phase="plan")
        try:
            save_id, plan_id, first = pickle.loads(session.open(f"open/{number}", payload, judge_opening, step))
            if content is None or place is None:
                raise RuntimeError("the ranks agreed on a save that this rank has not described")
            if plan_id is None:
                plan = _plan_anew(session, number, step, content, wanted)
            else:
                plan = next(plan for plan in core.plans if plan.plan_id == plan_id)
                core.plans.remove(plan)
        except CheckpointError:
            # With several ranks all raise the verdict; an interrupt is the trainer's own.
            if original is not None and (session.world_size == 1 or not isinstance(original, Exception)):
                raise original from None
            raise
        del core.plans[: len(core.plans) + 1 - _PLANS]
        core.plans.append(plan)
    return Opening(number, save_id, place, step, first, plan, content, progress)


def _same(what: str, values: Sequence[str]) -> None:
    if len(set(values)) > 1:
        shown = dict(enumerate(values))
        raise ConfigError(
            f"the ranks save with different {what}: {shown}",
            phase="plan",
            hint="save with the same engine settings, and into the same directory, on every rank",
        )


def _prepare(place: Place) -> int:
    """Makes the directory if it isn't there. Returns the number of the first shard file.

    A directory that holds a checkpoint keeps it until the new one commits: its files keep their names, the new ones get others.
    """
    place.make()
    names = place.names()
    if ".metadata" not in names and not place.exists(f"{PART_DIRECTORY}/{COMMIT_NAME}"):
        return 0
    return 1 + max((int(match[1]) for name in names if (match := _NUMBERED.search(name))), default=-1)


def _plan_anew(session: Session, number: int, step: int, content: Content, wanted: Wanted) -> Plan:
    planned = Planned("", None, [])

    def describe() -> bytes:
        return pickle.dumps((content.chunks, content.odd, content.objects, content.originals))

    def judge(payloads: list[bytes]) -> bytes:
        nonlocal planned
        ranks = [pickle.loads(payload) for payload in opened(payloads)]
        planned = _metadata(ranks, complete=wanted.complete)
        return planned.plan_id.encode()

    payload, _ = attempt(describe, rank=session.rank, step=step, phase="plan")
    plan_id = session.open(f"plan/{number}", payload, judge, step).decode()
    planned.plan_id = plan_id
    return Plan(plan_id, content.chunks, content.odd, content.objects, wanted, planned)


def _metadata(ranks: Sequence[Any], *, complete: bool) -> Planned:
    """DCP's metadata, without storage data, of what all ranks hold.

    Raises:
        StateError: shards overlap or leave something out, or two ranks write the same object; a line for each key.
    """
    chunks: dict[str, list[tuple[Chunk, int]]] = {}
    objects: dict[str, list[int]] = {}
    all_items = []
    originals: dict[str, tuple[int, ...]] = {}
    for rank, (plain, odd, names, flattened) in enumerate(ranks):
        for chunk in (*plain, *odd):
            chunks.setdefault(chunk.key, []).append((chunk, rank))
        for name in names:
            objects.setdefault(name, []).append(rank)
        originals.update(flattened)
        values = [MetadataIndex(name) for name in names] + [chunk.dcp_index for chunk in odd]
        all_items.append(([chunk.dcp_index for chunk in plain], values))
    problems = [problem for key, held in chunks.items() for problem in coverage_problems(key, held)]
    problems += [f"{name!r} is written by ranks {held}" for name, held in objects.items() if len(held) > 1]
    if complete:
        problems += _missing_objects(objects)
    problems += [f"{key!r} is a tensor on one rank and an object on another" for key in chunks.keys() & objects.keys()]
    if problems:
        more = f"\n... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StateError(
            "the shards of the ranks don't make up the tensors:\n" + "\n".join(problems[:_SHOWN]) + more,
            key=problems[0].split("'")[1],
            phase="plan",
            hint="look at the offsets and replica_id of these ShardedTensors",
        )
    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in objects}
    for key, held in chunks.items():
        one = held[0][0]
        entries[key] = TensorStorageMetadata(
            TensorProperties(dtype=one.dtype),
            torch.Size(one.size),
            [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.sizes)) for chunk, _ in held],
        )
    metadata = Metadata(entries)
    if originals:
        # Loaders before megatron-core 0.16 look here for the shape that a flattened tensor had.
        metadata.mcore_data = {key: {"nd_reformulated_orig_global_shape": shape} for key, shape in originals.items()}  # type: ignore[attr-defined]
    return Planned(uuid.uuid4().hex, metadata, all_items)


def _missing_objects(names: Iterable[str]) -> list[str]:
    """Objects of which a shard is on no rank: unique keys end in ``/shard_<offset>_<shape>``."""
    counts: dict[tuple[str, str], int] = collections.Counter()
    for name in names:
        key, _, place = name.rpartition("/shard_")
        counts[key, place.partition("_")[2]] += 1
    problems = []
    for (key, shape), count in counts.items():
        wanted = math.prod(int(size) for size in shape.split(".") if size)
        if key and count != wanted:
            problems.append(f"{key!r} has {count} of {wanted} shards")
    return problems


def check_state(session: Session, state: Any) -> None:
    """What a save of this sharded state dict would refuse, without one: nothing is read, written or kept. Collective.

    Raises:
        StateError: the same on every rank; a line for each tensor or object.
    """

    def judge(payloads: list[bytes]) -> bytes:
        _metadata([pickle.loads(payload) for payload in opened(payloads)], complete=True)
        return b""

    def describe() -> bytes:
        from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

        # On copies of the containers: factories are replaced in place by what they build, which a later save must not find.
        sharded, _ = save_preprocess(_containers(state), False)
        content = Content.of(sharded)
        return pickle.dumps((content.chunks, content.odd, content.objects, content.originals))

    payload, original = attempt(describe, rank=session.rank, step=None, phase="plan")
    try:
        session.open(f"check/{session.next_check()}", payload, judge, 0)
    except CheckpointError:
        if original is not None and (session.world_size == 1 or not isinstance(original, Exception)):
            raise original from None
        raise


def _containers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _containers(part) for key, part in value.items()}
    return [_containers(part) for part in value] if isinstance(value, list) else value
