"""The same report for a save that nobody has a state for yet: of a size, or like a checkpoint that exists.

Lays out files for made-up tensors by the code of a save, and measures on this machine with one process. What that can't know
stands in the notes: how the storage serves several nodes, and the memory that a trainer will take.

A checkpoint is looked at through its ``.metadata`` alone, which is unpickled by :mod:`ckpt_engine.restore.unpickle`: no code
from it runs, and its shard files needn't be there.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckpt_engine.commit.directory import CheckpointDirectory
from ckpt_engine.config import MIB, MIN_BUDGET_BYTES, EngineConfig
from ckpt_engine.errors import CorruptionError, MemoryBudgetError, NotCommittedError
from ckpt_engine.layout.image import TensorSpec
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.planning import Outgoing, RankPlan
from ckpt_engine.preflight.judging import judge
from ckpt_engine.preflight.needs import RankFacts, Staging, look_at, rank_needs, with_times
from ckpt_engine.preflight.probe import COPY_BYTES, measure
from ckpt_engine.preflight.report import FileNeeds, Problem, RankNeeds, SavePlanReport, Speeds
from ckpt_engine.preflight.rounds import existing_checkpoints, writable_room
from ckpt_engine.restore.files import CheckpointFiles
from ckpt_engine.restore.unpickle import load_metadata
from ckpt_engine.saving import RankLayout
from ckpt_engine.spool import Pickled
from ckpt_engine.staging.geometry import choose_geometry
from ckpt_engine.staging.guard import weigh_budget
from ckpt_engine.workers import Workers

log = logging.getLogger("ckpt_engine")

_METADATA = ".metadata"
_SHARD_OF_RANK = re.compile(r"__([0-9]{1,6})_")

#: Memory that the copies of the probe read from.
_SOURCE_BYTES = 64 * MIB

#: ``.metadata`` holds about so much for each tensor or value.
_METADATA_BYTES = 400


@dataclasses.dataclass(frozen=True)
class RankShapes:
    """What one rank writes: (key, shape, dtype) of each tensor, (key, bytes) of each pickled value."""

    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]]
    values: Sequence[tuple[str, int]] = ()

    def plan(self) -> tuple[RankPlan, dict[str, Pickled]]:
        """A plan to lay out, and stand-ins for the values."""
        plan = RankPlan(
            plan_id="",
            structure=[],
            tensors=Outgoing([key for key, _, _ in self.tensors], [None] * len(self.tensors), {}),
            specs=[TensorSpec(shape, dtype) for _, shape, dtype in self.tensors],
            blobs=[key for key, _ in self.values],
            digest="",
            groups=[],
        )
        # Nobody asks for more of a value than its length, and a damaged file may say that it has a terabyte.
        return plan, {key: cast("bytes", range(nbytes)) for key, nbytes in self.values}


def shapes_of_size(nbytes: int, tensors: int, ranks: int) -> list[RankShapes]:
    """A checkpoint of ``nbytes``, split evenly over the ranks, ``tensors`` of one size on each of them."""
    mine = nbytes // ranks
    count = max(1, min(tensors, mine))
    each, rest = divmod(mine, count)
    made = [(f"tensor{number}", (each + (number < rest),), torch.uint8) for number in range(count)]
    return [RankShapes(made)] * ranks


def shapes_like(path: str, ranks: int | None) -> list[RankShapes]:
    """What the ranks that wrote a checkpoint wrote; or, with another number of ranks, every tensor split over all of them.

    Args:
        path: a checkpoint of ours, of stock DCP or of Megatron, or a directory of them, of which the newest counts.

    Raises:
        NotCommittedError: there is no ``.metadata``.
        CheckpointError: it is damaged, or names something that isn't let through.
    """
    where = _find(path)
    files = CheckpointFiles(where, step=None, phase="plan")
    metadata = load_metadata(files.read(_METADATA), path=os.path.join(where, _METADATA), step=None)
    try:
        found = _as_written(metadata)
        if ranks is not None and ranks != len(found):
            found = _split(metadata, found, ranks)
    except (TypeError, AttributeError, ValueError, KeyError) as error:
        raise CorruptionError(
            f"{_METADATA} doesn't describe its tensors: {error}", file=_METADATA, path=where, phase="plan"
        ) from error
    if files.exists("common.pt"):  # Megatron's: pickled by rank 0 next to the shards
        first = found[0]
        found[0] = RankShapes(first.tensors, [*first.values, ("common.pt", files.locate("common.pt")[1])])
    return found


def _find(path: str) -> str:
    """The checkpoint that is meant: ``path`` itself, or the newest one in it."""
    root = os.path.abspath(path)
    if os.path.lexists(os.path.join(root, _METADATA)):
        return root
    directory = CheckpointDirectory(root)
    for step in [*directory.newest_first(), directory.tracked_step(), *directory.unverified_steps()[::-1]]:
        if step is not None and os.path.lexists(os.path.join(directory.path_of(step), _METADATA)):
            return directory.path_of(step)
    raise NotCommittedError(
        f"there is no {_METADATA} here, nor in a checkpoint below",
        path=root,
        phase="plan",
        hint="give a checkpoint of this engine, of torch.distributed.checkpoint, or of Megatron's torch_dist format",
    )


def _as_written(metadata: Metadata) -> list[RankShapes]:
    """By the files' names, ``__<rank>_<n>.distcp``; what lies in others counts for rank 0."""
    tensors: dict[int, list[tuple[str, tuple[int, ...], torch.dtype]]] = {}
    values: dict[int, list[tuple[str, int]]] = {}
    chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    seen: set[tuple[str, int]] = set()
    storage: Mapping[Any, Any] = metadata.storage_data
    for index, place in storage.items():
        if (place.relative_path, place.offset) in seen:
            continue  # tied tensors share one record
        seen.add((place.relative_path, place.offset))
        match = _SHARD_OF_RANK.match(os.path.basename(place.relative_path))
        rank = int(match[1]) if match is not None else 0
        entry = metadata.state_dict_metadata[index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            values.setdefault(rank, []).append((index.fqn, _whole(place.length)))
            continue
        if index.fqn not in chunks:
            chunks[index.fqn] = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        offset = (0,) * len(entry.size) if index.offset is None else tuple(index.offset)
        shape = tuple(_whole(length) for length in chunks[index.fqn][offset])
        tensors.setdefault(rank, []).append((index.fqn, shape, _dtype(entry)))
    ranks = max([*tensors, *values], default=0) + 1
    return [RankShapes(tensors.get(rank, []), values.get(rank, [])) for rank in range(ranks)]


def _split(metadata: Metadata, written: Sequence[RankShapes], ranks: int) -> list[RankShapes]:
    tensors = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            count = math.prod(_whole(length) for length in entry.size)
            tensors.append((key, (-(-count // ranks),), _dtype(entry)))
    values = [value for shapes in written for value in shapes.values]
    return [RankShapes(tensors, values), *[RankShapes(tensors)] * (ranks - 1)]


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 60:
        raise ValueError(f"{value!r} is no size")
    return value


def _dtype(entry: TensorStorageMetadata) -> torch.dtype:
    dtype = entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    return dtype


# -- the report ----------------------------------------------------------------------------------------------------------


def estimate(
    directory: str,
    shapes: Sequence[RankShapes],
    config: EngineConfig,
    *,
    local_ranks: int = 1,
    probe: bool = True,
) -> SavePlanReport:
    """What a save of these shapes takes in ``directory``, as far as one process on this machine can tell.

    Args:
        directory: where checkpoints will go; needn't exist.
        shapes: one for each rank.
        local_ranks: how many of them run on this machine.

    Raises:
        ConfigError: the directory can't be one.
    """
    target = CheckpointDirectory(directory)
    system = look_at(target.path)
    workers: Workers | None = None
    problem: Problem | None = None
    try:
        workers = Workers(config, local_ranks=local_ranks)
        staging = Staging.of(workers)
    except MemoryBudgetError as error:
        problem = Problem("memory", f"host memory: {error.message}")
        decision = weigh_budget(config.staging_budget, local_ranks=local_ranks)
        geometry = choose_geometry(max(decision.granted, MIN_BUDGET_BYTES), config.extent_bytes, config.writers)
        staging = Staging(decision, geometry, decision.granted, decision.ruled_by)
    try:
        needs = _all_needs(shapes, staging, config)
        largest = max(range(len(needs)), key=lambda rank: needs[rank].bytes)
        speeds: Speeds | None = None
        if probe and workers is not None and problem is None and system.writable:
            longest = needs[largest].limits.file_bytes
            room = writable_room(needs[largest].bytes, system.free, 1, 1, longest)
            images, tensors = _samples(shapes[largest], staging, config)
            measured, problem = measure(images, tensors, workers, system.path, room=room)
            speeds = _shared(measured, local_ranks, workers.copy_threads)
        items = sum(len(mine.tensors) + len(mine.values) for mine in shapes)
        facts = [
            RankFacts(
                with_times(mine, speeds, 0.0),
                system,
                metadata_bytes=_METADATA_BYTES * items if mine.rank == 0 else 0,
                problem=problem if mine.rank == 0 else None,
            )
            for mine in needs
        ]
        report = judge(target.path, facts, existing_checkpoints(target), config)
        return dataclasses.replace(report, notes=(*report.notes, *_notes(len(shapes), local_ranks, speeds)))
    finally:
        if workers is not None:
            workers.close(0.0)


def _all_needs(shapes: Sequence[RankShapes], staging: Staging, config: EngineConfig) -> list[RankNeeds]:
    templates = TemplateCache()
    known: dict[int, RankNeeds] = {}  # ranks that write the same are laid out once
    found = []
    for rank, mine in enumerate(shapes):
        if id(mine) not in known:
            plan, blobs = mine.plan()
            known[id(mine)], _ = rank_needs(
                plan, blobs, staging, config, rank=rank, world_size=len(shapes), templates=templates
            )
        needs = known[id(mine)]
        files = tuple(FileNeeds(f"__{rank}_{number}.distcp", file.bytes) for number, file in enumerate(needs.files))
        found.append(dataclasses.replace(needs, rank=rank, files=files))
    return found


def _samples(shapes: RankShapes, staging: Staging, config: EngineConfig) -> tuple[list[Any], list[torch.Tensor]]:
    """Files for the copies of the probe: tensors as large as the average one, all the same bytes."""
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in shapes.tensors]
    each = max(1, min(sum(sizes) // max(len(sizes), 1), _SOURCE_BYTES))
    count = max(1, min(len(sizes), COPY_BYTES // each))
    source = torch.frombuffer(bytearray(os.urandom(MIB)), dtype=torch.uint8).repeat(-(-each // MIB))[:each]
    plan, _ = RankShapes([(f"{number}", (each,), torch.uint8) for number in range(count)]).plan()
    layout = RankLayout(plan, 0, staging.geometry.writers, TemplateCache(), checksum=config.checksum)
    return layout.images, [source] * count


def _shared(speeds: Speeds, local_ranks: int, copy_threads: int) -> Speeds:
    """The speeds of one of several ranks on this machine, which share its storage and its cores."""
    cores = min(1.0, (os.cpu_count() or 1) / (local_ranks * copy_threads))
    return dataclasses.replace(
        speeds,
        copy=None if speeds.copy is None else speeds.copy * cores,
        copy_first=None if speeds.copy_first is None else speeds.copy_first * cores,
        write=None if speeds.write is None else speeds.write / local_ranks,
    )


def _notes(ranks: int, local_ranks: int, speeds: Speeds | None) -> list[str]:
    notes = ["host memory is what is free now: what the trainer will take is not in it"]
    if speeds is not None and local_ranks > 1:
        notes.append(f"measured with one process; {local_ranks} ranks of this machine are taken to share the speed")
    if speeds is not None and ranks > local_ranks:
        nodes = -(-ranks // local_ranks)
        notes.append(f"the storage is taken to serve each of {nodes} nodes as fast as it served this one alone")
    return notes
