"""Durable file-system steps: what is left on disk after each, and after each way to fail."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.storage import fs

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Notes (call, file name) of each fsync, rename and mkdir, and lets them happen."""
    log: list[tuple[str, str]] = []

    def spy(name: str, where: Callable[..., str]) -> None:
        real = getattr(os, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            log.append((name, where(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, wrapped)

    spy("fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    spy("rename", lambda a, b: str(b))
    spy("mkdir", lambda path, *rest: str(path))
    return log


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0)
    os.umask(before)
    yield os.umask
    os.umask(before)


def fail(code: int) -> Callable[..., Any]:
    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return failing


# -- write_atomic ----------------------------------------------------------------------------------------------------


def test_content_is_durable_before_the_name_and_the_name_before_returning(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    path = tmp_path / "tracker.txt"
    fs.write_atomic(str(path), b"100")
    assert path.read_bytes() == b"100"
    assert [name for name, _ in calls] == ["fsync", "rename", "fsync"]
    assert os.path.basename(calls[0][1]).startswith(fs.TEMP_PREFIX)
    assert os.path.dirname(calls[0][1]) == str(tmp_path)  # another directory could be another file system
    assert calls[1:] == [("rename", str(path)), ("fsync", str(tmp_path))]
    assert os.listdir(tmp_path) == ["tracker.txt"]


def test_relative_path_and_empty_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fs.write_atomic("x", b"")
    assert (tmp_path / "x").read_bytes() == b""


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data[:7])))
    data = os.urandom(100)
    fs.write_atomic(str(tmp_path / "x"), data)
    assert (tmp_path / "x").read_bytes() == data


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "close"])
def test_failure_keeps_the_old_content_and_leaves_no_temporary_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    real_close = os.close
    with monkeypatch.context() as patch:
        if call == "close":
            patch.setattr(os, "close", lambda fd: (real_close(fd), fail(errno.EIO)()))
        else:
            patch.setattr(os, call, fail(errno.EIO))
        with pytest.raises(OSError) as caught:
            fs.write_atomic(str(path), b"new")
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_write_that_takes_nothing_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(OSError, match="took 0 of 3 bytes"):
        fs.write_atomic(str(tmp_path / "x"), b"new")
    assert os.listdir(tmp_path) == []


def test_symlink_at_the_temporary_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    directory = tmp_path / "d"
    directory.mkdir()
    planted = directory / (fs.TEMP_PREFIX + "guessed")
    planted.symlink_to(victim)
    names = iter(["guessed", "fresh"])
    monkeypatch.setattr(secrets, "token_hex", lambda *_: next(names))
    fs.write_atomic(str(directory / "x"), b"new")
    assert victim.read_bytes() == b"precious"
    assert planted.is_symlink()
    assert (directory / "x").read_bytes() == b"new"


def test_symlink_at_the_final_name_is_replaced_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "x").symlink_to(victim)
    fs.write_atomic(str(tmp_path / "x"), b"new")
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "x").is_symlink()


@pytest.mark.parametrize(
    ("mask", "mode", "expected"), [(0o022, 0o666, 0o644), (0o007, 0o666, 0o660), (0, 0o600, 0o600)]
)
def test_umask_is_honoured(mask: int, mode: int, expected: int, tmp_path: Path, umask: Callable[[int], int]) -> None:
    umask(mask)
    fs.write_atomic(str(tmp_path / "x"), b"new", mode=mode)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == expected


def test_reader_finds_old_or_new_content_never_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    contents = {bytes([n]) * 5000 for n in range(20)}
    path.write_bytes(bytes(5000))
    stop, seen = threading.Event(), set()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for content in contents:
        fs.write_atomic(str(path), content)
    stop.set()
    reader.join(10)
    assert seen and seen <= contents


def test_no_descriptor_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fs.write_atomic(str(tmp_path / "x"), b"new")
    fs.make_directory(str(tmp_path / "a/b"))
    fs.remove_tree(str(tmp_path / "a"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail(errno.EIO))
        with pytest.raises(OSError):
            fs.write_atomic(str(tmp_path / "x"), b"newer")
        with pytest.raises(OSError):
            fs.fsync_dir(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


# -- directories -----------------------------------------------------------------------------------------------------


def test_fsync_dir_names_the_directory_and_tolerates_file_systems_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.fsync_dir(str(tmp_path))
    monkeypatch.setattr(os, "fsync", fail(errno.EINVAL))
    fs.fsync_dir(str(tmp_path))
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with pytest.raises(OSError) as caught:
        fs.fsync_dir(str(tmp_path))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path))


def test_every_parent_that_got_a_new_directory_is_synced(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    fs.make_directory(str(tmp_path / "a" / "b" / "c"))
    assert (tmp_path / "a/b/c").is_dir()
    synced = [path for name, path in calls if name == "fsync"]
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")]
    calls.clear()
    fs.make_directory(str(tmp_path / "a" / "b" / "c"))  # idempotent, and free
    assert calls == []


@pytest.mark.parametrize("spelling", ["a/b", "a/b/", "./a//b"])
def test_relative_directory_and_odd_spellings(spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fs.make_directory(spelling)
    assert (tmp_path / "a/b").is_dir()


def test_directory_that_exists_for_mkdir_but_not_yet_for_stat_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B061: FileExistsError from mkdir, and for 300 ms no directory to be seen."""
    path = tmp_path / "iter_0000001"
    real_isdir, real_mkdir = os.path.isdir, os.mkdir
    refused: list[float] = []

    def mkdir(name: str, *rest: Any, **options: Any) -> None:
        if not refused:
            refused.append(time.monotonic())
            real_mkdir(name)  # by another rank, a moment ago
            raise FileExistsError(errno.EEXIST, "File exists", name)
        real_mkdir(name, *rest, **options)

    def isdir(name: str) -> bool:
        return bool((not refused or time.monotonic() - refused[0] > 0.3) and real_isdir(name))

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os.path, "isdir", isdir)
    fs.make_directory(str(path))
    assert time.monotonic() - refused[0] >= 0.3
    assert real_isdir(path)


def test_refusal_of_mkdir_for_a_directory_that_is_not_there_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B061, the other way round: the directory that mkdir ran into has gone, and must be made after all."""
    real, refusals = os.mkdir, [FileExistsError(errno.EEXIST, "File exists"), FileNotFoundError(errno.ENOENT, "gone")]

    def mkdir(name: str, *rest: Any, **options: Any) -> None:
        if refusals:
            raise refusals.pop()
        real(name, *rest, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    fs.make_directory(str(tmp_path / "d"))
    assert (tmp_path / "d").is_dir()


def test_many_threads_make_the_same_directories_without_an_error(tmp_path: Path) -> None:
    """B061 without patches: everybody makes everything."""
    errors: list[BaseException] = []
    gate = threading.Barrier(8)

    def make() -> None:
        try:
            gate.wait(10)
            for n in range(20):
                fs.make_directory(str(tmp_path / f"x{n}" / "y" / "z"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert all((tmp_path / f"x{n}/y/z").is_dir() for n in range(20))


@pytest.mark.parametrize("below", ["", "/sub"])
def test_file_in_the_way_is_reported_at_once(below: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    begin = time.monotonic()
    with pytest.raises((FileExistsError, NotADirectoryError)):
        fs.make_directory(str(tmp_path / "x") + below)
    assert time.monotonic() - begin < 1.0


def test_directory_that_never_shows_is_given_up_within_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs, "_VISIBLE_SECONDS", 0.2)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    begin = time.monotonic()
    with pytest.raises(FileExistsError):
        fs.make_directory(str(tmp_path / "dangling"))
    assert 0.2 <= time.monotonic() - begin < 2.0


# -- remove_tree -----------------------------------------------------------------------------------------------------


def test_tree_is_removed_and_its_symlinks_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "f").write_bytes(b"precious")
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "f").write_bytes(b"x")
    (tree / "a" / "dir_link").symlink_to(outside)
    (tree / "file_link").symlink_to(outside / "deep" / "f")
    (tree / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tree / "fifo")
    fs.remove_tree(str(tree))
    assert not tree.exists()
    assert (outside / "deep" / "f").read_bytes() == b"precious"
    fs.remove_tree(str(tree))  # missing is fine


@pytest.mark.parametrize("slash", ["", "/"])
def test_symlink_to_a_tree_is_removed_itself(slash: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "f").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(target)
    fs.remove_tree(str(tmp_path / "link") + slash)
    assert not (tmp_path / "link").is_symlink()
    assert (target / "f").read_bytes() == b"precious"


def test_single_file_is_removed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    fs.remove_tree(str(tmp_path / "f"))
    assert os.listdir(tmp_path) == []


def test_two_removers_of_one_tree_both_succeed(tmp_path: Path) -> None:
    for round_number in range(5):
        tree = tmp_path / f"t{round_number}"
        for n in range(30):
            (tree / f"d{n}").mkdir(parents=True)
            (tree / f"d{n}" / "f").write_bytes(b"x")
        errors: list[BaseException] = []

        def remove(path: str = str(tree), errors: list[BaseException] = errors) -> None:
            try:
                fs.remove_tree(path)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=remove) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert errors == []
        assert not tree.exists()


def test_file_put_in_during_removal_is_removed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    real, late = os.rmdir, ["late"]

    def rmdir(name: str, **options: Any) -> None:
        if late:
            (tree / late.pop()).write_bytes(b"x")
        real(name, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    fs.remove_tree(str(tree))
    assert not tree.exists()


def test_removal_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(b"x")
    monkeypatch.setattr(os, "unlink", fail(errno.EIO))
    with pytest.raises(OSError) as caught:
        fs.remove_tree(str(tmp_path / "tree"))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "tree"))
