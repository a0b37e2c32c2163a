"""Promises of the checkpoint directory: which paths it takes, what counts as a checkpoint, what the trackers say."""

from __future__ import annotations

import errno
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_engine.commit.directory import CheckpointDirectory, parse_step, step_name
from ckpt_engine.errors import CheckpointError, ConfigError, StorageError
from ckpt_engine.storage import fs
from tests.checkpoints import fill, save, write

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> CheckpointDirectory:
    made = CheckpointDirectory(tmp_path / "checkpoints")
    made.check_usable()
    return made


# -- paths ------------------------------------------------------------


class Pathish:
    """An ``os.PathLike`` that is neither a str nor a Path."""

    def __init__(self, path: str | bytes) -> None:
        self._path = path

    def __fspath__(self) -> Any:
        return self._path


def link_to(target: pathlib.Path) -> str:
    target.mkdir()
    link = target.parent / "link"
    link.symlink_to(target, target_is_directory=True)
    return str(link)


PATH_KINDS: dict[str, Callable[[pathlib.Path], Any]] = {
    "str": lambda target: str(target),
    "Path": lambda target: target,
    "PathLike of str": lambda target: Pathish(str(target)),
    "PathLike of bytes": lambda target: Pathish(os.fsencode(target)),
    "bytes": lambda target: os.fsencode(target),
    "trailing slash": lambda target: f"{target}/",
    "many slashes": lambda target: f"{target.parent}//.//{target.name}///",
    "symlink": link_to,
    "symlink with slash": lambda target: link_to(target) + "/",
}


@pytest.mark.parametrize("name", ["plain", "with space", "нечто-é-日本", "dot.and:colon", "-dash", "gs:"])
@pytest.mark.parametrize("kind", PATH_KINDS)
def test_every_kind_of_path_gives_the_same_files(tmp_path: pathlib.Path, kind: str, name: str) -> None:
    """B094: paths were mangled by adding strings to them, and nested by a trailing slash."""
    target = tmp_path / name
    directory = CheckpointDirectory(PATH_KINDS[kind](target))
    directory.check_usable()
    final = save(directory, 7, save_id="cafe")
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    assert found == [
        "iter_0000007",
        "iter_0000007/.metadata",
        "iter_0000007/__0_0.distcp",
        "iter_0000007/ckpt_engine",
        "iter_0000007/ckpt_engine/commit.json",
        "iter_0000007/ckpt_engine/rank-00000.json",
        "latest_checkpointed_iteration.txt",
    ]
    assert os.path.samefile(final, target / "iter_0000007")
    assert directory.steps() == [7]


def test_a_later_chdir_does_not_matter(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B094."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    directory = CheckpointDirectory("relative/./deep")
    monkeypatch.chdir(tmp_path / "elsewhere")
    directory.check_usable()
    assert save(directory, 1) == str(tmp_path / "relative" / "deep" / "iter_0000001")
    assert os.listdir(tmp_path / "elsewhere") == []


def test_dots_behind_a_symlink_mean_what_the_kernel_means(tmp_path: pathlib.Path) -> None:
    """B094: resolving ".." by text leads somewhere else."""
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "inner")
    directory = CheckpointDirectory(f"{tmp_path}/link/../out/")
    directory.check_usable()
    save(directory, 1)
    assert (tmp_path / "real" / "out" / "iter_0000001").is_dir()


@pytest.mark.parametrize(
    "uri",
    ["gs://x/y", "s3://b/p/", "hdfs://n:9/p", "file:///tmp/x", b"gs://x/y", pathlib.Path("gs://x/y"), "abfs+x://a"],
    ids=repr,
)
def test_a_uri_is_refused_and_makes_no_folder(
    uri: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B094: gs://b/p became the local folder gs:/b/p."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="URI") as caught:
        CheckpointDirectory(uri)
    assert caught.value.hint
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["", b"", "a\0b", None, 3, object()], ids=repr)
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError):
        CheckpointDirectory(path)


def test_making_one_does_no_io(tmp_path: pathlib.Path) -> None:
    CheckpointDirectory(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []


def test_step_names_are_those_of_megatron() -> None:
    assert [step_name(step) for step in (0, 100, 12_345_678)] == ["iter_0000000", "iter_0000100", "iter_12345678"]
    for step in (0, 1, 9_999_999, 10_000_000, 2**63 - 1):
        assert parse_step(step_name(step)) == step
    with pytest.raises(ConfigError):
        step_name(-1)


@pytest.mark.parametrize(
    "name",
    [
        "iter_100",
        "iter_00000100",
        "iter_0000100.tmp-ab",
        "iter_-000100",
        "iter_0000100\n",
        "iter_٠٠٠٠١٠٠",
        "Iter_0000100",
        "xiter_0000100",
        "iter_9999999999999999999",
        "release",
    ],
)
def test_other_names_are_no_steps(name: str) -> None:
    assert parse_step(name) is None


# -- opening ------------------------------------------------------------


def test_a_missing_directory_is_made_with_its_parents_and_left_empty(tmp_path: pathlib.Path) -> None:
    directory = CheckpointDirectory(tmp_path / "a" / "b")
    directory.check_usable()
    directory.check_usable()
    assert os.listdir(tmp_path / "a" / "b") == []


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_in_its_place_is_a_config_error(tmp_path: pathlib.Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        CheckpointDirectory(f"{tmp_path}/file{below}").check_usable()
    assert caught.value.path == f"{tmp_path}/file{below}"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, ConfigError),
        (errno.EROFS, ConfigError),
        (errno.EPERM, ConfigError),
        (errno.ENOSPC, StorageError),
        (errno.EDQUOT, StorageError),
        (errno.EIO, StorageError),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) else value.__name__,
)
def test_a_directory_that_takes_no_files_is_found_before_training(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[CheckpointError]
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(kind) as caught:
        directory.check_usable()
    assert type(caught.value) is kind
    assert (caught.value.errno, caught.value.path) == (number, directory.path)


def test_a_directory_that_can_be_listed_is_readable_and_nothing_is_made(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "there").mkdir()
    assert not CheckpointDirectory(tmp_path / "missing").check_readable()
    assert not CheckpointDirectory(tmp_path / "file").check_readable()
    there = CheckpointDirectory(tmp_path / "there")
    inode = os.stat(there.path)
    real = os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    assert there.check_readable()
    assert os.stat(there.path).st_mtime_ns == inode.st_mtime_ns
    assert sorted(os.listdir(tmp_path)) == ["file", "there"]

    def refuse(path: str) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert not there.check_readable()


# -- what counts as a checkpoint ------------------------------------------------------------


def test_only_a_commit_record_makes_a_checkpoint(directory: CheckpointDirectory) -> None:
    """B032: directories were taken for checkpoints because of their names.

    1 is complete; 2 has all shards but neither metadata nor record; 3 has metadata only, like a stock one with a shard
    missing; 4 and 5 have a record that is damaged or of another step.
    """
    save(directory, 1)
    for step in (2, 3):
        fill(directory.path_of(step), step, "ab", commit=False)
    os.unlink(os.path.join(directory.path_of(2), ".metadata"))
    os.unlink(os.path.join(directory.path_of(3), "__0_0.distcp"))
    damaged = os.path.join(save(directory, 4), "ckpt_engine", "commit.json")
    content = bytearray(pathlib.Path(damaged).read_bytes())
    content[40] ^= 1
    write(damaged, bytes(content))
    os.rename(save(directory, 6), directory.path_of(5))
    os.mkdir(os.path.join(directory.path, "iter_0000009"))
    write(os.path.join(directory.path, "iter_0000010"), b"a file")
    directory.begin(11, "ab")

    assert directory.steps() == [1]
    assert directory.unverified_steps() == [3]
    assert directory.committed(1) is not None
    assert [directory.committed(step) for step in (2, 3, 4, 5, 9, 10, 11, 99)] == [None] * 8


def test_a_missing_or_short_file_of_a_committed_step_is_named(directory: CheckpointDirectory) -> None:
    """B032: a shard that is missing or one byte short is found by sizes, without reading data."""

    def shortage(step: int) -> str:
        record = directory.committed(step)
        assert record is not None
        return directory.shortage(step, record) or ""

    for step in range(1, 7):
        save(directory, step, ranks=2)
    assert [shortage(step) for step in range(1, 7)] == [""] * 6
    os.unlink(os.path.join(directory.path_of(2), "__1_0.distcp"))
    os.truncate(os.path.join(directory.path_of(3), "__1_0.distcp"), 3)
    os.unlink(os.path.join(directory.path_of(4), ".metadata"))
    os.truncate(os.path.join(directory.path_of(5), "ckpt_engine", "rank-00001.json"), 9)
    os.unlink(os.path.join(directory.path_of(6), "ckpt_engine", "rank-00000.json"))
    assert shortage(1) == ""
    assert shortage(2) == "the shard files have 3 bytes, expected 6"
    assert shortage(3) == "the shard files have 7 bytes, expected 8"
    assert shortage(4).startswith(".metadata: No such file")
    assert shortage(5).startswith("ckpt_engine/rank-00001.json has 9 bytes, expected ")
    assert shortage(6).startswith("rank-00000.json: No such file")


def test_a_missing_directory_has_no_steps(tmp_path: pathlib.Path) -> None:
    directory = CheckpointDirectory(tmp_path / "none")
    assert (directory.steps(), directory.unverified_steps(), directory.tracked_step()) == ([], [], None)


def test_steps_are_in_order_of_number(directory: CheckpointDirectory) -> None:
    for step in (10_000_000, 3, 9_999_999, 20):
        save(directory, step)
    assert directory.steps() == [3, 20, 9_999_999, 10_000_000]


def test_an_unreadable_record_is_an_error_when_asked_for_and_hides_no_other_step(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(directory, 1)
    record = os.path.join(save(directory, 2), "ckpt_engine", "commit.json")
    os.unlink(record)
    os.mkdir(record)  # reading it fails with EISDIR, also for root
    with pytest.raises(StorageError) as caught:
        directory.committed(2)
    assert (caught.value.step, caught.value.path) == (2, record)
    assert directory.steps() == [1]


# -- which is the newest ------------------------------------------------------------


def test_the_newest_is_what_was_committed_last(directory: CheckpointDirectory) -> None:
    """After a rollback to 30, "latest" went by number and was 40, the branch that had been abandoned."""
    for step in (10, 20, 30, 40, 35):
        save(directory, step)
    assert directory.newest_first() == [35, 40, 30, 20, 10]
    assert directory.steps() == [10, 20, 30, 35, 40]
    save(directory, 20)  # a step that is saved again is new again
    assert directory.newest_first() == [20, 35, 40, 30, 10]


def test_without_generations_the_newest_goes_by_number(directory: CheckpointDirectory) -> None:
    for step in (10, 40, 35):
        fill(directory.path_of(step), step, "aa")
    fill(directory.path_of(50), 50, "aa", commit=False)
    assert directory.newest_first() == [40, 35, 10]
    assert directory.next_generation() == 1


def test_generations_go_on_where_the_run_before_ended(directory: CheckpointDirectory) -> None:
    directory.lock()
    for step in (10, 20):
        save(directory, step)
    record = directory.committed(20)
    assert record is not None and record.generation == 2
    directory.unlock()
    other = CheckpointDirectory(directory.path)
    other.lock()
    save(other, 15)
    other.unlock()
    directory.lock()  # the same object again: what it had counted is old by now
    save(directory, 12)
    assert directory.newest_first() == [12, 15, 20, 10]
    directory.unlock()


def test_under_the_lock_the_directory_is_read_for_the_first_generation_only(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(directory.path_of(5), 5, "aa", generation=41)
    directory.lock()
    assert directory.next_generation() == 42
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail("it was read again"))
    given: list[int] = []
    threads = [
        threading.Thread(target=lambda: given.extend(directory.next_generation() for _ in range(200))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given) == list(range(43, 843))
    directory.unlock()


# -- trackers ------------------------------------------------------------


def test_trackers_name_the_step_and_its_train_state(directory: CheckpointDirectory) -> None:
    directory.advance_trackers(100, b"state of 100")
    root = pathlib.Path(directory.path)
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "100"
    assert (root / "latest_train_state.pt").read_bytes() == b"state of 100"
    assert directory.tracked_step() == 100
    directory.advance_trackers(200, b"state of 200")
    assert directory.tracked_step() == 200
    assert sorted(os.listdir(root)) == ["latest_checkpointed_iteration.txt", "latest_train_state.pt"]


def test_the_train_state_of_an_earlier_step_does_not_stay(directory: CheckpointDirectory) -> None:
    directory.advance_trackers(100, b"state of 100")
    directory.advance_trackers(200, None)
    assert os.listdir(directory.path) == ["latest_checkpointed_iteration.txt"]


def test_the_step_tracker_never_leads_the_train_state(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.advance_trackers(100, b"state of 100")

    def full(path: str, data: bytes, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(fs, "write_atomic", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        directory.advance_trackers(200, b"state of 200")
    assert (caught.value.step, caught.value.phase, caught.value.errno) == (200, "publish", errno.ENOSPC)
    assert directory.tracked_step() == 100


@pytest.mark.parametrize(
    ("content", "step"),
    [
        (b"100", 100),
        (b"100\n", 100),
        (b"0", 0),
        (b"release", None),
        (b"", None),
        (b"-5", None),
        (b"1e3", None),
        (b"\xff\xfe", None),
        ("١".encode(), None),
        (b"9" * 5000, None),
    ],
)
def test_a_tracker_is_read_as_a_step_or_as_none(
    directory: CheckpointDirectory, content: bytes, step: int | None
) -> None:
    write(os.path.join(directory.path, "latest_checkpointed_iteration.txt"), content)
    assert directory.tracked_step() == step
