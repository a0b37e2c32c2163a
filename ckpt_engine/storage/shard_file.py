"""One shard file on its way to the device.

::

    create          write, write, write ... (any thread, any order)        finish
    open O_EXCL     [ extent 0 ][ extent 1 ][ extent 2 ][ last, padded ]    ftruncate(size), fsync, drop cache, close
    fallocate       0           16 MiB      32 MiB      48 MiB      ^size

Direct mode (O_DIRECT) goes past the page cache: it costs little CPU and leaves no dirty pages, which cgroups and Ray
count as used memory. Offsets, lengths and memory are aligned to :data:`ALIGNMENT`, so the last extent is padded and the
file cut to its size at the end. Buffered mode is for file systems that refuse O_DIRECT: written pages go to the device
in windows, at most :data:`WINDOW_BYTES` plus one piece are dirty at any time, and none stay cached after
:meth:`ShardFile.finish`.

Promises: after ``finish`` content and length are on the device (the *name* is durable after an fsync of the directory,
which is the caller's). A failed fsync, or writing back that failed, is never tried again: the kernel has then marked
the pages clean, and a second fsync would succeed over lost bytes. The file is discarded instead. A failed ``write``
changes nothing for others and may be repeated.

Does not retry, checksum, or look whether all of the file was written: a range never written reads as zeros.
"""

from __future__ import annotations

import collections
import copy
import errno
import fcntl
import logging
import os
import resource
import threading
from collections.abc import Callable
from typing import Literal

from ckpt_engine.errors import StorageError
from ckpt_engine.storage import fs

_log = logging.getLogger("ckpt_engine")

#: Unit of offsets and lengths. Every file system's block size divides it, and it is the page size of most machines.
ALIGNMENT = 4096

#: Buffered mode: dirty bytes of one file above which its oldest are waited for. Below the 64 MiB that are promised.
WINDOW_BYTES = 32 << 20

#: Buffered mode: most that one call writes, so that windows advance in steps.
PIECE_BYTES = 8 << 20

#: Direct mode: writes in a row that end before the next block boundary, before the file system is taken to be unable.
_MAX_STALLS = 8

#: How open or write say that they can't do O_DIRECT.
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


class ShardFile:
    """A new file of known size. Make it with :meth:`create`; end it with :meth:`finish` or :meth:`abort`.

    Attributes:
        path: where it is.
        size: its length in bytes when finished.
        direct: whether it is written with O_DIRECT. Turns False when the file system refuses at the first write.
    """

    def __init__(self, path: str, size: int, fd: int, *, direct: bool, must_be_direct: bool, step: int | None) -> None:
        self.path = path
        self.size = size
        self.direct = direct
        self._must_be_direct = must_be_direct
        self._step = step
        self._fd = fd
        made = os.fstat(fd)
        self._identity = (made.st_dev, made.st_ino)
        self._lock = threading.Lock()  # guards the four fields below; never held during I/O
        self._state: Literal["open", "closing", "finished", "aborted"] = "open"
        self._users = 0  # threads that are using the descriptor right now
        self._lost: StorageError | None = None  # set when bytes that a write had taken are lost
        self._unlinked = False
        # Held during buffered I/O. Costs nothing: the kernel lets one buffered write at a time into an inode anyway.
        self._window_lock = threading.Lock()
        self._window: collections.deque[tuple[int, int]] = collections.deque()  # (offset, bytes), oldest first
        self._window_bytes = 0

    @classmethod
    def create(cls, path: str, size: int, *, direct: bool | Literal["auto"], step: int | None = None) -> ShardFile:
        """Makes the file and reserves its bytes, so that a full disk shows before anything is written.

        Args:
            path: must not exist yet; a symlink there isn't followed.
            size: final length in bytes.
            direct: ``True``: O_DIRECT or an error; ``False``: buffered; ``"auto"``: O_DIRECT where it works.
            step: for error messages.

        Raises:
            StorageError: with the OS error's number; nothing is left at ``path`` that wasn't there before.
        """
        if size < 0:
            raise ValueError(f"size is {size}, expected 0 or more")
        fd, is_direct = _open(path, size, direct, step)
        try:
            if size:
                fs.fallocate(fd, _padded(size))
            return cls(path, size, fd, direct=is_direct, must_be_direct=direct is True, step=step)
        except BaseException as error:
            _close_quietly(fd, path)
            _unlink_quietly(path)
            if isinstance(error, OSError):
                raise _storage_error(f"reserving {size} bytes failed", error, path, size, step) from error
            raise

    # -- writing ----------------------------------------------------------------------------------------------------

    def write(self, data: memoryview, offset: int) -> None:
        """Writes ``data`` at ``offset``. Several threads may do so at once, at different offsets. Runs outside the GIL.

        Args:
            data: page-aligned memory, a multiple of :data:`ALIGNMENT` long (a buffered file takes any).
            offset: a multiple of :data:`ALIGNMENT`.

        Raises:
            StorageError: not all bytes were written. The call may be repeated, unless writing back was what failed.
            ValueError: misaligned, or beyond the end of the file.
        """
        # Every view made here is released on leaving: in a kept traceback it would pin the pool's memory.
        with data.cast("B") as view:
            self._check_range(view.nbytes, offset)
            fd = self._enter()
            try:
                done = stalls = 0
                while done < view.nbytes:
                    self._check_alive()
                    if not self.direct:
                        done += self._write_buffered(fd, view, done, offset)
                        continue
                    reached = done + self._write_direct(fd, view, done, offset)
                    if reached < view.nbytes:
                        # A short direct write may end anywhere, but the next one has to begin at a block boundary.
                        reached -= reached % ALIGNMENT
                        stalls = stalls + 1 if reached == done else 0
                        if stalls == _MAX_STALLS:
                            short = OSError(errno.EINVAL, f"{stalls} writes in a row took less than {ALIGNMENT} bytes")
                            self._leave_direct(fd, short, view.nbytes - done, offset + done)
                    done = reached
            finally:
                self._leave()

    def _check_range(self, nbytes: int, offset: int) -> None:
        end = _padded(self.size)
        if offset < 0 or offset % ALIGNMENT or offset + nbytes > end:
            raise ValueError(
                f"{self.path}: write of {nbytes} bytes at offset {offset}, expected a multiple of {ALIGNMENT} "
                f"and an end not after {end}"
            )
        if self.direct and nbytes % ALIGNMENT:
            raise ValueError(f"{self.path}: direct write of {nbytes} bytes, expected a multiple of {ALIGNMENT}")

    def _write_direct(self, fd: int, view: memoryview, done: int, offset: int) -> int:
        """One pwrite. 0 if the file system refused and the file is buffered from now on."""
        try:
            with view[done:] as rest:
                written = os.pwrite(fd, rest, offset + done)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise self._write_error(error, view.nbytes - done, offset + done) from error
            self._leave_direct(fd, error, view.nbytes - done, offset + done)
            return 0
        return self._check_written(written, view.nbytes - done, offset + done)

    def _leave_direct(self, fd: int, refusal: OSError, nbytes: int, offset: int) -> None:
        """Turns to buffered writes; raises if O_DIRECT was asked for."""
        if self._must_be_direct:
            raise self._write_error(refusal, nbytes, offset) from refusal
        with self._lock:
            if not self.direct:  # another thread was refused as well, and was first
                return
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~fs.O_DIRECT)
            except OSError as error:
                raise self._write_error(error, nbytes, offset) from refusal
            self.direct = False
        _log.info("%s: O_DIRECT refused (%s), writing through the page cache", self.path, refusal.strerror)

    def _write_buffered(self, fd: int, view: memoryview, done: int, offset: int) -> int:
        """One pwrite of at most a piece, then waits until no more than a window is dirty."""
        start, nbytes = offset + done, min(view.nbytes - done, PIECE_BYTES)
        with self._window_lock:
            try:
                with view[done : done + nbytes] as piece:
                    written = os.pwrite(fd, piece, start)
            except OSError as error:
                raise self._write_error(error, nbytes, start) from error
            self._check_written(written, nbytes, start)
            self._window.append((start, written))
            self._window_bytes += written
            try:
                fs.sync_range(fd, start, written, wait=False)
                while self._window_bytes > WINDOW_BYTES:
                    start, nbytes = self._window[0]
                    fs.sync_range(fd, start, nbytes, wait=True)
                    fs.drop_cache(fd, start, nbytes)
                    self._window.popleft()
                    self._window_bytes -= nbytes
            except OSError as error:
                # The kernel has reported this error to our descriptor now, and an fsync would no longer see it.
                what = f"writing back {nbytes} bytes at offset {start} failed"
                lost = _storage_error(what, error, self.path, self.size, self._step)
                with self._lock:
                    self._lost = lost
                raise copy.copy(lost) from error
        return written

    def _check_written(self, written: int, nbytes: int, offset: int) -> int:
        if written <= 0:  # would loop for ever
            raise self._write_error(OSError(errno.EIO, "the file system took 0 bytes"), nbytes, offset)
        return written

    def _write_error(self, error: OSError, nbytes: int, offset: int) -> StorageError:
        what = f"write of {nbytes} bytes at offset {offset} failed"
        return _storage_error(what, error, self.path, self.size, self._step)

    # -- ending -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Cuts the file to its size, makes it durable, closes it. All writes must have returned.

        Raises:
            StorageError: it isn't durable; the file is closed and removed.
        """
        fd = self._enter(closing=True)
        try:
            self._make_durable(fd)
            with self._lock:
                self._check_alive_locked()
                self._fd = -1  # from here on abort() leaves the descriptor to us
            self._call("close", os.close, fd)  # network file systems report late errors here
            with self._lock:
                self._check_alive_locked()
                self._state = "finished"
        except BaseException:
            self.abort()
            raise
        finally:
            self._leave()

    def _make_durable(self, fd: int) -> None:
        with self._lock:
            self._check_alive_locked()
            if self._users > 1:
                raise self._state_error(f"finish() while {self._users - 1} writes are running")
        self._call("ftruncate", os.ftruncate, fd, self.size)
        self._call("fsync", os.fsync, fd)
        # Direct files too: cutting a block leaves a cached page, and some file systems take O_DIRECT but buffer.
        fs.drop_cache(fd)

    def _call(self, name: str, function: Callable[..., object], *arguments: int) -> None:
        try:
            function(*arguments)
        except OSError as error:
            raise _storage_error(f"{name} failed", error, self.path, self.size, self._step) from error

    def abort(self) -> None:
        """Closes and removes the file, a finished one too. Never raises, may be called again, and at any time from any
        thread: running writes stop after their current call, and the last of them closes."""
        with self._lock:
            self._state = "aborted"
            fd = self._take_unused_fd()
            unlinked, self._unlinked = self._unlinked, True
        if fd >= 0:
            _close_quietly(fd, self.path)
        if not unlinked:
            _unlink_quietly(self.path, self._identity)

    # -- who uses the descriptor --------------------------------------------------------------------------------------

    def _enter(self, *, closing: bool = False) -> int:
        # Closing under a running pwrite would free the descriptor's number for the next open in the process, and the
        # rest of our bytes would go to a stranger's file. So users are counted, and the last one out closes.
        with self._lock:
            self._check_alive_locked(lost_counts=not closing)  # finish() removes the file before it says so
            if self._state != "open":
                raise self._state_error(f"the file is {self._state} already")
            if closing:
                self._state = "closing"
            self._users += 1
            return self._fd

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            fd = self._take_unused_fd() if self._state == "aborted" else -1
        if fd >= 0:
            _close_quietly(fd, self.path)

    def _take_unused_fd(self) -> int:
        if self._users:
            return -1
        fd, self._fd = self._fd, -1
        return fd

    def _check_alive(self) -> None:
        with self._lock:
            self._check_alive_locked()

    def _check_alive_locked(self, *, lost_counts: bool = True) -> None:
        if self._state == "aborted":
            raise self._state_error("the file was aborted")
        if self._lost is not None and lost_counts:
            # A copy: the one that is kept must not gather tracebacks, whose frames hold the caller's memory.
            raise copy.copy(self._lost)

    def _state_error(self, what: str) -> StorageError:
        return StorageError(what, step=self._step, path=self.path, phase="write")


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _open(path: str, size: int, direct: bool | Literal["auto"], step: int | None) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if direct is True and not fs.O_DIRECT:
            raise OSError(errno.EOPNOTSUPP, "this platform has no O_DIRECT")
        if direct and fs.O_DIRECT:
            try:
                return os.open(path, flags | fs.O_DIRECT, 0o666), True
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                # Linux makes the file before it finds out that the file system can't do O_DIRECT, and leaves it there;
                # it is ours, or O_EXCL would have refused.
                _unlink_quietly(path)
                if direct is True:
                    raise
                _log.info("%s: O_DIRECT refused (%s), writing through the page cache", path, error.strerror)
        return os.open(path, flags, 0o666), False
    except OSError as error:
        raise _storage_error("creating the file failed", error, path, size, step) from error


def _close_quietly(fd: int, path: str) -> None:
    try:
        os.close(fd)
    except OSError as error:
        _log.debug("%s: close of a file that is given up: %s", path, error)


def _unlink_quietly(path: str, identity: tuple[int, int] | None = None) -> None:
    """Removes a file; with ``identity`` only if it still is that one, not what a later attempt made in its place."""
    try:
        if identity is not None:
            found = os.lstat(path)
            if (found.st_dev, found.st_ino) != identity:
                return
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("%s: could not remove an unfinished shard file: %s", path, error)


def _storage_error(what: str, error: OSError, path: str, size: int, step: int | None) -> StorageError:
    code = error.errno
    name = errno.errorcode.get(code, str(code)) if code is not None else "no errno"
    return StorageError(
        f"{what}: {name} ({error.strerror or error}); the file takes {size} bytes",
        step=step,
        path=path,
        phase="write",
        errno=code,
        hint=_hint(code, path),
    )


def _hint(code: int | None, path: str) -> str | None:
    if code == errno.ENOSPC:
        try:
            free = f"{fs.free_bytes(os.path.dirname(path) or '.')} bytes are free"
        except OSError:
            free = "the file system is full"
        return f"{free} (inodes may be used up as well: df -i); make room or keep fewer checkpoints (keep_last)."
    if code == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY:
            return f"files may be {limit} bytes long here (RLIMIT_FSIZE, ulimit -f); raise it, or use more writers."
        return "the file system has no files of that length; use more writers, each makes a file of its own."
    return _HINTS.get(code) if code is not None else None


_HINTS = {
    errno.EDQUOT: "the disk quota of this user or project is used up; make room or have it raised.",
    errno.EROFS: "the file system is read-only; if it was not, an error made the kernel remount it: see dmesg.",
    errno.EIO: "the device or file server failed: see dmesg; do not trust other files written at the same time.",
    errno.EINVAL: 'if direct_io is True: this file system does not take O_DIRECT, set it to "auto" or False.',
    errno.EOPNOTSUPP: 'if direct_io is True: there is no O_DIRECT here, set it to "auto" or False.',
    errno.EEXIST: "something has that name already; is another run writing to this directory?",
    errno.ENOENT: "the directory is gone; was it removed while the save ran?",
    errno.EACCES: "this user may not write there.",
    errno.EMFILE: "raise the limit of open files (ulimit -n).",
}
