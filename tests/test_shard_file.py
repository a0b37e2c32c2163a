"""Shard files: the bytes that were handed over, whatever open() and write() answer."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import StorageError
from ckpt_engine.storage import fs
from ckpt_engine.storage.shard_file import ShardFile
from tests.shard_tools import MIB, PAGE, aligned, no_descriptor_left_open, takes_direct, write_all

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with no_descriptor_left_open():
        yield str(tmp_path / "__0_0.distcp")


@pytest.fixture
def needs_direct(tmp_path: Path) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("the file system of the temporary directory does not take O_DIRECT")


# -- content ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * MIB, 3 * MIB + 17])
def test_file_has_the_bytes_and_the_length(size: int, direct: Any, path: str) -> None:
    data = aligned(size)
    file = ShardFile.create(path, size, direct=direct, step=3)
    if size:
        write_all(file, data)
    file.finish()
    assert Path(path).read_bytes() == bytes(data[:size])
    assert (file.path, file.size) == (path, size)


def test_direct_file_is_direct_and_buffered_is_not(path: str, needs_direct: None) -> None:
    for direct in (True, "auto", False):
        file = ShardFile.create(path, PAGE, direct=direct)
        assert file.direct is (direct is not False)
        assert bool(fcntl.fcntl(file._fd, fcntl.F_GETFL) & fs.O_DIRECT) is file.direct
        file.abort()


@pytest.mark.parametrize("direct", ["auto", False])
def test_several_threads_write_different_extents_at_once(direct: Any, path: str) -> None:
    data = aligned(24 * MIB + 100)
    file = ShardFile.create(path, 24 * MIB + 100, direct=direct)
    starts = list(range(0, data.nbytes, MIB))
    errors: list[BaseException] = []

    def work(mine: list[int]) -> None:
        try:
            for start in mine:
                file.write(data[start : start + MIB], start)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(starts[n::4][::-1],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    file.finish()
    assert Path(path).read_bytes() == bytes(data[: file.size])


def test_writes_of_two_threads_are_in_the_kernel_at_the_same_time(
    path: str, needs_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, both = os.pwrite, threading.Barrier(2)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        both.wait(20)  # breaks if one write holds up the other
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = aligned(2 * PAGE)
    file = ShardFile.create(path, 2 * PAGE, direct=True)
    other = threading.Thread(target=file.write, args=(data[PAGE:], PAGE))
    other.start()
    file.write(data[:PAGE], 0)
    other.join(30)
    file.finish()
    assert Path(path).read_bytes() == bytes(data)


@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("most", [1, 700, PAGE, PAGE + 700, 3 * PAGE])
def test_short_writes_are_continued(most: int, direct: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, offsets = os.pwrite, []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        """Takes ``most`` bytes, at first in the direct mode's own way: what it reports may end anywhere."""
        offsets.append(offset)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & fs.O_DIRECT:
            whole = -(-most // PAGE) * PAGE
            real(fd, data[:whole], offset)
            return min(most, data.nbytes)
        return real(fd, data[:most], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    size = 2 * PAGE + 50 if most == 1 else 20 * PAGE + 50
    data = aligned(size)
    file = ShardFile.create(path, size, direct=direct)
    was_direct = file.direct
    file.write(data, 0)
    if was_direct and most > PAGE:
        assert file.direct
        assert all(offset % PAGE == 0 for offset in offsets), "a direct write began inside a block"
    file.finish()
    assert Path(path).read_bytes() == bytes(data[:size])


def test_direct_writes_that_never_get_on_end_in_an_error_not_in_a_loop(
    path: str, needs_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 100)
    file = ShardFile.create(path, 4 * PAGE, direct=True)
    with pytest.raises(StorageError, match="in a row"):
        file.write(aligned(4 * PAGE), 0)
    file.abort()


@pytest.mark.parametrize("direct", ["auto", False])
def test_write_that_takes_nothing_is_an_error(direct: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    file = ShardFile.create(path, PAGE, direct=direct)
    with pytest.raises(StorageError, match="took 0 bytes") as caught:
        file.write(aligned(PAGE), 0)
    assert caught.value.errno == errno.EIO
    file.abort()


@pytest.mark.parametrize(("nbytes", "offset"), [(PAGE, 1), (PAGE, -PAGE), (PAGE, 4 * PAGE), (5 * PAGE, 0)])
def test_misaligned_or_too_long_writes_are_refused(nbytes: int, offset: int, path: str) -> None:
    file = ShardFile.create(path, 3 * PAGE + 1, direct="auto")
    with pytest.raises(ValueError, match=f"{nbytes} bytes at offset {offset}"):
        file.write(aligned(nbytes), offset)
    file.abort()


def test_direct_write_of_part_of_a_block_is_refused(path: str, needs_direct: None) -> None:
    file = ShardFile.create(path, PAGE, direct=True)
    with pytest.raises(ValueError, match="direct write of 100 bytes"):
        file.write(aligned(PAGE)[:100], 0)
    file.abort()


# -- O_DIRECT refused ------------------------------------------------------------------------------------------------


@pytest.fixture
def open_refuses_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does it on a file system without O_DIRECT: the file is made, then the open fails."""
    real = os.open

    def opener(name: str, flags: int, *rest: Any, **options: Any) -> int:
        if flags & fs.O_DIRECT:
            os.close(real(name, flags & ~fs.O_DIRECT, *rest, **options))
            raise OSError(errno.EINVAL, "Invalid argument", name)
        return real(name, flags, *rest, **options)

    monkeypatch.setattr(os, "open", opener)


def test_auto_falls_back_where_open_refuses(path: str, open_refuses_direct: None) -> None:
    data = aligned(PAGE + 5)
    file = ShardFile.create(path, PAGE + 5, direct="auto")
    assert not file.direct
    file.write(data, 0)
    file.finish()
    assert Path(path).read_bytes() == bytes(data[: PAGE + 5])


def test_true_raises_where_open_refuses_and_leaves_no_file(path: str, open_refuses_direct: None) -> None:
    with pytest.raises(StorageError) as caught:
        ShardFile.create(path, PAGE, direct=True, step=9)
    error = caught.value
    assert (error.errno, error.step, error.path, error.phase) == (errno.EINVAL, 9, path, "write")
    assert error.hint is not None and "direct_io" in error.hint
    assert not os.path.exists(path)


def test_shared_memory_file_system_works_with_auto() -> None:
    """Old kernels refuse O_DIRECT on tmpfs, new ones take it: both must give the bytes, and True must not half-work."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    path = f"/dev/shm/ckpt_engine-test-{os.getpid()}.distcp"
    data = aligned(MIB + 3)
    for direct in ("auto", True):
        try:
            file = ShardFile.create(path, MIB + 3, direct=direct)  # type: ignore[arg-type]
        except StorageError as error:
            assert direct is True and error.errno in (errno.EINVAL, errno.EOPNOTSUPP)
            assert not os.path.exists(path)
            continue
        try:
            file.write(data, 0)
            file.finish()
            assert Path(path).read_bytes() == bytes(data[: MIB + 3])
        finally:
            file.abort()


def refuse_direct_writes(
    monkeypatch: pytest.MonkeyPatch, code: int, gate: threading.Barrier | None = None
) -> list[int]:
    real, refused = os.pwrite, []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & fs.O_DIRECT:
            refused.append(offset)
            if gate is not None:
                gate.wait(20)
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return refused


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_auto_falls_back_where_the_first_write_refuses(
    code: int, path: str, needs_direct: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt_engine")
    refused = refuse_direct_writes(monkeypatch, code)
    data = aligned(3 * MIB + 5)
    file = ShardFile.create(path, 3 * MIB + 5, direct="auto")
    assert file.direct
    write_all(file, data)
    assert not file.direct
    assert len(refused) == 1, "the file system was asked again after it had refused"
    file.finish()
    assert Path(path).read_bytes() == bytes(data[: file.size])
    assert sum("O_DIRECT refused" in record.message for record in caplog.records) == 1


def test_first_writes_of_two_threads_both_refused_both_fall_back(
    path: str, needs_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = refuse_direct_writes(monkeypatch, errno.EINVAL, threading.Barrier(2))
    data = aligned(2 * PAGE)
    file = ShardFile.create(path, 2 * PAGE, direct="auto")
    other = threading.Thread(target=file.write, args=(data[PAGE:], PAGE))
    other.start()
    file.write(data[:PAGE], 0)
    other.join(30)
    file.finish()
    assert sorted(refused) == [0, PAGE]
    assert Path(path).read_bytes() == bytes(data)


def test_true_raises_where_the_first_write_refuses(
    path: str, needs_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct_writes(monkeypatch, errno.EINVAL)
    file = ShardFile.create(path, PAGE, direct=True, step=4)
    with pytest.raises(StorageError, match=f"{PAGE} bytes at offset 0") as caught:
        file.write(aligned(PAGE), 0)
    assert (caught.value.errno, caught.value.step) == (errno.EINVAL, 4)
    file.abort()
    assert not os.path.exists(path)


def test_platform_without_o_direct(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "O_DIRECT", 0)
    file = ShardFile.create(path, PAGE, direct="auto")
    assert not file.direct
    file.abort()
    with pytest.raises(StorageError):
        ShardFile.create(path, PAGE, direct=True)
