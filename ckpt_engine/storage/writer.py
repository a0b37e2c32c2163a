"""From filled extents to durable files.

A :class:`FileWriter` takes the extents of one file in any order and makes them final in file order (the *seal*, which
computes a CRC that runs across extents). As soon as one extent is sealed, its write and the seal of the next go on at the
same time on different threads, so that one file can keep several writers busy. An extent goes back to the pool only after
``pwrite`` has taken its bytes.

Writer threads run :meth:`WriteQueue.pump`. It is started a fixed number of times for each save, never from inside another
task, and ends with the save: so that the bounded executor can be drained at interpreter exit, when no new task can be
submitted.
"""

from __future__ import annotations

import collections
import errno
import logging
import threading
import time
from collections.abc import Callable

from ckpt_engine.errors import StorageError
from ckpt_engine.storage.place import Sink

log = logging.getLogger("ckpt_engine")

#: Errors after which the same write may succeed: network storage that fails over, a device path that is switched.
TRANSIENT = frozenset({errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOBUFS})

_FIRST_PAUSE = 0.05  # seconds before the first retry; doubled each time

#: seal(extent number, view) -> bytes to write
Seal = Callable[[int, memoryview], int]


class FileWriter:
    """One file of one save."""

    def __init__(self, open_file: Callable[[], Sink], extents: int, extent_bytes: int, seal: Seal) -> None:
        self.open_file = open_file
        self.extents = extents
        self.extent_bytes = extent_bytes
        self.seal = seal
        self.file: Sink | None = None
        self.ready: dict[int, Filled] = {}
        self.next = 0  # next extent to seal
        self.sealing = False
        self.written = 0
        self.finished = False


class Filled:
    """An extent with its payload bytes in place: its memory, and how to give it back."""

    __slots__ = ("release", "view")

    def __init__(self, view: memoryview, release: Callable[[], None]) -> None:
        self.view = view
        self.release = release


class WriteQueue:
    """All files of one save. ``done`` is set when every file is durable, or when the first failure has stopped them."""

    def __init__(self, files: list[FileWriter], *, on_failure: Callable[[], None], retries: int = 0) -> None:
        self.files = files
        self._retries = retries
        self.done = threading.Event()
        self.failure: BaseException | None = None
        self.progress = 0  # bytes written so far
        self.seal_seconds = 0.0
        self.write_seconds = 0.0
        self._on_failure = on_failure
        self._condition = threading.Condition()
        self._work: collections.deque[FileWriter] = collections.deque()
        self._active = 0
        for file in files:
            if file.extents == 0:
                raise ValueError("a file without extents has nothing to write")
        if not files:
            self.done.set()

    # -- producer ---------------------------------------------------------------------------------------------------

    def put(self, file: FileWriter, number: int, extent: Filled) -> None:
        """Hands over a filled extent. After a failure it is released at once."""
        with self._condition:
            if self.failure is None:
                file.ready[number] = extent
                self._offer(file)
                return
        extent.release()

    def fail(self, error: BaseException) -> None:
        """Stops the save: waiting extents are released, running writes end, the files are removed. The first error counts."""
        with self._condition:
            if self.done.is_set() or self.failure is not None:
                return
            self.failure = error
            dropped = [extent for file in self.files for extent in file.ready.values()]
            for file in self.files:
                file.ready.clear()
            self._condition.notify_all()
            idle = self._active == 0
        for extent in dropped:
            extent.release()
        self._on_failure()
        if idle:
            self._discard()

    @property
    def failed(self) -> bool:
        return self.failure is not None

    def _offer(self, file: FileWriter) -> None:
        if not file.sealing and file.next in file.ready:
            file.sealing = True
            self._work.append(file)
            self._condition.notify()

    # -- writer threads ---------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Seals and writes until the save is done or has failed. Runs on each writer thread."""
        while True:
            with self._condition:
                while not self._work and self.failure is None and not self._complete():
                    self._condition.wait()
                if self.failure is not None or not self._work:
                    return
                file = self._work.popleft()
                number = file.next
                extent = file.ready.pop(number)
                self._active += 1
            try:
                self._write(file, number, extent)
            except (
                BaseException
            ) as error:  # a SystemExit or MemoryError in a writer thread must not end in silence (B097)
                self.fail(error)
            finally:
                self._leave()

    def _leave(self) -> None:
        with self._condition:
            self._active -= 1
            stopped = self.failure is not None and self._active == 0
            if self._complete():
                self.done.set()
                self._condition.notify_all()
        if stopped:
            self._discard()

    def _complete(self) -> bool:
        return self.failure is None and all(file.finished for file in self.files)

    def _write(self, file: FileWriter, number: int, extent: Filled) -> None:
        try:
            if file.file is None:
                file.file = file.open_file()
            begin = time.thread_time()
            size = file.seal(number, extent.view)
            sealed = time.thread_time() - begin
            with self._condition:  # from here on another thread may seal this file's next extent
                file.next += 1
                file.sealing = False
                if self.failure is None:
                    self._offer(file)
            start = time.perf_counter()
            if self.failure is None:
                self._write_with_retries(file.file, extent.view[:size], number * file.extent_bytes)
            spent = time.perf_counter() - start
        finally:
            extent.release()
        with self._condition:
            self.seal_seconds += sealed
            self.write_seconds += spent
            self.progress += size
            file.written += 1
            last = file.written == file.extents and self.failure is None
        if last:
            start = time.perf_counter()
            file.file.finish()
            with self._condition:
                self.write_seconds += time.perf_counter() - start
                self.progress += 1
                file.finished = True

    def _write_with_retries(self, file: Sink, data: memoryview, offset: int) -> None:
        """A retried extent starts again at its own offset; ENOSPC, EACCES and their like are never retried."""
        pause = _FIRST_PAUSE
        for left in range(self._retries, -1, -1):
            try:
                return file.write(data, offset)
            except StorageError as error:
                if left == 0 or error.errno not in TRANSIENT or self.failure is not None:
                    raise
                log.warning(
                    "write of %d bytes at %d failed and is tried again in %.2f s: %s", len(data), offset, pause, error
                )
            time.sleep(pause)
            pause *= 2

    def _discard(self) -> None:
        for file in self.files:
            if file.file is not None:
                file.file.abort()
        self.done.set()
