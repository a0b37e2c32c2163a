"""From what all ranks say to the verdict. Pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ckpt_engine.config import MIN_BUDGET_BYTES, EngineConfig
from ckpt_engine.preflight.needs import RankFacts
from ckpt_engine.preflight.report import DiskNeeds, Problem, RankNeeds, SavePlanReport, Verdict, size
from ckpt_engine.spool import SPOOL_BYTES

#: What a checkpoint has besides shard files and manifests: commit record, train state, and the blocks of its two directories.
_RECORD_BYTES, _RECORD_BYTES_PER_RANK = 16 << 10, 160

#: Their number, with the temporary file of the one that is being put in place: ``.metadata``, ``commit.json``, ``train_state.pt``.
_SMALL_FILES = 6

#: Descriptors that a save needs besides those of its shard files: manifest, directories to sync, the lock.
_OTHER_DESCRIPTORS = 4


def judge(
    directory: str, facts: Sequence[RankFacts], existing: Sequence[tuple[int, int]], config: EngineConfig
) -> SavePlanReport:
    """
    Args:
        directory: the checkpoint directory.
        facts: of all ranks, in rank order.
        existing: (step, bytes) of the committed checkpoints, the one committed last first.
    """
    ranks = tuple(fact.needs for fact in facts)
    disk = _disk(facts, existing, config)
    problems: list[Problem] = []
    for fact in facts:
        problems += ([fact.problem] if fact.problem is not None else []) + list(_limits(fact, config))
    problems = [*_room(disk), *problems]
    verdict: Verdict = "fits"
    if problems:
        verdict = "does not fit"
    elif any(rank.memory.streams for rank in ranks):
        verdict = "fits by streaming"
    return SavePlanReport(
        directory, verdict, ranks, disk, _once(problems), tuple(_notes(directory, ranks, disk, config))
    )


def _once(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """A thousand ranks have the same problem as a rule: each is told once, for the rank that lacks most."""
    worst: dict[str, Problem] = {}
    counts: dict[str, int] = {}
    for problem in problems:
        counts[problem.what] = counts.get(problem.what, 0) + 1
        if problem.what not in worst or problem.missing > worst[problem.what].missing:
            worst[problem.what] = problem
    return tuple(
        dataclasses.replace(problem, message=f"{problem.message} (and {counts[what] - 1} more ranks)")
        if counts[what] > 1
        else problem
        for what, problem in worst.items()
    )


# -- disk --------------------------------------------------------------------------------------------------------------


def _disk(facts: Sequence[RankFacts], existing: Sequence[tuple[int, int]], config: EngineConfig) -> DiskNeeds:
    tightest = min((fact.system for fact in facts), key=lambda system: system.free)
    block = max(fact.system.block for fact in facts)

    def on_disk(nbytes: int) -> int:
        return -(-nbytes // block) * block

    small = _RECORD_BYTES + _RECORD_BYTES_PER_RANK * len(facts)
    one = on_disk(small) + sum(
        on_disk(fact.needs.other_bytes) + sum(on_disk(file.bytes) for file in fact.needs.files) for fact in facts
    )
    one += on_disk(facts[0].metadata_bytes)
    # Large pickled values lie in an unlinked file of the directory until they are in their shard file.
    spooled = sum(fact.needs.value_bytes for fact in facts if fact.needs.value_bytes > SPOOL_BYTES)
    held = None if config.keep_last is None else config.keep_last + 1
    more = 1 if config.keep_last is None else max(config.keep_last + 1 - len(existing), 1)
    inodes = [fact.system.inodes_free for fact in facts if fact.system.inodes_free is not None]
    return DiskNeeds(
        path=facts[0].system.path,
        checkpoint=one,
        held=held,
        needed=needed_bytes(one, existing, config.keep_last, config.keep_every) + spooled,
        existing=sum(nbytes for _, nbytes in existing),
        free=tightest.free,
        total=tightest.total,
        inodes_needed=more * (sum(len(fact.needs.files) + 1 for fact in facts) + _SMALL_FILES),
        inodes_free=min(inodes) if inodes else None,
    )


def needed_bytes(one: int, existing: Sequence[tuple[int, int]], keep_last: int | None, keep_every: int | None) -> int:
    """Bytes that have to be free now for save after save of ``one`` bytes, until retention removes as much as comes.

    While save number j is written, j - 1 new checkpoints are there; what retention has removed by then is free again. A save
    that replaces a step needs no more than one that doesn't: the old one stays until the new one is committed.
    """
    if keep_last is None:
        return one

    def freed(commits: int) -> int:
        if commits == 0:
            return 0
        gone = existing[max(keep_last - commits, 0) :]
        return sum(nbytes for step, nbytes in gone if keep_every is None or step % keep_every)

    # Up to the save before the first old one goes, more are only more; keep_last may be a million.
    saves = {1, *range(max(1, keep_last + 1 - len(existing)), keep_last + 2)}
    peaks: list[int] = [save * one - freed(save - 1) for save in saves]
    return max(peaks)


def _room(disk: DiskNeeds) -> Iterator[Problem]:
    if disk.needed > disk.free:
        missing = disk.needed - disk.free
        what = "one checkpoint needs" if disk.held is None else f"{disk.held} checkpoints at the same time need"
        yield Problem(
            "disk",
            f"disk: {what} {size(disk.needed)} more in {disk.path}, {size(disk.free)} are free: {size(missing)} are "
            f"missing ({missing} bytes); make room, or keep fewer checkpoints (keep_last)",
            missing,
        )
    if disk.inodes_free is not None and disk.inodes_needed > disk.inodes_free:
        missing = disk.inodes_needed - disk.inodes_free
        yield Problem(
            "inodes",
            f"disk: {disk.inodes_needed} files and directories are needed, {disk.inodes_free} inodes are free in {disk.path}: "
            f"{missing} are missing",
            missing,
            "inodes",
        )


# -- one rank ------------------------------------------------------------------------------------------------------------


def _limits(fact: RankFacts, config: EngineConfig) -> Iterator[Problem]:
    needs, rank = fact.needs, fact.needs.rank
    if not fact.system.writable and fact.problem is None:
        yield Problem("storage", f"rank {rank} may not write to {fact.system.path}", rank=rank)
    if needs.memory.budget < MIN_BUDGET_BYTES:
        missing = MIN_BUDGET_BYTES - needs.memory.budget
        yield Problem(
            "memory",
            f"host memory: rank {rank} is granted {needs.memory.budget} bytes by {needs.memory.ruled_by}, at least "
            f"{MIN_BUDGET_BYTES} are needed: {missing} are missing",
            missing,
            rank=rank,
        )
    longest = max((-(-file.bytes // 4096) * 4096 for file in needs.files), default=0)
    if needs.limits.file_bytes is not None and longest > needs.limits.file_bytes:
        missing = longest - needs.limits.file_bytes
        yield Problem(
            "file size",
            f"file size: rank {rank} writes a file of {longest} bytes, RLIMIT_FSIZE allows {needs.limits.file_bytes}: "
            f"{missing} are missing; raise it (ulimit -f), or use more writers",
            missing,
            rank=rank,
        )
    wanted = len(needs.files) + _OTHER_DESCRIPTORS + needs.limits.descriptors_open
    if needs.limits.descriptors is not None and wanted > needs.limits.descriptors:
        missing = wanted - needs.limits.descriptors
        yield Problem(
            "descriptors",
            f"descriptors: rank {rank} has {needs.limits.descriptors_open} open and needs "
            f"{wanted - needs.limits.descriptors_open} more, RLIMIT_NOFILE allows {needs.limits.descriptors}: {missing} are "
            "missing; raise it (ulimit -n), or use fewer writers",
            missing,
            "descriptors",
            rank,
        )


def _notes(directory: str, ranks: Sequence[RankNeeds], disk: DiskNeeds, config: EngineConfig) -> Iterator[str]:
    if disk.path != directory:
        yield f"{directory} does not exist yet; what is said of the disk is of {disk.path}"
    if disk.held is None and disk.room_for:
        yield f"keep_last is not set: nothing is removed, and the disk is full after {disk.room_for:,} checkpoints"
    elif disk.held is not None and config.keep_every is not None:
        yield (
            f"steps that are multiples of {config.keep_every} are kept for ever, {size(disk.checkpoint)} each: that is not in "
            "the sum"
        )
    overlap = (config.max_in_flight - 1) * disk.checkpoint
    if overlap and disk.needed <= disk.free < disk.needed + overlap:
        yield (
            f"if a save begins while another is being written (max_in_flight={config.max_in_flight}), "
            f"{size(disk.needed + overlap - disk.free)} are missing for both"
        )
    for note in sorted({rank.speeds.note for rank in ranks if rank.speeds is not None and rank.speeds.note}):
        yield f"not measured: {note}"
    if any(rank.speeds is not None and rank.speeds.write is not None and not rank.speeds.direct for rank in ranks):
        yield "this storage takes no O_DIRECT: writes go through the page cache and cost about one CPU second per GiB"
