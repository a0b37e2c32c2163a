"""One writer per checkpoint directory: an advisory ``flock`` on a file in it.

The lock belongs to an open file, so it also keeps out a second engine in the same process, and the kernel frees it when
the holder dies, however it dies. It is also freed when the holder is garbage collected. The file stays; its content (who
holds it) is only for the message that the other one gets.

It does not order the ranks of one job (only rank 0 locks), and readers never take it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import weakref
from collections.abc import Callable

from ckpt_engine.errors import DirectoryBusyError, StorageError

log = logging.getLogger("ckpt_engine")

LOCK_NAME = ".ckpt_engine.lock"

#: What file systems without locks answer.
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


class _LockFile:
    """The open lock file. Outlives its :class:`DirectoryLock` by the moment that it takes to close it."""

    def __init__(self, path: str) -> None:
        # O_NOFOLLOW: a planted link must not make us truncate somebody's file.
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self.closed = False
        self._path = path
        self._process = os.getpid()
        _open_files.add(self)

    def close(self) -> None:
        """Unlocks and closes. Idempotent. In a forked child it only closes, for unlocking would unlock for the parent."""
        _open_files.discard(self)
        if self.closed:
            return
        self.closed = True
        if os.getpid() == self._process:
            try:
                # Not by closing alone: a child forked by C code may hold a copy of the descriptor, and with it the lock.
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            except OSError:
                log.debug("%s: unlock failed", self._path, exc_info=True)
        os.close(self.fd)


class DirectoryLock:
    """The lock of one directory. Not thread-safe by itself; its owner calls it from one thread at a time."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, LOCK_NAME)
        self._file: _LockFile | None = None
        self._close: Callable[[], object] = _nothing
        self._exclusive = False

    @property
    def held(self) -> bool:
        return self._file is not None and not self._file.closed

    @property
    def exclusive(self) -> bool:
        """Whether no other engine can be writing: held, on a file system that has locks."""
        return self.held and self._exclusive

    def acquire(self) -> None:
        """Takes the lock, or does nothing if this object holds it. Never waits.

        Raises:
            DirectoryBusyError: somebody else holds it; the message says who, as far as the file tells.
            StorageError: the lock file can't be opened.
        """
        if self.held:
            return
        try:
            file = _LockFile(self._path)
        except OSError as error:
            raise StorageError(
                f"the lock file can't be opened: {error.strerror}", path=self._path, phase="plan", errno=error.errno
            ) from error
        # An engine that is dropped without close() must not keep the directory for as long as the process lives.
        finalizer = weakref.finalize(self, file.close)
        # At interpreter exit saves may still be on their way, and the kernel unlocks after the last of them.
        finalizer.atexit = False
        try:
            self._exclusive = self._lock(file.fd)
        except BaseException:
            finalizer()
            raise
        self._file, self._close = file, finalizer

    def _lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                log.warning("%s: this file system has no locks; two engines in one directory go unnoticed", self._path)
                return False
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StorageError(
                    f"flock failed: {error.strerror}", path=self._path, phase="plan", errno=error.errno
                ) from error
            raise DirectoryBusyError(
                f"another engine writes to this directory ({_read_holder(fd)})",
                path=os.path.dirname(self._path),
                phase="plan",
                hint="stop the other job or close() the other engine, or give each its own directory",
            ) from error
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        except OSError:  # a full disk must not cost the lock; the note is a courtesy
            log.debug("%s: could not note the holder", self._path, exc_info=True)
        return True

    def release(self) -> None:
        """Gives the lock back. Idempotent."""
        self._close()
        self._file, self._close = None, _nothing


def _nothing() -> None:
    pass


_open_files: set[_LockFile] = set()


def _close_in_child() -> None:
    for file in tuple(_open_files):
        file.close()


# A DataLoader worker that outlives a killed trainer would otherwise keep the directory locked for the restarted job.
os.register_at_fork(after_in_child=_close_in_child)


def _read_holder(fd: int) -> str:
    try:
        return os.pread(fd, 200, 0).decode(errors="replace").strip() or "it left no name"
    except OSError:
        return "its name can't be read"
