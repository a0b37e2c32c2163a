"""One writer per checkpoint directory: an advisory ``flock`` on a file in it.

The lock belongs to an open file, so it also keeps out a second engine in the same process, and the kernel frees it when
the holder dies, however it dies. The file stays; its content (who holds it) is only for the message that the other one
gets.

It does not order the ranks of one job (only rank 0 locks), and readers never take it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import weakref

from ckpt_engine.errors import DirectoryBusyError, StorageError

log = logging.getLogger("ckpt_engine")

LOCK_NAME = ".ckpt_engine.lock"

#: What file systems without locks answer.
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


class DirectoryLock:
    """The lock of one directory. Not thread-safe by itself; its owner calls it from one thread at a time."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, LOCK_NAME)
        self._fd: int | None = None
        self._exclusive = False

    @property
    def held(self) -> bool:
        return self._fd is not None

    @property
    def exclusive(self) -> bool:
        """Whether no other engine can be writing: held, on a file system that has locks."""
        return self._fd is not None and self._exclusive

    def acquire(self) -> None:
        """Takes the lock, or does nothing if this object holds it. Never waits.

        Raises:
            DirectoryBusyError: somebody else holds it; the message says who, as far as the file tells.
            StorageError: the lock file can't be opened.
        """
        if self._fd is not None:
            return
        try:
            # O_NOFOLLOW: a planted link must not make us truncate somebody's file.
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise StorageError(
                f"the lock file can't be opened: {error.strerror}", path=self._path, phase="plan", errno=error.errno
            ) from error
        try:
            self._exclusive = self._lock(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        _held.add(self)

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
        fd, self._fd = self._fd, None
        _held.discard(self)
        if fd is None:
            return
        try:
            # Not by closing alone: a child forked by C code may hold a copy of the descriptor, and with it the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError:
            log.debug("%s: unlock failed", self._path, exc_info=True)
        os.close(fd)

    def _forget(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)  # and no LOCK_UN, which would unlock for the parent too


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in tuple(_held):
        lock._forget()
    _held.clear()


# A DataLoader worker that outlives a killed trainer would otherwise keep the directory locked for the restarted job.
os.register_at_fork(after_in_child=_forget_in_child)


def _read_holder(fd: int) -> str:
    try:
        return os.pread(fd, 200, 0).decode(errors="replace").strip() or "it left no name"
    except OSError:
        return "its name can't be read"
