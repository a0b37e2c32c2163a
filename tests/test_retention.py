"""Promises of retention and of the clearing of left-overs: what goes, and all that must not."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ckpt_engine.commit.directory import CheckpointDirectory
from ckpt_engine.commit.manifest import parse_part
from ckpt_engine.commit.names import PROBE_PREFIX
from ckpt_engine.storage import fs
from tests.checkpoints import fill, save, write

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> Iterator[CheckpointDirectory]:
    made = CheckpointDirectory(tmp_path / "checkpoints")
    made.check_usable()
    made.lock()
    yield made
    made.unlock()


def names(directory: CheckpointDirectory) -> list[str]:
    """Everything that is named like a step or a left-over of one."""
    return sorted(name for name in os.listdir(directory.path) if name.startswith("iter_"))


def commit_and_retire(directory: CheckpointDirectory, step: int, last: int | None, every: int | None = None) -> None:
    """A commit the way the engine does it."""
    save(directory, step)
    for path in directory.retire(step, last, every):
        fs.remove_tree(path)


def make_newer(path: str) -> None:
    """Turns a checkpoint into one of a later format, with a digest that fits."""
    name = os.path.join(path, "ckpt_engine", "commit.json")
    record = json.loads(pathlib.Path(name).read_bytes())["record"]
    record["format"] = 2
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    write(name, f'{{"record":{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}'.encode())


# -- retention ------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "every", "kept"),
    [
        (None, None, [10, 20, 30, 40, 50, 60]),
        (None, 20, [10, 20, 30, 40, 50, 60]),
        (1, None, [60]),
        (3, None, [40, 50, 60]),
        (99, None, [10, 20, 30, 40, 50, 60]),
        (1, 20, [20, 40, 60]),
        (2, 30, [30, 50, 60]),
    ],
)
def test_the_newest_and_the_multiples_stay(
    directory: CheckpointDirectory, last: int | None, every: int | None, kept: list[int]
) -> None:
    for step in range(10, 61, 10):
        commit_and_retire(directory, step, last, every)
    assert directory.steps() == kept
    assert names(directory) == [f"iter_{step:07d}" for step in kept]


def test_the_last_good_one_stays_while_its_successor_is_on_its_way(directory: CheckpointDirectory) -> None:
    """B002: retention ran at scheduling and took the unfinished directory for the newest."""
    commit_and_retire(directory, 500, 1)
    tmp = directory.begin(1000, "cafe")
    fill(directory.path_of(700), 700, "left", commit=False)  # never completed, but under a final name
    assert directory.retire(500, 1, None) == []
    assert (directory.steps(), directory.tracked_step()) == ([500], 500)
    assert directory.retire(1000, 1, None) == []  # not committed, whatever the caller says
    fill(tmp, 1000, "cafe", generation=directory.next_generation())
    directory.publish(tmp, 1000, "cafe")
    assert directory.retire(1000, 1, None) == []  # the tracker still reads 500
    assert directory.steps() == [500, 1000]
    directory.advance_trackers(1000, None)
    assert len(directory.retire(1000, 1, None)) == 1
    assert directory.steps() == [1000]
    assert os.path.isdir(directory.path_of(700))


def test_the_tracker_moves_once_per_commit_and_its_target_stays_until_then(directory: CheckpointDirectory) -> None:
    """B052: two owners of the tracker and of retention removed a directory that was still in use."""
    tracker = pathlib.Path(directory.path, "latest_checkpointed_iteration.txt")
    commit_and_retire(directory, 1, 1)
    before = tracker.stat().st_ino, tracker.stat().st_mtime_ns
    directory.begin(2, "ab")
    save(directory, 2, track=False)
    assert directory.retire(2, 1, None) == []
    assert (tracker.stat().st_ino, tracker.stat().st_mtime_ns) == before
    assert directory.steps() == [1, 2]
    directory.advance_trackers(2, None)
    after = tracker.stat().st_ino, tracker.stat().st_mtime_ns
    assert after != before
    assert len(directory.retire(2, 1, None)) == 1
    assert (tracker.stat().st_ino, tracker.stat().st_mtime_ns) == after
    assert directory.steps() == [2]


def test_the_tracker_names_a_whole_checkpoint_at_all_times_whatever_the_order(directory: CheckpointDirectory) -> None:
    """B053: 20, 30 and 40 are on their way and finish as 20, 40, 30, while removals take long."""
    commit_and_retire(directory, 10, 1)
    flying = {step: directory.begin(step, f"id{step}") for step in (20, 30, 40)}
    stop = threading.Event()
    samples: list[int | None] = []
    bad: list[int | None] = []

    def sample() -> None:
        while not stop.wait(0.005):
            step = directory.tracked_step()
            whole = step is not None and directory.committed(step) is not None
            if not whole and directory.tracked_step() == step:  # else it moved on between the two looks
                bad.append(step)
            samples.append(step)

    def slow_removal(paths: list[str]) -> None:
        for path in paths:
            for name in (".metadata", "__0_0.distcp"):
                os.unlink(os.path.join(path, name))
                time.sleep(0.1)
            fs.remove_tree(path)

    sampler = threading.Thread(target=sample)
    sampler.start()
    removers = []
    for step in (20, 40, 30):
        fill(flying[step], step, f"id{step}", generation=directory.next_generation())
        directory.publish(flying[step], step, f"id{step}")
        directory.advance_trackers(step, None)
        removers.append(threading.Thread(target=slow_removal, args=(directory.retire(step, 1, None),)))
        removers[-1].start()
        time.sleep(0.05)
    for thread in removers:
        thread.join()
    stop.set()
    sampler.join()
    assert bad == []
    assert {20, 30, 40} <= set(samples)
    assert directory.tracked_step() == 30
    assert directory.steps() == [30, 40]  # 40 is newer than 30, which was told to be committed: not 30's business


def test_retirements_at_the_same_time_take_turns(
    directory: CheckpointDirectory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B053: two clean-ups ran into each other."""
    for step in range(1, 21):
        save(directory, step)
    real = os.rename

    def slow(source: str, target: str) -> None:
        time.sleep(0.005)  # time for another one to choose the same step
        real(source, target)

    monkeypatch.setattr(os, "rename", slow)
    found: list[str] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        found.extend(directory.retire(20, 1, None))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found))) == (19, 19)
    assert caplog.text == ""  # nobody found a step gone that it was about to rename
    assert directory.steps() == [20]


def as_uncommitted(directory: CheckpointDirectory) -> None:
    fill(directory.path_of(5), 5, "ab", commit=False)


def as_damaged_record(directory: CheckpointDirectory) -> None:
    write(os.path.join(save(directory, 5, track=False), "ckpt_engine", "commit.json"), b"{}")


def as_other_step(directory: CheckpointDirectory) -> None:
    os.rename(save(directory, 4, track=False), directory.path_of(5))


def as_newer_format(directory: CheckpointDirectory) -> None:
    make_newer(save(directory, 5, track=False))


def as_unreadable(directory: CheckpointDirectory) -> None:
    record = os.path.join(save(directory, 5, track=False), "ckpt_engine", "commit.json")
    os.unlink(record)
    os.mkdir(record)


def as_link(directory: CheckpointDirectory) -> None:
    elsewhere = os.path.join(os.path.dirname(directory.path), "elsewhere")
    os.rename(save(directory, 5, track=False), elsewhere)
    os.symlink(elsewhere, directory.path_of(5))


def as_file(directory: CheckpointDirectory) -> None:
    write(directory.path_of(5), b"")


def as_empty(directory: CheckpointDirectory) -> None:
    os.mkdir(directory.path_of(5))


@pytest.mark.parametrize(
    "make",
    [as_uncommitted, as_damaged_record, as_other_step, as_newer_format, as_unreadable, as_link, as_file, as_empty],
)
def test_what_is_not_a_committed_checkpoint_of_ours_stays(
    directory: CheckpointDirectory, make: Callable[[CheckpointDirectory], None]
) -> None:
    make(directory)
    before = sorted(pathlib.Path(directory.path_of(5)).rglob("*"))
    save(directory, 3)
    save(directory, 9)
    assert len(directory.retire(9, 1, None)) == 1  # 3 goes
    assert sorted(pathlib.Path(directory.path_of(5)).rglob("*")) == before
    assert os.path.lexists(directory.path_of(5))


def test_names_that_only_look_like_steps_stay(directory: CheckpointDirectory) -> None:
    strange = ["iter_5", "iter_00000005", "step_0000005", "iter_0000005.bak", "iter_0000005_copy"]
    save(directory, 5, track=False)
    for name in strange:
        fill(os.path.join(directory.path, name), 5, "ab")
    commit_and_retire(directory, 9, 1)
    assert directory.steps() == [9]
    assert set(strange) <= set(os.listdir(directory.path))


def test_steps_newer_than_the_committed_one_stay(directory: CheckpointDirectory) -> None:
    """After a rollback the numbers start again below those of the abandoned run."""
    for step in (100, 200, 300):
        save(directory, step)
    commit_and_retire(directory, 150, 1)
    assert directory.steps() == [150, 200, 300]


def test_after_a_rollback_the_live_branch_is_kept_and_not_the_abandoned_one(directory: CheckpointDirectory) -> None:
    """10 to 40, back to 30, then 35 and 45: by number, 40 was kept for one of the two newest, and 35 removed."""
    for step in (10, 20, 30, 40):
        commit_and_retire(directory, step, 2)
    assert directory.steps() == [30, 40]
    commit_and_retire(directory, 35, 2)
    assert directory.steps() == [30, 35, 40]
    commit_and_retire(directory, 45, 2)
    assert directory.steps() == [35, 45]


def test_checkpoints_from_before_generations_are_older_than_any_other(directory: CheckpointDirectory) -> None:
    for step in (100, 200, 300):
        fill(directory.path_of(step), step, "aa")
    commit_and_retire(directory, 150, 2)
    commit_and_retire(directory, 350, 3)
    assert directory.newest_first() == [350, 150, 300]


def test_a_damaged_checkpoint_does_not_cost_the_last_good_one(directory: CheckpointDirectory) -> None:
    """B032, B002: 20 lost a shard; counted as kept, it would let 10 go."""
    save(directory, 10)
    os.unlink(os.path.join(save(directory, 20), "__0_0.distcp"))
    commit_and_retire(directory, 30, 2)
    assert directory.steps() == [10, 20, 30]
    commit_and_retire(directory, 40, 2)
    assert directory.steps() == [30, 40]


def test_a_checkpoint_is_out_of_sight_durably_before_its_files_go(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(directory, 1)
    save(directory, 2)
    order: list[str] = []
    real_rename, real_sync = os.rename, fs.fsync_dir

    def rename(source: str, target: str) -> None:
        order.append("rename")
        real_rename(source, target)

    def sync(path: str) -> None:
        order.append(f"sync {path}")
        real_sync(path)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(fs, "fsync_dir", sync)
    (aside,) = directory.retire(2, 1, None)
    assert order == ["rename", f"sync {directory.path}"]
    assert os.path.basename(aside).startswith("iter_0000001.deleting-")
    assert sorted(os.listdir(aside)) == [".metadata", "__0_0.distcp", "ckpt_engine"]
    assert directory.steps() == [2]
    assert directory.clear_leftovers() == [aside]  # if nobody came to remove it


def test_a_step_that_can_not_be_renamed_does_not_keep_the_others(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(directory, step)
    real = os.rename

    def refuse(source: str, target: str) -> None:
        if source == directory.path_of(2):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), source)
        real(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    assert len(directory.retire(3, 1, None)) == 1
    assert directory.steps() == [2, 3]


# -- left-overs ------------------------------------------------------------


def test_only_the_passing_names_are_cleared(directory: CheckpointDirectory) -> None:
    save(directory, 1)
    gone = ["iter_0000001.tmp-ab", "iter_0000001.old-AB_-9", "iter_0000002.deleting-0f", "iter_12345678.tmp-x"]
    stay = [
        *("iter_0000001.tmp", "iter_0000001.tmp-", "iter_0000001.bak-ab", "iter_1.tmp-ab", "iter_00000001.tmp-ab"),
        *("iter_0000001.tmp-ab.old", "tmp-ab", ".tmp-ab", "iter_0000003", "hf_export.tmp-ab", "iter_0000001.tmp-é"),
    ]
    for name in gone + stay:
        os.makedirs(os.path.join(directory.path, name, "deep"))
    write(os.path.join(directory.path, "iter_0000009.tmp-file"), b"mine")
    os.symlink(os.path.join(directory.path, "tmp-ab"), os.path.join(directory.path, "iter_0000009.tmp-link"))
    before = set(os.listdir(directory.path))
    assert sorted(directory.clear_leftovers()) == sorted(os.path.join(directory.path, name) for name in gone)
    assert set(os.listdir(directory.path)) == before - set(gone)
    assert all(os.path.isdir(os.path.join(directory.path, name, "deep")) for name in stay)
    assert directory.clear_leftovers() == []


@pytest.mark.parametrize("final", ["missing", "uncommitted", "damaged"])
def test_a_replaced_checkpoint_is_put_back_if_the_step_has_none(directory: CheckpointDirectory, final: str) -> None:
    if final == "uncommitted":
        fill(directory.path_of(7), 7, "new", commit=False)
    elif final == "damaged":
        write(os.path.join(save(directory, 7, save_id="new", track=False), "ckpt_engine", "commit.json"), b"{")
    for number, name in enumerate(("aa", "zz", "mm")):
        path = os.path.join(directory.path, f"iter_0000007.old-{name}")
        fill(path, 7, name)
        os.utime(os.path.join(path, "ckpt_engine", "commit.json"), ns=(0, 10**18 + [5, 1, 9][number]))
    removed = directory.clear_leftovers()
    assert sorted(map(os.path.basename, removed)) == ["iter_0000007.old-aa", "iter_0000007.old-zz"]
    record = directory.committed(7)
    assert record is not None and record.save_id == "mm"  # the newest
    assert names(directory) == ["iter_0000007"]


def test_a_replaced_checkpoint_goes_if_the_step_has_a_newer_one(directory: CheckpointDirectory) -> None:
    save(directory, 7, save_id="new")
    fill(os.path.join(directory.path, "iter_0000007.old-aa"), 7, "old")
    fill(os.path.join(directory.path, "iter_0000008.old-aa"), 8, "old", commit=False)
    assert len(directory.clear_leftovers()) == 2
    assert names(directory) == ["iter_0000007"]
    record = directory.committed(7)
    assert record is not None and record.save_id == "new"


def test_putting_a_checkpoint_back_destroys_nothing_foreign(
    directory: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    old = os.path.join(directory.path, "iter_0000007.old-aa")
    fill(old, 7, "aa")
    os.mkdir(directory.path_of(7))
    write(os.path.join(directory.path_of(7), ".metadata"), b"stock")
    assert directory.clear_leftovers() == []
    assert os.listdir(directory.path_of(7)) == [".metadata"]
    assert os.path.isdir(old) and "another writer" in caplog.text


@pytest.mark.parametrize("which", ["old", "final"])
def test_what_a_newer_engine_wrote_is_not_replaced_by_guess(directory: CheckpointDirectory, which: str) -> None:
    old = os.path.join(directory.path, "iter_0000007.old-aa")
    fill(old, 7, "aa")
    save(directory, 7)
    make_newer(old if which == "old" else directory.path_of(7))
    if which == "old":
        os.rename(directory.path_of(7), os.path.join(directory.path, "iter_0000006"))
    before = sorted(os.listdir(directory.path))
    assert directory.clear_leftovers() == []
    assert sorted(os.listdir(directory.path)) == before


def test_a_leftover_that_can_not_be_removed_does_not_fail_the_save(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sorted([directory.begin(1, "a"), directory.begin(2, "b")])

    def refuse(path: str) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "remove_tree", refuse)
        assert directory.clear_leftovers() == []
    assert sorted(directory.clear_leftovers()) == paths


@pytest.mark.crash
@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("deaths", range(1, 9))
def test_a_kill_at_any_moment_of_a_replace_leaves_one_whole_checkpoint(
    directory: CheckpointDirectory, can_exchange: bool, deaths: int
) -> None:
    """A process dies after its n-th change of the directory; the next run finds the old or the new one, never none."""
    save(directory, 100, save_id="old")
    child = os.fork()
    if child == 0:
        _die_after(deaths, can_exchange)
        save(directory, 100, save_id="new", track=False)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9 or deaths > 4  # it was in the middle
    directory.clear_leftovers()
    record = directory.committed(100)
    assert record is not None and record.save_id in ("old", "new")
    assert directory.shortage(100, record) is None
    part = os.path.join(directory.path_of(100), "ckpt_engine", "rank-00000.json")
    parse_part(pathlib.Path(part).read_bytes(), path=part, commit=record)
    assert names(directory) == ["iter_0000100"]


def _die_after(count: int, can_exchange: bool) -> None:
    """In a forked child: has this process end right after its ``count``-th rename, exchange, unlink or rmdir."""
    left = [count]

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            result = real(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return result

        return call

    for name in ("rename", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    setattr(fs, "exchange", counted(fs.exchange) if can_exchange else lambda a, b: False)  # noqa: B010


def test_half_written_trackers_of_a_killed_run_are_cleared(directory: CheckpointDirectory) -> None:
    """A kill inside of an atomic replace, or of the probe at construction, leaves a small file with a name of ours."""
    ours = [f"{fs.TEMP_PREFIX}0123456789abcdef", f"{PROBE_PREFIX}00ff"]
    for name in [*ours, "latest_checkpointed_iteration.txt", ".hidden"]:
        pathlib.Path(directory.path, name).write_bytes(b"1")
    assert sorted(directory.clear_leftovers()) == sorted(os.path.join(directory.path, name) for name in ours)
    assert {".hidden", "latest_checkpointed_iteration.txt"} <= set(os.listdir(directory.path))
