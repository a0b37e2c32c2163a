"""Checks every byte of a checkpoint, in bounded memory, and tells all that is wrong instead of stopping at the first.

For one of ours: the commit record against its own SHA-256; part manifests, ``.metadata``, ``train_state.pt`` and what
else it lists against size and SHA-256; shard files against the listed sizes; each item against two CRC-32 sums, one of
the payload and one of everything around it. A checkpoint saved without checksums has only its sizes to compare. For a
stock one: that ``.metadata`` loads and its files are long enough, and the zip CRCs of every record.
Shard files that nobody lists are reported too.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ckpt_engine.commit.manifest import CommitRecord, PartItem, PartManifest, parse_commit, parse_part
from ckpt_engine.errors import CheckpointError, NotCommittedError
from ckpt_engine.restore.files import CheckpointFiles
from ckpt_engine.restore.raw import Scratch, ShardReader
from ckpt_engine.restore.source import COMMIT, METADATA, PART_DIRECTORY, CheckpointSource, RecordInfo
from ckpt_engine.restore.unpickle import load_metadata
from ckpt_engine.restore.zips import check_record, record_file
from ckpt_engine.storage.checksum import crc32

log = logging.getLogger("ckpt_engine")

_PIECE = 2 << 20  # per read and CRC, as in the reader
_BATCH = 8 << 20  # neighbouring items up to this size are read at once
_SUFFIX = ".distcp"
_STEP = re.compile(r"iter_0*(\d+)")

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What was found.

    Attributes:
        step: of the commit record, else of the directory's name, else ``None``.
        ok: nothing is wrong.
        problems: one line each, naming the file and, where one is concerned, the tensor.
        bytes: of shard files that were read and compared.
        items: tensors and values that were compared.
    """

    step: int | None
    ok: bool
    problems: tuple[str, ...]
    bytes: int
    items: int


def verify_checkpoint(
    path: str | os.PathLike[str], *, threads: int = 2, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Reads all of a checkpoint and compares every checksum.

    Args:
        threads: how many files or parts of files are read at once.
        progress: called on this thread with (bytes done, bytes in all); what it raises ends the check.

    Raises:
        NotCommittedError: ``path`` is no directory. What is wrong inside one is in the report.
    """
    where = os.path.abspath(os.fspath(path))
    if not os.path.isdir(where):
        raise NotCommittedError("there is no such checkpoint directory", path=where, phase="verify")
    with _Check(where, threads, progress) as check:
        return check.run()


@dataclasses.dataclass
class _Outcome:
    """Of one task: what it compared, and what is wrong."""

    bytes: int = 0
    items: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


class _Check:
    def __init__(self, path: str, threads: int, progress: Callable[[int, int], None] | None) -> None:
        self._files = CheckpointFiles(path, step=None, phase="verify")
        self._reader = ShardReader(step=None, phase="verify")
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, threads), thread_name_prefix="ckpt_engine-verify")
        self._progress = progress
        self._local = threading.local()
        self._found = _Outcome()
        self._total = 0
        self._stopped = False

    def __enter__(self) -> _Check:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.__exit__()

    def run(self) -> VerifyReport:
        files = self._files
        match = _STEP.fullmatch(os.path.basename(files.path))
        step = int(match.group(1)) if match else None
        self._total = sum(size for _, size in self._shard_files())
        if files.exists(COMMIT) or files.exists(PART_DIRECTORY):
            commit = self._try(self._commit)
            if commit is not None:
                step = commit.step
            self._ours(commit)
        else:
            self._stock(step)
        found = self._found
        return VerifyReport(step, not found.problems, tuple(found.problems), found.bytes, found.items)

    # -- ours -------------------------------------------------------------------------------------------------------

    def _commit(self) -> CommitRecord:
        return parse_commit(self._files.read(COMMIT), path=self._files.full(COMMIT))

    def _ours(self, commit: CommitRecord | None) -> None:
        """Without a commit record, what is there is checked all the same: how much of it is lost is worth knowing."""
        if commit is not None:
            if commit.checksum is None:
                log.warning("%s was saved without checksums: only sizes can be compared", self._files.path)
            for name, entry in commit.files.items():
                data = self._try(functools.partial(self._files.vouched, name, entry))
                if name == METADATA and data is not None:
                    self._try(functools.partial(load_metadata, data, path=self._files.full(name), step=commit.step))
            if METADATA not in commit.files:
                self._problem(f"{COMMIT} doesn't list {METADATA}")
            parts = [entry.name for entry in commit.parts]
        else:
            self._try(lambda: load_metadata(self._files.read(METADATA), path=self._files.full(METADATA), step=None))
            parts = [name for name in self._listing(PART_DIRECTORY) if re.fullmatch(r"rank-\d+\.json", name)]
        listed: dict[str, str] = {}
        damaged = size = 0
        for name in parts:  # one after the other: those of a large job don't fit into memory together
            where = f"{PART_DIRECTORY}/{name}"
            part = self._try(
                lambda where=where: parse_part(  # type: ignore[misc]
                    self._files.read(where), path=self._files.full(where), commit=commit
                )
            )
            if part is None:
                damaged += 1
                continue
            for file in part.files:
                if file.name in listed:
                    self._problem(f"{file.name} is listed by {listed[file.name]} and by {name}")
                listed[file.name] = name
                size += file.bytes
            self._compare(list(self._part_tasks(part)))
        if commit is not None and not damaged and size != commit.bytes:
            self._problem(f"{COMMIT} counts {commit.bytes} bytes of shard files, the part manifests {size}")
        if not damaged:
            self._strangers(set(listed), empty_too=True)

    def _part_tasks(self, part: PartManifest) -> Iterator[Callable[[], _Outcome]]:
        usable = {}
        for index, file in enumerate(part.files):
            found = self._try(functools.partial(self._files.locate, file.name))
            if found is not None:
                usable[index] = found[0]
                if found[1] != file.bytes:
                    self._problem(f"{file.name} has {found[1]} bytes, expected {file.bytes}")
        batch: list[PartItem] = []
        for item in part.items:
            if item.file not in usable:
                continue
            if batch and (item.file != batch[0].file or item.end - batch[0].offset > _BATCH):
                yield functools.partial(self._check_items, usable[batch[0].file], batch)
                batch = []
            batch.append(item)
        if batch:
            yield functools.partial(self._check_items, usable[batch[0].file], batch)

    def _check_items(self, path: str, batch: Sequence[PartItem]) -> _Outcome:
        """Items that follow each other in one file: together small enough for the scratch buffer, or a single one."""
        outcome = _Outcome()
        base, end = batch[0].offset, batch[-1].end
        if end - base <= _BATCH:
            try:
                self._reader.fill(path, [self._scratch.view[: end - base]], base, tensor=None)
            except CheckpointError as error:
                if len(batch) > 1:  # one by one, to say which of them are gone
                    for item in batch:
                        single = self._check_items(path, [item])
                        outcome.bytes += single.bytes
                        outcome.items += single.items
                        outcome.problems += single.problems
                else:
                    outcome.problems.append(f"{error.message} (in {_title(batch[0])!r})")
                return outcome
            for item in batch:
                self._compare_item(path, item, outcome, functools.partial(self._crc_in_scratch, base))
        else:
            try:
                self._compare_item(path, batch[0], outcome, functools.partial(self._crc_in_file, path))
            except CheckpointError as error:
                outcome.problems.append(f"{error.message} (in {_title(batch[0])!r})")
        return outcome

    def _compare_item(
        self, path: str, item: PartItem, outcome: _Outcome, crc_of: Callable[[int, int, int], int]
    ) -> None:
        name, tail = os.path.basename(path), item.payload + item.nbytes
        frame = crc_of(item.offset, item.payload, 0)
        payload = crc_of(item.payload, tail, 0)
        frame = crc_of(tail, item.end, frame)
        outcome.bytes += item.end - item.offset
        outcome.items += 1
        for what, found, expected in (
            (f"CRC-32 of its {item.nbytes} bytes", payload, item.crc32),
            ("CRC-32 of the record around its bytes, padding included,", frame, item.frame_crc32),
        ):
            if expected is not None and found != expected:
                outcome.problems.append(
                    f"{name}: {_title(item)!r} is damaged: {what} is {found:08x}, expected {expected:08x}"
                )

    def _crc_in_scratch(self, base: int, start: int, stop: int, crc: int) -> int:
        return crc32(self._scratch.view[start - base : stop - base], crc)

    def _crc_in_file(self, path: str, start: int, stop: int, crc: int) -> int:
        for low in range(start, stop, _PIECE):
            if self._stopped:
                return 0
            view = self._scratch.view[: min(_PIECE, stop - low)]
            self._reader.fill(path, [view], low, tensor=None)
            crc = crc32(view, crc)
        return crc

    @property
    def _scratch(self) -> Scratch:
        found: Scratch | None = getattr(self._local, "scratch", None)
        if found is None:
            found = self._local.scratch = Scratch(_BATCH)
        return found

    # -- stock ------------------------------------------------------------------------------------------------------

    def _stock(self, step: int | None) -> None:
        source = CheckpointSource(self._files.path, step)
        needed = self._try(source.load_stock_metadata)
        if needed is None:
            return
        usable = set()
        for name, size in needed.items():
            if self._try(functools.partial(self._files.locate, name)) is not None:
                usable.add(self._files.full(name))
                self._try(functools.partial(self._files.sized, name, size, exact=False))
        records = []
        for index in source.metadata.storage_data:
            info = self._try(functools.partial(source.record_of, index))
            if info is not None and info.path in usable:
                records.append(info)
        records.sort(key=lambda info: (info.path, info.offset))
        self._compare([functools.partial(self._check_zip, info) for info in records])
        self._strangers(set(needed), empty_too=False)  # a stock rank without items leaves an empty file

    def _check_zip(self, info: RecordInfo) -> _Outcome:
        try:
            check_record(self._reader, info, record_file(self._reader, info))
        except CheckpointError as error:
            return _Outcome(problems=[error.message])
        return _Outcome(info.length, 1)

    # -- both -------------------------------------------------------------------------------------------------------

    def _compare(self, tasks: Sequence[Callable[[], _Outcome]]) -> None:
        futures = [self._pool.submit(task) for task in tasks]
        if self._progress is None:
            concurrent.futures.wait(futures)
        else:
            done = self._found.bytes
            for future in concurrent.futures.as_completed(futures):
                done += future.result().bytes
                self._progress(done, max(done, self._total))
        for future in futures:  # in the order of the files
            outcome = future.result()
            self._found.bytes += outcome.bytes
            self._found.items += outcome.items
            self._found.problems += outcome.problems

    def _strangers(self, listed: set[str], *, empty_too: bool) -> None:
        for name, size in self._shard_files():
            if name not in listed and (size or empty_too):
                self._problem(f"{name} ({size} bytes) belongs to no part of this checkpoint")

    def _shard_files(self) -> list[tuple[str, int]]:
        found = []
        for name in self._listing("."):
            if name.endswith(_SUFFIX):
                try:
                    found.append((name, os.lstat(self._files.full(name)).st_size))
                except OSError:
                    pass  # gone since: somebody removes this checkpoint
        return found

    def _listing(self, name: str) -> list[str]:
        try:
            return sorted(os.listdir(self._files.full(name)))
        except OSError as error:
            self._problem(f"{name} can't be listed: {error.strerror}")
            return []

    def _try(self, work: Callable[[], _T]) -> _T | None:
        try:
            return work()
        except CheckpointError as error:
            self._problem(error.message)
            return None

    def _problem(self, message: str) -> None:
        if message not in self._found.problems:
            self._found.problems.append(message)


def _title(item: PartItem) -> str:
    return item.fqn if not item.chunk or not any(item.chunk) else f"{item.fqn} (chunk at {list(item.chunk)})"
