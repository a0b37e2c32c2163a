"""Linux calls that Python doesn't offer: what they do, and the plain answer where they are missing."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from ckpt_engine.storage import fs

pytestmark = pytest.mark.timeout(60)


# -- exchange --------------------------------------------------------------------------------------------------------


def test_exchange_swaps_and_no_reader_ever_finds_a_name_missing(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for directory, content in ((a, "1"), (b, "2")):
        directory.mkdir()
        (directory / "content").write_text(content)
    if not fs.exchange(str(a), str(b)):
        pytest.skip("this file system has no RENAME_EXCHANGE")
    assert (a / "content").read_text() == "2"
    assert (b / "content").read_text() == "1"
    stop, missing, looks = threading.Event(), [], []

    def look() -> None:
        while not stop.is_set():
            looks.append(1)
            try:
                os.stat(a)
            except FileNotFoundError as error:
                missing.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(2000):
        assert fs.exchange(str(a), str(b))
    stop.set()
    reader.join(10)
    assert looks and not missing


def test_exchange_with_a_missing_name_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        fs.exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert caught.value.filename2 == str(tmp_path / "b")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.EPERM])
def test_exchange_that_kernel_or_file_system_lack_is_false(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs, "_renameat2", lambda *_: -1)
    monkeypatch.setattr(fs.ctypes, "get_errno", lambda: code)
    assert not fs.exchange(str(tmp_path / "a"), str(tmp_path / "b"))


def test_exchange_without_the_libc_function_uses_the_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    if not fs.exchange(str(tmp_path / "a"), str(tmp_path / "b")):
        pytest.skip("this file system has no RENAME_EXCHANGE")
    monkeypatch.setattr(fs, "_renameat2", None)
    if fs.platform.machine() in fs._SYS_RENAMEAT2:
        assert fs.exchange(str(tmp_path / "a"), str(tmp_path / "b"))
        assert (tmp_path / "a").read_bytes() == b"1"
    monkeypatch.setattr(fs.platform, "machine", lambda: "pdp11")
    assert not fs.exchange(str(tmp_path / "a"), str(tmp_path / "b"))


# -- fallocate, free_bytes, sync_range ---------------------------------------------------------------------------------


def test_fallocate_reserves_real_blocks_and_sets_the_length(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        if not fs.fallocate(file.fileno(), 1 << 20):
            pytest.skip("this file system has no fallocate")
        facts = os.fstat(file.fileno())
    assert facts.st_size == 1 << 20
    assert facts.st_blocks * 512 >= 1 << 20


def test_fallocate_is_not_emulated_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe can't be preallocated, and nothing may be written to it in the attempt."""
    monkeypatch.setattr(fs, "_fallocate", lambda *_: -1)
    for code, expected in ((errno.EOPNOTSUPP, False), (errno.ENOSYS, False), (errno.EINTR, False)):
        monkeypatch.setattr(fs.ctypes, "get_errno", lambda code=code: code)
        assert fs.fallocate(0, 4096) is expected
    monkeypatch.setattr(fs, "_fallocate", None)
    assert not fs.fallocate(0, 4096)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO])
def test_fallocate_that_can_not_get_the_bytes_raises(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "_fallocate", lambda *_: -1)
    monkeypatch.setattr(fs.ctypes, "get_errno", lambda: code)
    with pytest.raises(OSError) as caught:
        fs.fallocate(0, 4096)
    assert caught.value.errno == code


def test_fallocate_beyond_the_free_space_says_enospc(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        if not fs.fallocate(file.fileno(), 4096):
            pytest.skip("this file system has no fallocate")
        with pytest.raises(OSError) as caught:
            fs.fallocate(file.fileno(), 1 << 62)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)


def test_free_bytes_is_what_this_user_may_write(tmp_path: Path) -> None:
    facts = os.statvfs(tmp_path)
    assert abs(fs.free_bytes(str(tmp_path)) - facts.f_bavail * facts.f_frsize) < 8 << 30  # others write meanwhile
    with pytest.raises(FileNotFoundError):
        fs.free_bytes(str(tmp_path / "nowhere"))


def test_sync_range_falls_back_to_fdatasync_and_only_when_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    with open(tmp_path / "x", "wb") as file:
        file.write(bytes(8192))
        file.flush()
        fs.sync_range(file.fileno(), 0, 8192, wait=True)
        assert synced == []
        monkeypatch.setattr(fs, "_sync_file_range", lambda *_: -1)
        monkeypatch.setattr(fs.ctypes, "get_errno", lambda: errno.ENOSYS)
        fs.sync_range(file.fileno(), 0, 8192, wait=False)
        assert synced == []
        fs.sync_range(file.fileno(), 0, 8192, wait=True)
        assert synced == [file.fileno()]
        monkeypatch.setattr(fs.ctypes, "get_errno", lambda: errno.EIO)
        with pytest.raises(OSError):
            fs.sync_range(file.fileno(), 0, 8192, wait=True)
