"""Promises of verify: every damaged byte is found, whatever file it is in, and nothing that is wrong is raised."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_engine.errors import NotCommittedError
from ckpt_engine.restore import verify
from ckpt_engine.restore.source import CheckpointSource
from ckpt_engine.restore.verify import verify_checkpoint
from tests.handmade import Item, example, flip, write_checkpoint

pytestmark = pytest.mark.timeout(60)


def make(path: Path) -> list[Item]:
    tensors = {"a": example((40,), torch.float32), "b": example((3, 5), torch.bfloat16), "e": torch.empty(0, 4)}
    return write_checkpoint(path, tensors, {"v": {"lr": 0.1}}, ranks=2, files=2, train_state=b"train state")


def all_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("threads", [1, 3])
def test_a_whole_checkpoint_has_no_problems(tmp_path: Path, threads: int) -> None:
    make(tmp_path)
    seen: list[tuple[int, int]] = []
    report = verify_checkpoint(tmp_path, threads=threads, progress=lambda done, total: seen.append((done, total)))
    size = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert (report.step, report.ok, report.problems, report.bytes, report.items) == (100, True, (), size, 4)
    assert seen[-1] == (size, size) and seen == sorted(seen)


@pytest.mark.parametrize("streamed", [False, True])
def test_every_single_byte_of_every_file_is_covered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """B107: payload, zip headers, central directory, padding, manifests, commit record, metadata, train state."""
    if streamed:  # as items larger than a batch are
        monkeypatch.setattr(verify, "_BATCH", 512)
        monkeypatch.setattr(verify, "_PIECE", 96)
    make(tmp_path)
    chance = random.Random(7)
    for file in all_files(tmp_path):
        size = file.stat().st_size
        for position in sorted({0, size - 1, *chance.sample(range(size), min(size, 40))}):
            bit = chance.randrange(8)
            flip(file, position, bit)
            report = verify_checkpoint(tmp_path)
            assert not report.ok, f"bit {bit} of byte {position} of {file.name}"
            assert any(file.name in problem for problem in report.problems), report.problems
            flip(file, position, bit)
    assert verify_checkpoint(tmp_path).ok


def test_damage_is_named_by_file_and_tensor(tmp_path: Path) -> None:
    items = {item.fqn: item for item in make(tmp_path)}
    a = items["a"]
    places = {
        "payload": (a.payload + 3, "bytes is"),
        "zip header": (a.offset + 2, "record around"),
        "central directory": (a.offset + a.length - 10, "record around"),
        "padding": (a.end - 1, "record around"),
    }
    assert a.end - 1 >= a.offset + a.length, "there is no padding to damage"
    for position, words in places.values():
        flip(tmp_path / a.file, position)
        (problem,) = verify_checkpoint(tmp_path).problems
        assert a.file in problem and "'a'" in problem and words in problem
        flip(tmp_path / a.file, position)


def test_all_problems_are_told_not_only_the_first(tmp_path: Path) -> None:
    items = {item.fqn: item for item in make(tmp_path)}
    flip(tmp_path / items["a"].file, items["a"].payload)
    flip(tmp_path / items["b"].file, items["b"].payload)
    (tmp_path / "train_state.pt").unlink()
    (tmp_path / "__9_9.distcp").write_bytes(b"left over")
    problems = verify_checkpoint(tmp_path).problems
    assert len(problems) == 4
    for word in ("'a'", "'b'", "train_state.pt is missing", "__9_9.distcp"):
        assert any(word in problem for problem in problems), word


def test_truncated_missing_and_lengthened_files_are_found(tmp_path: Path) -> None:
    """B032, B107."""
    make(tmp_path)
    for file in all_files(tmp_path):
        content = file.read_bytes()
        for damaged in (content[:-1], content[: len(content) // 2], b"", content + b"\0"):
            if damaged != content:
                file.write_bytes(damaged)
                report = verify_checkpoint(tmp_path)
                assert any(file.name in problem for problem in report.problems), (file.name, report.problems)
        file.unlink()
        assert any(file.name in problem for problem in verify_checkpoint(tmp_path).problems)
        file.write_bytes(content)
    assert verify_checkpoint(tmp_path).ok


def test_a_short_file_names_the_tensors_that_are_gone(tmp_path: Path) -> None:
    items = write_checkpoint(tmp_path, {f"w{number}": torch.ones(50) * number for number in range(4)})
    with open(tmp_path / items[0].file, "r+b") as file:
        file.truncate(items[2].payload)
    report = verify_checkpoint(tmp_path)
    assert [word for word in ("w0", "w1", "w2", "w3") if any(f"'{word}'" in p for p in report.problems)] == ["w2", "w3"]
    assert report.items == 2


def test_files_swapped_between_two_steps_are_found(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / str(step), {"w": torch.full((9,), float(step))}, step=step, save_id=f"id{step}")
    for name in ("__0_0.distcp", ".metadata", "ckpt_engine/rank-00000.json"):
        ours = tmp_path / "1" / name
        content = ours.read_bytes()
        shutil.copyfile(tmp_path / "2" / name, ours)
        assert any(Path(name).name in problem for problem in verify_checkpoint(tmp_path / "1").problems), name
        ours.write_bytes(content)


def test_nothing_in_a_directory_makes_it_raise(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError):
        verify_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotCommittedError):
        verify_checkpoint(tmp_path / "file")
    (tmp_path / "iter_0000007").mkdir()
    report = verify_checkpoint(tmp_path / "iter_0000007")
    assert (report.ok, report.step) == (False, 7)
    make(tmp_path / "c")
    (tmp_path / "c" / "__0_0.distcp").unlink()
    (tmp_path / "c" / "__0_0.distcp").mkdir()
    (tmp_path / "c" / "ckpt_engine" / "rank-00001.json").write_bytes(b"[" * 100_000)
    assert len(verify_checkpoint(tmp_path / "c").problems) >= 2


def test_a_checkpoint_without_checksums_has_its_sizes_checked(tmp_path: Path) -> None:
    (item,) = write_checkpoint(tmp_path, {"w": torch.ones(10)}, checksum=False)
    assert verify_checkpoint(tmp_path).ok
    with open(tmp_path / item.file, "ab") as file:
        file.write(b"x")
    assert not verify_checkpoint(tmp_path).ok


def test_stock_checkpoints_are_checked_by_their_zip_sums(tmp_path: Path) -> None:
    """B032: and their missing or short files are named."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"w": torch.arange(600_000.0), "v": "value", "s": torch.tensor(1)}, checkpoint_id=tmp_path, no_dist=True
        )
    report = verify_checkpoint(tmp_path)
    assert (report.ok, report.items, report.step) == (True, 3, None)
    shard = tmp_path / "__0_0.distcp"
    for info in CheckpointSource.open(tmp_path).records():
        for position in (info.offset + info.length // 2, info.offset + info.length - 5):
            flip(shard, position)
            problems = verify_checkpoint(tmp_path).problems
            if position == info.offset + info.length // 2 and info.fqn == "w":
                assert problems, "a flipped payload bit went unnoticed"
            assert all(info.fqn in problem and shard.name in problem for problem in problems)
            flip(shard, position)
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert any("__0_0.distcp has" in problem for problem in verify_checkpoint(tmp_path).problems)
    shard.unlink()
    assert any("__0_0.distcp is missing" in problem for problem in verify_checkpoint(tmp_path).problems)
    shard.write_bytes(content)
    flip(tmp_path / ".metadata", 40)
    assert not verify_checkpoint(tmp_path).ok
