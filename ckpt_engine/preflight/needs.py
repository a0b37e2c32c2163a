"""What one rank needs, and what it finds: files to the byte, memory, limits of its process, the file system.

Pure reading: makes no file, takes no lock, maps no memory.
"""

from __future__ import annotations

import array
import dataclasses
import os
import resource
from collections.abc import Mapping, Sequence

from ckpt_engine.commit.manifest import compose_part
from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import ConfigError, StorageError
from ckpt_engine.layout.image import BlobRun
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.planning import RankPlan
from ckpt_engine.preflight.report import FileNeeds, MemoryNeeds, Problem, ProcessLimits, RankNeeds, Speeds
from ckpt_engine.saving import RankLayout
from ckpt_engine.spool import Pickled
from ckpt_engine.staging.geometry import Geometry
from ckpt_engine.staging.guard import BudgetDecision, node_identity
from ckpt_engine.workers import Workers


@dataclasses.dataclass(frozen=True)
class FileSystem:
    """What the file system says: ``path`` is the directory that was looked at, ``inodes_free`` is ``None`` where nothing limits
    them, ``writable`` what the permissions say."""

    path: str
    free: int
    total: int
    block: int
    inodes_free: int | None
    writable: bool


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """What a rank says to the others."""

    needs: RankNeeds
    system: FileSystem
    metadata_bytes: int = 0
    problem: Problem | None = None


@dataclasses.dataclass(frozen=True)
class Staging:
    """Staging memory as it is now."""

    decision: BudgetDecision
    geometry: Geometry
    budget: int
    ruled_by: str

    @classmethod
    def of(cls, workers: Workers) -> Staging:
        stats, last = workers.pool.stats(), workers.gauge.last
        decision = workers.gauge.weigh(mapped=stats.mapped, resident=stats.resident)
        pressed = last is not None and stats.budget < decision.granted
        ruled_by = last.reason if pressed and last is not None else decision.ruled_by
        return cls(decision, workers.geometry, stats.budget, ruled_by)

    def needs(self, file_bytes: Sequence[int]) -> MemoryNeeds:
        extent = self.geometry.extent_bytes
        extents = max(self.budget // extent, 1)
        wanted = sum(-(-nbytes // extent) for nbytes in file_bytes)
        share = self.decision.share
        return MemoryNeeds(
            requested=self.decision.requested,
            budget=self.budget,
            ruled_by=self.ruled_by,
            left=None if share is None else max(share - min(wanted, extents) * extent, 0),
            extent_bytes=extent,
            extents=extents,
            writers=self.geometry.writers,
            extents_needed=wanted,
            local_ranks=self.decision.local_ranks,
        )


def rank_needs(
    plan: RankPlan,
    blobs: Mapping[str, Pickled],
    staging: Staging,
    config: EngineConfig,
    *,
    rank: int,
    world_size: int,
    templates: TemplateCache,
) -> tuple[RankNeeds, RankLayout]:
    """What a save of ``plan`` writes on this rank, by the code that a save lays its files out with.

    Raises:
        StateError: torch can't write a dtype.
    """
    layout = RankLayout(plan, rank, staging.geometry.writers, templates, checksum=config.checksum)
    mine: list[list[Pickled]] = [[] for _ in layout.images]
    if plan.blobs:
        mine[layout.blob_image] = [blobs[key] for key in plan.blobs]
    runs = [BlobRun.place(image, values) for image, values in zip(layout.images, mine, strict=True)]
    sizes = [run.size for run in runs]
    count = sum(len(image.items) for image in layout.images)
    placed = [(number, start, len(blob)) for number, run in enumerate(runs) for start, blob in run.blobs]
    zeros, blob_zeros = array.array("I", bytes(4 * count)), array.array("I", bytes(4 * len(placed)))
    part = compose_part(
        layout.static,
        save_id="0" * 32,
        step=0,
        world_size=world_size,
        file_bytes=sizes,
        crcs=zeros,
        frame_crcs=zeros,
        blobs=[(key, *place) for key, place in zip(plan.blobs, placed, strict=True)],
        blob_crcs=blob_zeros,
        blob_frame_crcs=blob_zeros,
    )
    heaviest = max(range(len(plan.specs)), key=lambda n: _payload(plan, n), default=None)
    needs = RankNeeds(
        rank=rank,
        node=node_identity(),
        files=tuple(FileNeeds(image.name, nbytes) for image, nbytes in zip(layout.images, sizes, strict=True)),
        other_bytes=len(part),
        tensors=len(plan.specs),
        values=len(plan.blobs),
        value_bytes=sum(length for _, _, length in placed),
        largest=plan.tensors.keys[heaviest] if heaviest is not None else "",
        largest_bytes=_payload(plan, heaviest) if heaviest is not None else 0,
        memory=staging.needs(sizes),
        limits=process_limits(),
    )
    return needs, layout


def _payload(plan: RankPlan, number: int) -> int:
    spec = plan.specs[number]
    count = spec.dtype.itemsize
    for length in spec.shape:
        count *= length
    return count


def with_times(needs: RankNeeds, speeds: Speeds | None, plan_seconds: float) -> RankNeeds:
    """The same with the estimates that the speeds allow.

    ``save()`` copies; what doesn't fit into the staging memory waits for as many bytes to be written. Durable is whatever takes
    longer, copying or writing, since both go on at the same time, and the commit.
    """
    if speeds is None:
        return dataclasses.replace(needs, plan_seconds=plan_seconds)
    writing = _seconds(needs.bytes, speeds.write)

    def stall(copy: float | None) -> float | None:
        copying = _seconds(needs.bytes - needs.value_bytes if needs.tensors else 0, copy)
        if copying is None or not needs.memory.streams:
            return None if copying is None else plan_seconds + copying
        if writing is None:
            return None
        staged = min(needs.memory.bytes / max(needs.bytes, 1), 1.0)
        return plan_seconds + max(copying, copying * staged + writing * (1.0 - staged))

    copying = _seconds(needs.bytes - needs.value_bytes if needs.tensors else 0, speeds.copy)
    durable = (
        None if copying is None or writing is None else plan_seconds + max(copying, writing) + speeds.write_overhead
    )
    return dataclasses.replace(
        needs,
        plan_seconds=plan_seconds,
        speeds=speeds,
        stall_seconds=stall(speeds.copy),
        durable_seconds=durable,
        first_stall_seconds=stall(speeds.copy_first),
    )


def _seconds(nbytes: int, speed: float | None) -> float | None:
    if nbytes == 0:
        return 0.0
    return None if speed is None else nbytes / speed


# -- this process and this machine -------------------------------------------------------------------------------------


def process_limits() -> ProcessLimits:
    """Limits of this process, as they are now."""
    longest, descriptors = resource.getrlimit(resource.RLIMIT_FSIZE)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        in_use = len(os.listdir("/proc/self/fd"))
    except OSError:
        in_use = 0
    return ProcessLimits(
        None if longest == resource.RLIM_INFINITY else longest,
        None if descriptors == resource.RLIM_INFINITY else descriptors,
        in_use,
    )


def look_at(path: str) -> FileSystem:
    """The file system that a checkpoint directory lies on, or will lie on if it doesn't exist yet.

    Raises:
        ConfigError: the path is taken by something that isn't a directory.
        StorageError: the file system doesn't answer.
    """
    there = path
    while not os.path.isdir(there):
        if os.path.lexists(there):
            raise ConfigError(
                "the checkpoint directory is not a directory",
                path=there,
                phase="config",
                hint="give a directory that this user may write to",
            )
        there = os.path.dirname(there)
    try:
        facts = os.statvfs(there)
    except OSError as error:
        raise StorageError(
            f"the file system can't be asked for its room: {error.strerror}",
            path=there,
            phase="plan",
            errno=error.errno,
        ) from error
    return FileSystem(
        path=there,
        free=facts.f_bavail * facts.f_frsize,
        total=facts.f_blocks * facts.f_frsize,
        block=max(facts.f_frsize, 512),
        inodes_free=facts.f_favail if facts.f_files else None,  # btrfs and many network file systems say 0 of 0
        writable=os.access(there, os.W_OK | os.X_OK),
    )
