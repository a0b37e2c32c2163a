"""Small durable file-system steps.

Holds what ``os`` and ``shutil`` lack: a file replaced in one durable step, directories made durably and without the
race of ``makedirs``, removal that follows no symlink, and three Linux calls that Python doesn't offer (``fallocate``,
``renameat2``, ``sync_file_range``), each with a plain "not here" answer where kernel or file system can't.

Promises: when a function returns, what its docstring says is on the device; when :func:`write_atomic` fails or the
machine dies in it, the file has its old content or its new one. A kill may leave a file named :data:`TEMP_PREFIX` +
random. Errors are the ``OSError`` of the call that failed, with the path in it; callers add step and phase. No retries
of failed writes, no locks, no child process.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import secrets
import stat
import time
from typing import Any

_log = logging.getLogger("ckpt_engine")

#: Flag of ``os.open``; 0 where the platform has none, so that it can be or-ed in and tested.
O_DIRECT: int = getattr(os, "O_DIRECT", 0)

#: Start of the names of files that :func:`write_atomic` is busy with.
TEMP_PREFIX = ".ckpt_engine.tmp-"

#: How long a directory that "exists" may stay invisible: network file systems cache attributes for about a second.
_VISIBLE_SECONDS = 2.0

#: Answers that mean "this kernel or file system doesn't have that call". EPERM is what old seccomp filters answer.
_NOT_SUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENODEV, errno.EPERM})

_RENAME_EXCHANGE = 2
_SYS_RENAMEAT2 = {"x86_64": 316, "aarch64": 276, "ppc64le": 357, "riscv64": 276, "s390x": 347}
_AT_FDCWD = -100
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


def _load_libc() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)  # CDLL, unlike PyDLL, releases the GIL during a call
    except OSError:
        return None


_libc = _load_libc()
_off_t = ctypes.c_int64


def _function(name: str, *argument_types: Any) -> Any:
    """A function of libc that returns int and sets errno, or None if libc doesn't have it."""
    function = getattr(_libc, name, None)
    if function is not None:
        function.restype = ctypes.c_int
        function.argtypes = argument_types
    return function


# On 32-bit systems plain fallocate takes a 32-bit offset.
_fallocate = _function(
    "fallocate" if ctypes.sizeof(ctypes.c_long) == 8 else "fallocate64", ctypes.c_int, ctypes.c_int, _off_t, _off_t
)
_sync_file_range = _function("sync_file_range", ctypes.c_int, _off_t, _off_t, ctypes.c_uint)
_renameat2 = _function("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_syscall = getattr(_libc, "syscall", None)


# -- directories -------------------------------------------------------------------------------------------------------


def fsync_dir(path: str) -> None:
    """Makes the names in a directory durable. Nothing happens where the file system can't sync directories."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise _with_path(error, path) from None
        _log.debug("%s: this file system does not sync directories", path)
    finally:
        os.close(fd)


def make_directory(path: str) -> None:
    """Makes a directory and its missing parents, durably. Fine if it is there already, whoever makes it meanwhile.

    Raises:
        FileExistsError: something that isn't a directory has that name.
    """
    _make_directory(path, time.monotonic() + _VISIBLE_SECONDS)


def _make_directory(path: str, deadline: float) -> None:
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path.rstrip("/")) or ("/" if path.startswith("/") else ".")
    pause, parent_made = 0.005, False
    while True:
        try:
            os.mkdir(path)
        except FileExistsError:
            # Another rank was first. On a network file system its directory may exist for mkdir and not yet for stat:
            # makedirs(exist_ok=True) dies of that, and one dead rank hangs all others (B061).
            if os.path.isdir(path):
                fsync_dir(parent)
                return
            if _is_something_else(path) or time.monotonic() > deadline:
                raise
        except FileNotFoundError:
            if parent == path or time.monotonic() > deadline:
                raise
            _make_directory(parent, deadline)
            if not parent_made:
                parent_made = True
                continue
        else:
            fsync_dir(parent)
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _is_something_else(path: str) -> bool:
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except OSError:
        return False


def remove_tree(path: str) -> None:
    """Removes a directory with all that is in it, or a single file. Fine if it isn't there.

    A symlink is removed itself, never what it points to, even if it takes a directory's place while this runs.
    """
    try:
        _remove_entry(path.rstrip("/") or path, None)  # "link/" would follow the link
    except OSError as error:
        raise _with_path(error, path) from None


def _remove_entry(name: str, dir_fd: int | None) -> None:
    """Removes ``name`` of the directory open as ``dir_fd``."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        _unless_missing(os.unlink, name, dir_fd)
        return
    try:
        for attempt in range(3):
            with os.scandir(fd) as entries:
                names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for child, is_directory in names:
                if is_directory:
                    _remove_entry(child, fd)
                else:
                    _unless_missing(os.unlink, child, fd)
            try:
                _unless_missing(os.rmdir, name, dir_fd)
                return
            except OSError as error:
                # Somebody put a file in after the listing, or a network file system still shows one that is gone.
                if attempt == 2 or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                time.sleep(0.05)
    finally:
        os.close(fd)


def _unless_missing(remove: Any, name: str, dir_fd: int | None) -> None:
    try:
        remove(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass


def exchange(a: str, b: str) -> bool:
    """Swaps two names in one step: no reader ever finds one missing. False if the kernel or file system can't.

    Not durable before :func:`fsync_dir` of the directories concerned.
    """
    arguments = (_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    if _renameat2 is not None:
        failed = _renameat2(*arguments) != 0
    elif _syscall is not None and platform.machine() in _SYS_RENAMEAT2:  # a libc older than the kernel
        number, at, name = ctypes.c_long(_SYS_RENAMEAT2[platform.machine()]), ctypes.c_int(_AT_FDCWD), ctypes.c_char_p
        failed = _syscall(number, at, name(arguments[1]), at, name(arguments[3]), ctypes.c_uint(_RENAME_EXCHANGE)) != 0
    else:
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), a, None, b)


# -- files -------------------------------------------------------------------------------------------------------------


def write_atomic(path: str, data: bytes, *, mode: int = 0o666) -> None:
    """Gives a file this content in one durable step: temporary file, fsync, rename, fsync of the directory.

    The permissions are ``mode`` less the umask, as for any new file. A symlink at ``path`` is replaced, not followed.
    On failure the temporary file is gone and ``path`` is untouched, unless it was the last fsync that failed: then the
    new content is in place and may not survive a power cut.
    """
    directory = os.path.dirname(path) or "."
    temp, fd = _open_temp(directory, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                written = os.write(fd, view)
                if written == 0:  # would loop for ever
                    raise OSError(errno.EIO, f"write took 0 of {len(view)} bytes")
                view = view[written:]
            # Without this a power cut after the rename leaves the new name with no content.
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temp, path)
    except BaseException as error:
        try:
            os.unlink(temp)
        except OSError:
            pass
        if isinstance(error, OSError):
            raise _with_path(error, path) from None
        raise
    fsync_dir(directory)


def _open_temp(directory: str, mode: int) -> tuple[str, int]:
    # O_EXCL and O_NOFOLLOW: in a directory that others may write to, a symlink planted at the name would otherwise make
    # us write through it. A name that is taken is no failure, though: another is as good.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(100):
        temp = os.path.join(directory, TEMP_PREFIX + secrets.token_hex(8))
        try:
            return temp, os.open(temp, flags, mode)
        except FileExistsError:
            continue
    raise FileExistsError(errno.EEXIST, "100 random temporary names were all taken", directory)


def fallocate(fd: int, size: int) -> bool:
    """Reserves the first ``size`` bytes of a file and makes it that long. False where that isn't supported.

    The call itself, not ``posix_fallocate``: where the file system can't reserve, glibc's touches every block.

    Raises:
        OSError: ENOSPC, EDQUOT, EFBIG, EIO: the bytes can't be had.
    """
    if _fallocate is None:
        return False
    # A file system that undoes its work on a signal (tmpfs) may never get through in a process with a profiling timer.
    # Reserving is an aid: after some tries, go on without.
    for _ in range(20):
        if _fallocate(fd, 0, 0, size) == 0:
            return True
        code = ctypes.get_errno()
        if code in _NOT_SUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return False


def sync_range(fd: int, offset: int, nbytes: int, *, wait: bool) -> None:
    """Starts writing back the dirty pages of a range; with ``wait`` returns when they are written.

    Neither metadata nor the device's own cache are flushed: this bounds dirty memory, it makes nothing durable.

    Raises:
        OSError: writing back failed. The kernel reports that once for each descriptor, so that an fsync after it would
            succeed although bytes are lost: the file is to be given up.
    """
    if _sync_file_range is not None:
        flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER if wait else _WRITE
        while _sync_file_range(fd, offset, nbytes, flags) != 0:
            code = ctypes.get_errno()
            if code in _NOT_SUPPORTED or code == errno.ESPIPE:
                break
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        else:
            return
    if wait:
        getattr(os, "fdatasync", os.fsync)(fd)


def drop_cache(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Gives clean cached pages of a range (0 bytes: to the end) back to the system. Advice: failing is no failure."""
    advise = getattr(os, "posix_fadvise", None)
    if advise is not None:
        try:
            advise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            _log.debug("posix_fadvise(DONTNEED): %s", error)


def free_bytes(path: str) -> int:
    """Bytes that this user can still write to the file system of ``path`` (blocks kept for root not counted)."""
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def _with_path(error: OSError, path: str) -> OSError:
    """The same error, naming the file: errors of calls on descriptors don't."""
    if error.filename is not None or error.errno is None:
        return error
    return OSError(error.errno, error.strerror, path)
