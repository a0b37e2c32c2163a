"""Shard files that can't be made, written or ended: a typed error, no file, and no harm to anybody else's."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import StorageError
from ckpt_engine.storage import fs
from ckpt_engine.storage.shard_file import ShardFile
from tests.shard_tools import MIB, PAGE, aligned, fail, no_descriptor_left_open, target_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with no_descriptor_left_open():
        yield str(tmp_path / "__0_0.distcp")


# -- creation --------------------------------------------------------------------------------------------------------


def test_symlink_at_the_name_is_not_followed(path: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for target in (victim, tmp_path / "nowhere"):
        os.symlink(target, path)
        with pytest.raises(StorageError) as caught:
            ShardFile.create(path, PAGE, direct="auto")
        assert caught.value.errno in (errno.EEXIST, errno.ELOOP)
        assert os.path.islink(path)
        os.unlink(path)
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "nowhere").exists()


def test_existing_file_is_neither_opened_nor_removed(path: str) -> None:
    Path(path).write_bytes(b"other run")
    with pytest.raises(StorageError) as caught:
        ShardFile.create(path, PAGE, direct="auto")
    assert caught.value.errno == errno.EEXIST
    assert caught.value.hint is not None
    assert Path(path).read_bytes() == b"other run"


def test_umask_is_honoured_and_descriptor_is_not_inherited(path: str) -> None:
    before = os.umask(0o027)
    try:
        file = ShardFile.create(path, PAGE, direct="auto")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
    assert not os.get_inheritable(file._fd)
    file.abort()


def test_bytes_are_reserved_before_the_first_write(path: str, tmp_path: Path) -> None:
    with open(tmp_path / "probe", "wb") as probe:
        if not fs.fallocate(probe.fileno(), PAGE):
            pytest.skip("this file system has no fallocate")
    file = ShardFile.create(path, 3 * MIB + 1, direct="auto")
    assert os.stat(path).st_blocks * 512 >= 3 * MIB + 1
    file.finish()
    assert os.stat(path).st_size == 3 * MIB + 1


def test_empty_file_is_not_preallocated(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "fallocate", fail(errno.EINVAL))
    ShardFile.create(path, 0, direct="auto").finish()
    assert os.stat(path).st_size == 0


def test_file_system_without_fallocate_is_good_enough(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "fallocate", lambda fd, size: False)
    data = aligned(MIB + 9)
    file = ShardFile.create(path, MIB + 9, direct="auto")
    file.write(data, 0)
    file.finish()
    assert Path(path).read_bytes() == bytes(data[: MIB + 9])


@pytest.mark.faults
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_disk_that_can_not_hold_the_file_shows_at_creation_and_leaves_nothing(
    code: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs, "fallocate", fail(code))
    with pytest.raises(StorageError, match=f"reserving {MIB} bytes") as caught:
        ShardFile.create(path, MIB, direct="auto", step=7)
    error = caught.value
    assert (error.errno, error.step, error.path, error.phase) == (code, 7, path, "write")
    assert error.hint
    assert not os.path.exists(path)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOENT, errno.EMFILE, errno.ENOSPC])
def test_open_that_fails_becomes_a_storage_error_with_a_hint(
    code: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail(code))
        with pytest.raises(StorageError) as caught:
            ShardFile.create(path, MIB, direct="auto", step=7)
    assert (caught.value.errno, caught.value.step) == (code, 7)
    assert caught.value.hint
    assert errno.errorcode[code] in str(caught.value)


# -- failing writes --------------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO])
def test_failed_write_says_where_and_may_be_repeated(
    code: int, direct: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = aligned(2 * MIB)
    file = ShardFile.create(path, 2 * MIB, direct=direct, step=7)
    file.write(data[:MIB], 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail(code))
        with pytest.raises(StorageError, match=f"{MIB} bytes at offset {MIB}") as caught:
            file.write(data[MIB:], MIB)
    error = caught.value
    assert (error.errno, error.step, error.path, error.phase) == (code, 7, path, "write")
    assert error.hint
    assert str(2 * MIB) in error.message
    file.write(data[MIB:], MIB)
    file.finish()
    assert Path(path).read_bytes() == bytes(data)


LIMITED = """
import mmap, os, resource, sys
from ckpt_engine.errors import StorageError
from ckpt_engine.storage import fs
from ckpt_engine.storage.shard_file import ShardFile

path = sys.argv[1]
data = memoryview(mmap.mmap(-1, 8 << 20))

def save(direct):
    file = ShardFile.create(path, 8 << 20, direct=direct, step=5)
    try:
        file.write(data, 0)
        file.finish()
    except BaseException:
        file.abort()
        raise

real = fs.fallocate
for name, fallocate in (("reserved", real), ("not reserved", lambda fd, size: False)):
    fs.fallocate = fallocate
    for direct in ("auto", False):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        try:
            save(direct)
        except StorageError as error:
            assert "RLIMIT_FSIZE" in error.hint, error.hint
            assert (error.step, error.path, error.phase) == (5, path, "write")
            assert not os.path.exists(path)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            save(direct)
            print(name, direct, error.errno, os.stat(path).st_size, sep=", ")
            os.unlink(path)
"""


@pytest.mark.faults
def test_file_size_limit_is_a_typed_error_without_a_file_and_the_process_goes_on(path: str) -> None:
    """A root-free stand-in for a full disk: EFBIG at creation, or, without fallocate, in the middle of the writes."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", LIMITED, path]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    expected = [
        f"{name}, {direct}, {errno.EFBIG}, {8 * MIB}"
        for name in ("reserved", "not reserved")
        for direct in ("auto", False)
    ]
    assert done.stdout.splitlines() == expected, done.stderr


# -- finish and abort ------------------------------------------------------------------------------------------------


def test_length_is_final_before_the_only_fsync_and_the_fsync_before_close(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for name in ("ftruncate", "fsync", "close"):
        real = getattr(os, name)

        def spy(fd: int, *rest: Any, name: str = name, real: Any = real) -> Any:
            if target_of(str(fd)) == path:
                order.append(name)
            return real(fd, *rest)

        monkeypatch.setattr(os, name, spy)
    file = ShardFile.create(path, 100, direct="auto")
    file.write(aligned(PAGE), 0)
    file.finish()
    assert order == ["ftruncate", "fsync", "close"]


@pytest.mark.faults
@pytest.mark.parametrize("direct", ["auto", False])
def test_failed_fsync_discards_the_file_and_is_never_tried_again(
    direct: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[int] = []

    def fsync(fd: int) -> None:
        syncs.append(fd)
        if len(syncs) == 1:  # a second one would succeed, as after a real failure
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    file = ShardFile.create(path, PAGE, direct=direct, step=6)
    file.write(aligned(PAGE), 0)
    with pytest.raises(StorageError, match="fsync failed") as caught:
        file.finish()
    assert (caught.value.errno, caught.value.step) == (errno.EIO, 6)
    assert not os.path.exists(path)
    for again in (file.finish, lambda: file.write(aligned(PAGE), 0)):
        with pytest.raises(StorageError):
            again()
    file.abort()
    assert len(syncs) == 1


@pytest.mark.faults
@pytest.mark.parametrize("call", ["ftruncate", "close"])
def test_failure_at_the_end_discards_the_file(call: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ShardFile.create(path, PAGE, direct="auto")
    file.write(aligned(PAGE), 0)
    real_close = os.close
    with monkeypatch.context() as patch:
        if call == "close":
            patch.setattr(os, "close", lambda fd: (real_close(fd), fail(errno.EDQUOT)()))
        else:
            patch.setattr(os, call, fail(errno.EDQUOT))
        with pytest.raises(StorageError, match=f"{call} failed"):
            file.finish()
    assert not os.path.exists(path)


@pytest.mark.faults
def test_failed_writeback_gives_the_file_up_without_an_fsync(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a failed writeback once for each descriptor: the next fsync would succeed over lost bytes."""
    syncs: list[int] = []
    monkeypatch.setattr(os, "fsync", syncs.append)
    data = aligned(2 * MIB)
    file = ShardFile.create(path, 2 * MIB, direct=False, step=8)
    with monkeypatch.context() as patch:
        patch.setattr(fs, "sync_range", fail(errno.EIO))
        with pytest.raises(StorageError, match="writing back"):
            file.write(data[:MIB], 0)
    with pytest.raises(StorageError, match="writing back"):
        file.write(data[:MIB], 0)
    with pytest.raises(StorageError, match="writing back") as caught:
        file.finish()
    assert (caught.value.errno, caught.value.step) == (errno.EIO, 8)
    assert syncs == []
    assert not os.path.exists(path)


def test_abort_removes_an_open_and_a_finished_file_and_never_raises(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for finished in (False, True):
        file = ShardFile.create(path, PAGE, direct="auto")
        file.write(aligned(PAGE), 0)
        if finished:
            file.finish()
        file.abort()
        assert not os.path.exists(path)
        file.abort()
        with pytest.raises(StorageError, match="aborted"):
            file.write(aligned(PAGE), 0)
    file = ShardFile.create(path, PAGE, direct="auto")
    real_close = os.close
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", lambda fd: (real_close(fd), fail(errno.EIO)()))
        patch.setattr(os, "unlink", fail(errno.EACCES))
        file.abort()
    assert "could not remove" in caplog.text


def test_abort_leaves_alone_what_a_later_attempt_put_at_the_name(path: str) -> None:
    first = ShardFile.create(path, PAGE, direct="auto")
    os.rename(path, path + ".moved")
    second = ShardFile.create(path, PAGE, direct="auto")
    first.abort()
    assert os.path.exists(path)
    second.finish()
    first.abort()
    assert os.path.exists(path)


def test_finished_file_takes_no_more_writes_and_stays(path: str) -> None:
    file = ShardFile.create(path, PAGE, direct="auto")
    file.write(aligned(PAGE), 0)
    file.finish()
    for late in (file.finish, lambda: file.write(aligned(PAGE), 0)):
        with pytest.raises(StorageError, match="finished already"):
            late()
    assert os.stat(path).st_size == PAGE


def test_abort_during_a_write_closes_only_after_it(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor closed under a running write may be another file's by the time that the next piece is written."""
    real, inside, go_on = os.pwrite, threading.Event(), threading.Event()

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        inside.set()
        go_on.wait(20)
        return real(fd, data[:PAGE], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    file = ShardFile.create(path, 2 * PAGE, direct="auto")
    fd, caught = file._fd, []

    def write() -> None:
        try:
            file.write(aligned(2 * PAGE), 0)
        except StorageError as error:
            caught.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert inside.wait(10)
    begin = time.monotonic()
    file.abort()
    assert time.monotonic() - begin < 5, "abort() waited for the write"
    assert not os.path.exists(path)
    with open(tmp_path / "stranger", "wb") as stranger:
        assert stranger.fileno() != fd
        go_on.set()
        thread.join(10)
    assert (tmp_path / "stranger").read_bytes() == b""
    assert [error.message for error in caught] == ["the file was aborted"]
    assert target_of(str(fd)) is None or ".distcp" not in str(target_of(str(fd)))


def test_finish_during_a_write_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, inside, go_on = os.pwrite, threading.Event(), threading.Event()

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        inside.set()
        go_on.wait(20)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    file = ShardFile.create(path, PAGE, direct="auto")
    thread = threading.Thread(target=file.write, args=(aligned(PAGE), 0))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(StorageError, match="1 writes are running"):
        file.finish()
    go_on.set()
    thread.join(10)
    assert not os.path.exists(path)


def test_failed_write_does_not_pin_the_memory_it_was_given(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B062: while an error is kept, an exported view in its traceback would stop the pool from unmapping the extent."""
    memory = mmap.mmap(-1, PAGE)
    view = memoryview(memory)
    file = ShardFile.create(path, PAGE, direct="auto")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail(errno.EIO))
        with pytest.raises(StorageError) as caught:
            file.write(view, 0)
    assert caught.value.__traceback__ is not None
    view.release()
    memory.close()  # BufferError if a view is left
    file.abort()
