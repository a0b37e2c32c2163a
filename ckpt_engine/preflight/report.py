"""What a save will take: the values of a plan report, and how they are told to people.

::

    RankNeeds  one per rank: files, items, memory, limits of the process, speeds
    DiskNeeds  one: bytes and inodes, retention included
    Problem    what makes the save impossible, with how much is missing
    SavePlanReport = all of them + verdict + times

Frozen values only. Nothing here looks at the machine; what is not known is ``None``, never a guess that looks like a fact.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Verdict = Literal["fits", "fits by streaming", "does not fit"]

#: What a plan says of disk quotas: the standard library can't ask, and a wrong answer would be worse than none.
QUOTA = "not checked"


@dataclasses.dataclass(frozen=True)
class FileNeeds:
    """A shard file: ``name``, size in ``bytes``."""

    name: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryNeeds:
    """Staging memory of a rank. Sizes in bytes.

    Attributes:
        requested: ``staging_budget`` of the config; ``budget``: what it comes to now; ``ruled_by``: the limit that decided.
        left: what the tightest limit leaves this rank once the staging memory of this save is in use; ``None`` if no
            limit could be read.
        extent_bytes, extents, writers: how the budget is cut up.
        extents_needed: extents that would hold all of the rank's files at once.
        local_ranks: ranks that share the node.
    """

    requested: int | Literal["auto"]
    budget: int
    ruled_by: str
    left: int | None
    extent_bytes: int
    extents: int
    writers: int
    extents_needed: int
    local_ranks: int

    @property
    def streams(self) -> bool:
        """Whether the files don't fit into the budget at once, so that ``save()`` waits for writes."""
        return self.extents_needed > self.extents

    @property
    def bytes(self) -> int:
        """Staging memory that the save will use."""
        return min(self.extents_needed, self.extents) * self.extent_bytes


@dataclasses.dataclass(frozen=True)
class ProcessLimits:
    """Limits of a rank's process, ``None`` where there is none: longest file (RLIMIT_FSIZE), descriptors (RLIMIT_NOFILE)
    and how many of those are open now."""

    file_bytes: int | None
    descriptors: int | None
    descriptors_open: int


@dataclasses.dataclass(frozen=True)
class Speeds:
    """What a short probe measured on a rank, all ranks at the same time. Bytes per second.

    Attributes:
        copy: into staging memory, by the engine's copy threads; ``None`` if there was nothing to copy. ``copy_first``: into
            memory that is used for the first time, as in a first save.
        write: to the target directory, by the engine's writer threads; ``None`` if nothing could be written.
        write_overhead: seconds that a save takes there whatever its size: making files, fsync.
        direct: whether O_DIRECT was used.
        copied, written: bytes that the probe moved; ``seconds``: time that it took.
        note: why something wasn't measured.
    """

    copy: float | None
    copy_first: float | None
    write: float | None
    write_overhead: float
    direct: bool
    copied: int
    written: int
    seconds: float
    note: str = ""


@dataclasses.dataclass(frozen=True)
class RankNeeds:
    """What one rank will write, and what it has to do that with.

    Attributes:
        files: its shard files; ``bytes`` is their sum.
        other_bytes: its part manifest and, on rank 0, about what the metadata takes.
        tensors, values: number of tensors and of pickled values that it writes; ``value_bytes`` is the size of the latter.
        largest: key of its largest tensor, ``largest_bytes`` the size.
        plan_seconds: time that this rank spent on flattening and pickling, which each save does again.
        stall_seconds, durable_seconds: length of the ``save()`` call, and time until the bytes are durable; estimates.
            ``first_stall_seconds``: of the first save, which also makes its plan and touches its staging memory.
    """

    rank: int
    node: str
    files: tuple[FileNeeds, ...]
    other_bytes: int
    tensors: int
    values: int
    value_bytes: int
    largest: str
    largest_bytes: int
    memory: MemoryNeeds
    limits: ProcessLimits
    plan_seconds: float = 0.0
    speeds: Speeds | None = None
    stall_seconds: float | None = None
    durable_seconds: float | None = None
    first_stall_seconds: float | None = None

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclasses.dataclass(frozen=True)
class DiskNeeds:
    """Room on the file system of the checkpoint directory. Sizes in bytes.

    Attributes:
        path: what was looked at: the directory, or the nearest one above it that exists.
        checkpoint: one checkpoint, small files and half-filled blocks included.
        held: checkpoints that are there at the same time at the worst moment; ``None``: nothing is ever removed.
        needed: bytes that have to be free now for the saves to come, with what retention removes on the way counted as free;
            without retention, one checkpoint.
        existing: bytes of the committed checkpoints that are there.
        free: free for this user; ``total``: size of the file system.
        room_for: checkpoints that fit into ``free``.
        inodes_needed, inodes_free: files and directories; ``None`` where the file system has no such limit.
        quota: what is known of a disk quota.
    """

    path: str
    checkpoint: int
    held: int | None
    needed: int
    existing: int
    free: int
    total: int
    inodes_needed: int
    inodes_free: int | None
    quota: str = QUOTA

    @property
    def room_for(self) -> int:
        return self.free // max(self.checkpoint, 1)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why it doesn't fit: ``what`` is short of ``missing`` ``unit``; ``rank`` where it is one rank's."""

    what: Literal["disk", "inodes", "memory", "file size", "descriptors", "storage"]
    message: str
    missing: int = 0
    unit: str = "bytes"
    rank: int | None = None


@dataclasses.dataclass(frozen=True)
class SavePlanReport:
    """What a save of this state will take. The same on every rank. ``str()`` of it is a short table.

    Attributes:
        directory: where checkpoints go.
        verdict: "fits": ``save()`` returns when the state is copied; "fits by streaming": the state is larger than some
            rank's staging budget, so ``save()`` waits for the storage to take the difference; "does not fit": see
            ``problems``.
        problems: what makes a save impossible; ``notes``: what else is worth knowing.
        ranks: per rank, in order.
        disk: room on the file system.
    """

    directory: str
    verdict: Verdict
    ranks: tuple[RankNeeds, ...]
    disk: DiskNeeds
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of all ranks' shard files: ``CheckpointInfo.bytes`` of the save."""
        return sum(rank.bytes for rank in self.ranks)

    @property
    def missing_bytes(self) -> int:
        """The largest lack of bytes among the problems."""
        return max((problem.missing for problem in self.problems if problem.unit == "bytes"), default=0)

    @property
    def stall_seconds(self) -> float | None:
        """Estimated length of the ``save()`` call, on the slowest rank."""
        return _slowest([rank.stall_seconds for rank in self.ranks])

    @property
    def first_stall_seconds(self) -> float | None:
        """The same for the first save, whose staging memory is fresh."""
        return _slowest([rank.first_stall_seconds for rank in self.ranks])

    @property
    def durable_seconds(self) -> float | None:
        """Estimated time from the call until all bytes are durable, on the slowest rank."""
        return _slowest([rank.durable_seconds for rank in self.ranks])

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        found = dataclasses.asdict(self)
        for values, rank in zip(found["ranks"], self.ranks, strict=True):
            values["bytes"] = rank.bytes
            values["memory"] |= {"streams": rank.memory.streams, "bytes": rank.memory.bytes}
        found["disk"]["room_for"] = self.disk.room_for
        return found | {
            "bytes": self.bytes,
            "missing_bytes": self.missing_bytes,
            "stall_seconds": self.stall_seconds,
            "first_stall_seconds": self.first_stall_seconds,
            "durable_seconds": self.durable_seconds,
        }

    def rows(self) -> list[tuple[str, str]]:
        """The table: (what, in words)."""
        return [
            ("checkpoint", self._checkpoint()),
            ("largest rank", _largest_rank(self.ranks)),
            ("largest file", _largest_file(self.ranks)),
            ("host memory", _memory(self.ranks)),
            ("disk", _disk(self.disk)),
            ("time", self._time()),
            *(("problem", problem.message) for problem in self.problems),
            *(("note", note) for note in self.notes),
        ]

    @property
    def title(self) -> str:
        return f"save to {self.directory}: {self.verdict}"

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {what:<13} {words}" for what, words in self.rows())])

    def _checkpoint(self) -> str:
        files, tensors = sum(len(rank.files) for rank in self.ranks), sum(rank.tensors for rank in self.ranks)
        values, value_bytes = sum(rank.values for rank in self.ranks), sum(rank.value_bytes for rank in self.ranks)
        return (
            f"{size(self.bytes)} in {files:,} shard files of {len(self.ranks):,} ranks: {tensors:,} tensors, "
            f"{values:,} pickled values ({size(value_bytes)})"
        )

    def _time(self) -> str:
        stall, first, durable = self.stall_seconds, self.first_stall_seconds, self.durable_seconds
        if stall is None and durable is None:
            return "not measured"
        held = "save() takes an unknown time" if stall is None else f"save() takes about {stall:.2g} s"
        held += f" (the first one {first:.2g} s)" if stall is not None and first is not None else ""
        done = "an unknown time" if durable is None else f"about {durable:.2g} s"
        copy = _lowest([rank.speeds.copy for rank in self.ranks if rank.speeds is not None])
        write = _lowest([rank.speeds.write for rank in self.ranks if rank.speeds is not None])
        return f"{held}, durable after {done} (per rank: copies {_rate(copy)}, writes {_rate(write)})"


def _largest_rank(ranks: tuple[RankNeeds, ...]) -> str:
    rank = max(ranks, key=lambda r: r.bytes)
    tensor = f"; its largest tensor {rank.largest!r} has {size(rank.largest_bytes)}" if rank.largest else ""
    return f"rank {rank.rank} writes {size(rank.bytes)}{tensor}"


def _largest_file(ranks: tuple[RankNeeds, ...]) -> str:
    found = [(file.bytes, file.name, rank.limits) for rank in ranks for file in rank.files]
    if not found:
        return "none: there is nothing to write"
    nbytes, name, limits = max(found, key=lambda entry: entry[0])
    bound = "no limit" if limits.file_bytes is None else f"limit {size(limits.file_bytes)}"
    return f"{name}, {size(nbytes)} ({bound} for a file, {limits.descriptors or 'any number of'} descriptors)"


def _memory(ranks: tuple[RankNeeds, ...]) -> str:
    rank = max(ranks, key=lambda r: r.memory.extents_needed - r.memory.extents)
    memory = rank.memory
    how = "streaming" if memory.streams else "all of it at once"
    left = "unknown" if memory.left is None else size(memory.left)
    return (
        f"rank {rank.rank} stages {size(rank.bytes)} in {size(memory.bytes)}, {how}; granted {size(memory.budget)} by "
        f"{memory.ruled_by} ({memory.local_ranks} ranks on the node), left after that: {left}"
    )


def _disk(disk: DiskNeeds) -> str:
    kept = "nothing is removed" if disk.held is None else f"{disk.held} at the same time"
    inodes = "" if disk.inodes_free is None else f"; {disk.inodes_needed:,} of {disk.inodes_free:,} free inodes"
    return (
        f"{size(disk.checkpoint)} per checkpoint, {kept}: {size(disk.needed)} needed, {size(disk.free)} free "
        f"(room for {disk.room_for:,}){inodes}; quota {disk.quota}"
    )


def size(count: int) -> str:
    """A number of bytes for people."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def _rate(speed: float | None) -> str:
    return "unknown" if speed is None else f"{speed / 1e9:.2g} GB/s"


def _slowest(seconds: list[float | None]) -> float | None:
    """The largest, or ``None`` if one of them isn't known: it may be the largest."""
    known = [value for value in seconds if value is not None]
    return max(known) if known and len(known) == len(seconds) else None


def _lowest(speeds: list[float | None]) -> float | None:
    return min((speed for speed in speeds if speed is not None), default=None)
