"""Staging: the caller's tensors become private bytes in extents, laid out as they will lie in the files.

The extents of all files are filled in the order 0, 0, .., 1, 1, .. over the files. Each goes to its file's writer as soon as
it is filled; when the pool has no free one, staging waits for a writer to give one back. So a state of any size passes
through a pool of any size, and a file's next extent is always among the ones in use: the order can't deadlock.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ckpt_engine.errors import CommitTimeoutError
from ckpt_engine.staging.copy import Sources, copy_part
from ckpt_engine.staging.pool import Extent, ExtentPool


class Image(Protocol):
    """What staging needs to know of a file: payload positions of its records, in order."""

    payloads: list[int]
    payload_ends: list[int]

    def records_in(self, start: int, stop: int) -> range: ...


@dataclasses.dataclass(frozen=True)
class FileSource:
    """One file to stage.

    Attributes:
        image: where the payloads lie.
        sources: the tensors, parallel to the image's records.
        size: bytes of the file.
        put: takes (extent number, extent) once it is filled; owns the extent from then on.
    """

    image: Image
    sources: Sources
    size: int
    put: Callable[[int, Extent], None]


def stage(
    files: Sequence[FileSource],
    pool: ExtentPool,
    copiers: concurrent.futures.Executor,
    *,
    extent_bytes: int,
    timeout: float,
    cancelled: Callable[[], bool],
    step: int,
) -> None:
    """Copies all payloads into extents and hands them over. Returns when the last copy is done.

    Args:
        files: what to stage.
        pool: where extents come from.
        copiers: runs the copies.
        extent_bytes: size of an extent.
        timeout: seconds to wait for one free extent.
        cancelled: true once the save has failed; staging stops then, without an error of its own.
        step: for messages.

    Raises:
        CommitTimeoutError: no extent came back for ``timeout`` seconds: the storage takes nothing.
        MemoryBudgetError: not a single extent can be had.
        BaseException: whatever a copy raised.
    """
    _fence(files)
    copies = _Copies()
    pending: list[concurrent.futures.Future[None]] = []
    longest = max((-(-file.size // extent_bytes) for file in files), default=0)
    try:
        for number in range(longest):
            for file in files:
                if number * extent_bytes >= file.size or cancelled():
                    continue
                try:
                    extent = pool.acquire(timeout=timeout, cancelled=cancelled, taken=copies.taken)
                except TimeoutError as error:
                    raise CommitTimeoutError(
                        f"the storage gave no memory back for {timeout:g} s ({pool.stats().in_use} bytes wait to be written)",
                        step=step,
                        phase="stage",
                        hint="the file system may hang; raise commit_timeout if it is only slow",
                    ) from error
                if extent is not None:
                    ticket = copies.count - 1
                    pending.append(copiers.submit(_fill, copies, ticket, file, number, extent, extent_bytes, pool))
        for future in concurrent.futures.as_completed(pending):
            future.result()
    finally:
        # No copy may be running when save() leaves, whatever the reason: the caller changes the tensors next.
        copies.close(pool)


class _Copies:
    """The copies of one save, and whose the extents are: an interrupt can fall between any two steps of the caller.

    An extent is the caller's until a copy begins with it. Once closed, none begins any more, and what is the caller's goes back.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._extents: list[Extent | None] = []  # by ticket; None once a copy has begun with it
        self._running = 0
        self._closed = False

    @property
    def count(self) -> int:
        return len(self._extents)

    def taken(self, extent: Extent) -> None:
        self._extents.append(extent)

    def begin(self, ticket: int) -> bool:
        """Whether the copy may begin; it owns the extent then."""
        with self._changed:
            if self._closed:
                return False
            self._extents[ticket] = None
            self._running += 1
            return True

    def end(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def close(self, pool: ExtentPool) -> None:
        """Waits for the copies that have begun, and gives the other extents back."""
        with self._changed:
            self._closed = True
            while self._running:
                self._changed.wait()
            left, self._extents = [extent for extent in self._extents if extent is not None], []
        for extent in left:
            pool.release(extent)


def _fence(files: Sequence[FileSource]) -> None:
    """Waits for the work queued on devices that hold sources: copy threads have other current streams than the caller, and
    would copy a parameter while its update is still on its way."""
    for device in {tensor.device for file in files for tensor in file.sources.tensors if not tensor.is_cpu}:
        torch.get_device_module(device).synchronize(device)


def _fill(
    copies: _Copies, ticket: int, file: FileSource, number: int, extent: Extent, extent_bytes: int, pool: ExtentPool
) -> None:
    if not copies.begin(ticket):
        return
    try:
        base = number * extent_bytes
        try:
            _copy_payloads(file, base, base + extent_bytes, extent)
        except BaseException:
            pool.release(extent)
            raise
        extent.touched = True
        file.put(number, extent)
    finally:
        copies.end()


def _copy_payloads(file: FileSource, base: int, stop: int, extent: Extent) -> None:
    image, sources, address = file.image, file.sources, extent.address
    target = torch.frombuffer(extent.view, dtype=torch.uint8)
    with torch.no_grad():
        for index in image.records_in(base, stop):
            payload, end = image.payloads[index], image.payload_ends[index]
            low, high = max(payload, base), min(end, stop)
            if low < high:
                copy_part(
                    sources.tensors[index],
                    sources.addresses[index],
                    low - payload,
                    high - payload,
                    address,
                    target,
                    low - base,
                )
