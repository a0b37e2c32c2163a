"""Promises of the directory lock: one engine per directory, in this process or any other, until it lets go or dies."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import IO

import pytest

from ckpt_engine.commit import lock as lock_module
from ckpt_engine.commit.directory import CheckpointDirectory
from ckpt_engine.errors import ConfigError, DirectoryBusyError, StorageError
from tests.checkpoints import fill

pytestmark = pytest.mark.timeout(90)

HOLDER = """
import os, sys, time
from ckpt_engine.commit.lock import DirectoryLock
lock = DirectoryLock(sys.argv[1])
lock.acquire()
child = 0
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> Iterator[CheckpointDirectory]:
    made = CheckpointDirectory(tmp_path)
    yield made
    made.unlock()


def start_holder(path: str, mode: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process that holds the lock; returns it and the pid of its forked child (0 without one)."""
    root = pathlib.Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", HOLDER, path, mode]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    out: IO[bytes] | None = holder.stdout
    line = out.readline() if out is not None else b""
    if not line:
        holder.wait(30)
        pytest.fail("the holder did not get the lock")
    return holder, int(line)


def end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait(30)
    if holder.stdout is not None:
        holder.stdout.close()


def test_a_second_engine_in_the_same_process_is_kept_out(
    directory: CheckpointDirectory, tmp_path: pathlib.Path
) -> None:
    other = CheckpointDirectory(f"{tmp_path}/")
    directory.lock()
    directory.lock()  # the same one may ask again
    with pytest.raises(DirectoryBusyError, match=f"process {os.getpid()} on ") as caught:
        other.lock()
    assert (caught.value.path, bool(caught.value.hint)) == (str(tmp_path), True)
    directory.unlock()
    directory.unlock()
    other.lock()
    with pytest.raises(DirectoryBusyError):
        directory.lock()
    other.unlock()


def test_the_lock_is_that_of_the_directory_and_not_of_its_path(
    directory: CheckpointDirectory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(directory.path)
    directory.lock()
    with pytest.raises(DirectoryBusyError):
        CheckpointDirectory(link).lock()


@pytest.mark.parametrize("cycle", [False, True])
def test_one_that_is_dropped_without_a_word_holds_nothing(
    directory: CheckpointDirectory, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cycle: bool
) -> None:
    """Else a notebook that made a second engine without closing the first had to be restarted."""
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    before = len(os.listdir("/proc/self/fd"))
    dropped = CheckpointDirectory(tmp_path)
    dropped.lock()
    with pytest.raises(DirectoryBusyError):
        directory.lock()
    if cycle:
        dropped.itself = dropped  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del dropped
        gc.collect()
    assert (said, caught) == ([], [])
    assert len(os.listdir("/proc/self/fd")) == before
    directory.lock()
    gc.collect()
    with pytest.raises(DirectoryBusyError):  # nothing that is left of the first one unlocks the second
        CheckpointDirectory(tmp_path).lock()


def test_the_lock_is_freed_where_a_forked_worker_has_a_copy_of_its_file(
    directory: CheckpointDirectory, tmp_path: pathlib.Path
) -> None:
    """A child that C code forked runs none of our handlers, and its copy of the descriptor keeps a lock alive."""
    dropped = CheckpointDirectory(tmp_path)
    dropped.lock()
    assert dropped._lock._file is not None
    copy = os.dup(dropped._lock._file.fd)
    try:
        del dropped
        gc.collect()
        directory.lock()
    finally:
        os.close(copy)


def test_another_process_is_kept_out_until_the_holder_is_killed(directory: CheckpointDirectory) -> None:
    holder, _ = start_holder(directory.path, "alone")
    try:
        with pytest.raises(DirectoryBusyError, match=f"process {holder.pid} on "):
            directory.lock()
    finally:
        end(holder)
    directory.lock()


def test_a_forked_worker_that_outlives_the_holder_does_not_keep_the_lock(directory: CheckpointDirectory) -> None:
    """A DataLoader worker inherits the trainer's descriptors, and with them its locks."""
    holder, worker = start_holder(directory.path, "fork")
    try:
        time.sleep(0.2)  # the worker has to run before its parent dies
        end(holder)
        os.kill(worker, 0)  # it does outlive it
        directory.lock()
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("how", ["unlock", "drop"])
@pytest.mark.parametrize("handlers", ["run", "skipped"])
def test_a_forked_worker_that_ends_does_not_free_the_lock_of_its_parent(
    directory: CheckpointDirectory, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, how: str, handlers: str
) -> None:
    holder = [CheckpointDirectory(tmp_path)]
    holder[0].lock()
    if handlers == "skipped":
        monkeypatch.setattr(lock_module, "_open_files", set())
    worker = os.fork()
    if worker == 0:
        status = 1
        try:
            assert holder[0]._lock.held == (handlers == "skipped")  # as if C code had forked
            if how == "unlock":
                holder[0].unlock()
            else:
                holder.clear()
                gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
    with pytest.raises(DirectoryBusyError):
        directory.lock()
    holder[0].unlock()
    directory.lock()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_used_with_a_warning_and_nothing_is_cleared(
    directory: CheckpointDirectory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    """Without a lock, a "left-over" may be the save that another engine is writing."""

    def unsupported(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    tmp = directory.begin(5, "ab")
    with caplog.at_level(logging.WARNING, "ckpt_engine"):
        directory.lock()
        assert directory.clear_leftovers() == []
    assert os.path.isdir(tmp)
    assert "no locks" in caplog.text
    assert "iter_0000005.tmp-ab" in caplog.text
    directory.unlock()


def test_a_lock_that_breaks_is_a_storage_error(directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", broken)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError) as caught:
        directory.lock()
    assert caught.value.errno == errno.EIO
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_planted_as_the_lock_file_is_not_followed(
    directory: CheckpointDirectory, tmp_path: pathlib.Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".ckpt_engine.lock").symlink_to(victim)
    with pytest.raises(StorageError):
        directory.lock()
    assert victim.read_text() == "precious"


def test_leftovers_are_cleared_only_under_the_lock(directory: CheckpointDirectory) -> None:
    tmp = directory.begin(5, "ab")
    fill(tmp, 5, "ab")
    with pytest.raises(ConfigError, match="locked"):
        directory.clear_leftovers()
    assert os.path.isdir(tmp)
    directory.lock()
    assert directory.clear_leftovers() == [tmp]
    assert not os.path.lexists(tmp)
