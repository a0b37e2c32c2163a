"""Promises about how a checkpoint becomes visible: all at once, whatever had its name before, or not at all."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable

import pytest

from ckpt_engine.commit.directory import CheckpointDirectory
from ckpt_engine.errors import ConfigError, StepExistsError, StorageError
from ckpt_engine.storage import fs
from tests.checkpoints import fill, save, write
from tests.manifests import seal

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> CheckpointDirectory:
    made = CheckpointDirectory(tmp_path / "checkpoints")
    made.check_usable()
    return made


def test_a_save_on_its_way_is_invisible(directory: CheckpointDirectory) -> None:
    tmp = directory.begin(100, "9f3a")
    assert tmp == os.path.join(directory.path, "iter_0000100.tmp-9f3a")
    assert os.path.isdir(os.path.join(tmp, "ckpt_engine"))
    fill(tmp, 100, "9f3a")
    assert (directory.steps(), directory.unverified_steps()) == ([], [])
    assert directory.publish(tmp, 100, "9f3a") == directory.path_of(100)
    assert directory.steps() == [100]
    assert os.listdir(directory.path) == ["iter_0000100"]


def test_a_discarded_save_leaves_nothing(directory: CheckpointDirectory) -> None:
    tmp = directory.begin(100, "9f3a")
    fill(tmp, 100, "9f3a")
    directory.discard(tmp)
    directory.discard(tmp)
    assert os.listdir(directory.path) == []


def test_nothing_but_a_save_on_its_way_is_published_or_discarded(directory: CheckpointDirectory) -> None:
    final = save(directory, 100)
    outside = os.path.join(os.path.dirname(directory.path), "iter_0000100.tmp-ab")
    os.mkdir(outside)
    for path in (final, directory.path, outside, os.path.join(final, "ckpt_engine"), "/"):
        with pytest.raises(ConfigError):
            directory.discard(path)
        with pytest.raises(ConfigError):
            directory.publish(path, 200, "ab")
    assert directory.steps() == [100]
    assert os.path.isdir(outside)


@pytest.mark.parametrize("save_id", ["", "../x", "a/b", "a.b", "x" * 65])
def test_a_save_id_can_not_lead_out_of_the_directory(directory: CheckpointDirectory, save_id: str) -> None:
    with pytest.raises(ConfigError):
        directory.begin(1, save_id)
    assert os.listdir(directory.path) == []


class Poller:
    """A reader in a thread of its own that keeps asking who is committed."""

    def __init__(self, directory: CheckpointDirectory, step: int) -> None:
        self._directory, self._step = directory, step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seen: set[str | None] = set()
        self.polls = 0

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            record = self._directory.committed(self._step)
            self.seen.add(record.save_id if record is not None else None)
            self.polls += 1

    def wait_for(self, polls: int) -> None:
        target, deadline = self.polls + polls, time.monotonic() + 20
        while self.polls < target and time.monotonic() < deadline:
            time.sleep(0.001)


def test_replacing_a_step_is_atomic_for_readers(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(directory, 100, save_id="first")
    if not fs.exchange(directory.begin(1, "a"), directory.begin(1, "b")):
        pytest.skip("this file system can't exchange two names")
    directory.discard(os.path.join(directory.path, "iter_0000001.tmp-a"))
    directory.discard(os.path.join(directory.path, "iter_0000001.tmp-b"))
    real_rename = os.rename

    def slow_rename(source: str, target: str) -> None:
        real_rename(source, target)
        time.sleep(0.02)  # long enough for the reader to see what is between two renames

    monkeypatch.setattr(os, "rename", slow_rename)
    names = {f"save{number}" for number in range(30)}
    with Poller(directory, 100) as poller:
        poller.wait_for(3)
        for number in range(30):
            save(directory, 100, save_id=f"save{number}", track=False)
            poller.wait_for(2)
    assert None not in poller.seen
    assert poller.seen <= names | {"first"}
    assert len(poller.seen) > 10  # it did watch
    assert os.listdir(directory.path).count("iter_0000100") == 1
    assert [name for name in os.listdir(directory.path) if "-" in name] == []


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("before", ["committed", "uncommitted", "damaged", "empty", "shards", "cut off", "Megatron"])
def test_whatever_had_the_final_name_is_replaced_and_removed(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, before: str, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(fs, "exchange", lambda a, b: False)
    final = directory.path_of(100)
    if before == "committed":
        save(directory, 100, save_id="aaaa", track=False)
    elif before == "uncommitted":
        fill(final, 100, "aaaa", commit=False)
    elif before == "damaged":
        write(os.path.join(save(directory, 100, track=False), "ckpt_engine", "commit.json"), b"{}")
    else:
        os.mkdir(final)
    files = {
        "shards": ["__0_0.distcp", "__1_0.distcp"],
        "cut off": ["__0_0.distcp", ".metadata.tmp", f"{fs.TEMP_PREFIX}01", ".nfs0000000000000001"],
        "Megatron": [
            "__0_0.distcp",
            "common.pt",
            "metadata.json",
            "integrity.json",
            "train_state.pt",
            "run_config.yaml",
        ],
    }
    for name in files.get(before, []):
        write(os.path.join(final, name), b"x")
    assert directory.foreign(100) is None
    save(directory, 100, save_id="bbbb", track=False)
    record = directory.committed(100)
    assert record is not None and record.save_id == "bbbb"
    assert directory.shortage(100, record) is None
    assert os.listdir(directory.path) == ["iter_0000100"]


def as_stock(final: str) -> None:
    os.mkdir(final)
    for name in ("__0_0.distcp", ".metadata"):
        write(os.path.join(final, name), b"x")


def as_stock_per_rank(final: str) -> None:
    """Stock DCP without collectives."""
    os.mkdir(final)
    for name in ("__0_0.distcp", "__0.metadata"):
        write(os.path.join(final, name), b"x")


def as_ours_of_another_step(final: str) -> None:
    fill(final, 7, "aaaa")


def as_ours_with(name: str, *, commit: bool) -> Callable[[str], None]:
    def make(final: str) -> None:
        fill(final, 100, "aaaa", commit=commit)
        write(os.path.join(final, name), b"precious")

    return make


def as_shards_with_folder(final: str) -> None:
    os.makedirs(os.path.join(final, "mine.tmp"))
    write(os.path.join(final, "__0_0.distcp"), b"x")
    write(os.path.join(final, "mine.tmp", "precious"), b"x")


def as_shards_with_link(final: str) -> None:
    os.mkdir(final)
    os.symlink("../elsewhere", os.path.join(final, "ckpt_engine"))


def as_link(final: str) -> None:
    elsewhere = os.path.join(os.path.dirname(os.path.dirname(final)), "elsewhere")
    fill(elsewhere, 100, "aaaa")
    os.symlink(elsewhere, final)


def as_link_to_nothing(final: str) -> None:
    os.symlink("nothing", final)


def as_file(final: str) -> None:
    write(final, b"precious")


def as_newer_format(final: str) -> None:
    fill(final, 100, "aaaa")
    name = os.path.join(final, "ckpt_engine", "commit.json")
    record = json.loads(pathlib.Path(name).read_bytes())["record"]
    write(name, seal({**record, "format": 2}))


def as_unreadable(final: str) -> None:
    fill(final, 100, "aaaa", commit=False)
    os.mkdir(os.path.join(final, "ckpt_engine", "commit.json"))


FOREIGN: dict[str, tuple[Callable[[str], None], str]] = {
    "stock": (as_stock, "complete checkpoint of another writer"),
    "stock, per rank": (as_stock_per_rank, "'__0.metadata', which is no file of a checkpoint"),
    "another step": (as_ours_of_another_step, "complete checkpoint of step 7"),
    "notes in a committed one": (as_ours_with("notes.txt", commit=True), "'notes.txt', which"),
    "notes in a partial one": (as_ours_with("notes.txt", commit=False), "'notes.txt', which"),
    "a folder": (as_shards_with_folder, "'mine.tmp', which"),
    "a link inside": (as_shards_with_link, "'ckpt_engine', which"),
    "a link": (as_link, "symbolic link"),
    "a broken link": (as_link_to_nothing, "symbolic link"),
    "a file": (as_file, "not a directory"),
    "newer": (as_newer_format, "newer engine"),
    "unreadable": (as_unreadable, "can't be read"),
}


def everything_in(root: pathlib.Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in root.rglob("*"):
        found[str(path)] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
    return found


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_ours_is_never_replaced(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, kind: str, can_exchange: bool
) -> None:
    """A save destroyed a stock checkpoint, with somebody's notes in it, since it had the name of the step."""
    if not can_exchange:
        monkeypatch.setattr(fs, "exchange", lambda a, b: False)
    make, reason = FOREIGN[kind]
    final = directory.path_of(100)
    make(final)
    root = pathlib.Path(directory.path).parent
    before = everything_in(root)
    assert reason in (directory.foreign(100) or "")
    tmp = directory.begin(100, "new")
    fill(tmp, 100, "new")
    with pytest.raises(StepExistsError, match=reason) as caught:
        directory.publish(tmp, 100, "new")
    assert (caught.value.step, caught.value.path, caught.value.phase) == (100, final, "publish")
    assert caught.value.hint
    directory.discard(tmp)
    assert everything_in(root) == before


def test_a_step_that_is_free_is_not_foreign(directory: CheckpointDirectory, tmp_path: pathlib.Path) -> None:
    assert directory.foreign(100) is None
    assert CheckpointDirectory(tmp_path / "none").foreign(100) is None


def test_what_can_not_be_looked_into_is_foreign(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkdir(directory.path_of(100))

    def refuse(path: str) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert directory.foreign(100) == "can't be looked into (Permission denied)"


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_publish_that_fails_leaves_what_was_there(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, can_exchange: bool, replaces: bool
) -> None:
    """A save that is reported as failed must not be found, and the one that it was to replace must be."""
    if replaces:
        save(directory, 100, save_id="old", track=False)
    tmp = directory.begin(100, "new")
    fill(tmp, 100, "new")
    real_sync = fs.fsync_dir

    def broken(path: str) -> None:
        if path == directory.path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        real_sync(path)

    monkeypatch.setattr(fs, "fsync_dir", broken)
    if not can_exchange:
        monkeypatch.setattr(fs, "exchange", lambda a, b: False)
    with pytest.raises(StorageError) as caught:
        directory.publish(tmp, 100, "new")
    assert (caught.value.errno, caught.value.step, caught.value.phase) == (errno.EIO, 100, "publish")
    directory.discard(tmp)
    record = directory.committed(100)
    assert (record.save_id if record is not None else None) == ("old" if replaces else None)
    assert os.listdir(directory.path) == (["iter_0000100"] if replaces else [])


def test_the_second_of_two_renames_may_fail(directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    save(directory, 100, save_id="old", track=False)
    tmp = directory.begin(100, "new")
    fill(tmp, 100, "new")
    real_rename = os.rename

    def broken(source: str, target: str) -> None:
        if source == tmp:
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        real_rename(source, target)

    monkeypatch.setattr(fs, "exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", broken)
    with pytest.raises(StorageError):
        directory.publish(tmp, 100, "new")
    record = directory.committed(100)
    assert record is not None and record.save_id == "old"


def test_a_replaced_checkpoint_that_can_not_be_removed_does_not_fail_the_new_one(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    save(directory, 100, save_id="old", track=False)
    with monkeypatch.context() as patch:
        patch.setattr(fs, "remove_tree", refuse)
        save(directory, 100, save_id="new", track=False)
    record = directory.committed(100)
    assert record is not None and record.save_id == "new"
    assert directory.steps() == [100]
    directory.lock()
    directory.clear_leftovers()
    directory.unlock()
    assert sorted(os.listdir(directory.path)) == [".ckpt_engine.lock", "iter_0000100"]
