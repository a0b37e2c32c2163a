"""Promises of resume: "latest" is the newest checkpoint that is whole; a damaged one is named, never loaded, never fatal."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import (
    CheckpointEngine,
    CheckpointError,
    CorruptionError,
    EngineConfig,
    NotCommittedError,
    TrainState,
)

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"staging_budget": 64 * MIB, "commit_timeout": 30.0, **options})


def state(value: float) -> dict[str, Any]:
    return {"model": {f"t{i}": torch.full((500 + i,), float(value)) for i in range(5)}, "n": int(value)}


def save_steps(directory: Path, *steps: int) -> None:
    with CheckpointEngine(directory, config()) as engine:
        for step in steps:
            engine.save(state(step), step, TrainState(step=step, consumed_train_samples=step * 10)).result(30)


def restored_value(directory: Path, step: Any = "latest") -> tuple[int, Any]:
    found = state(-1)
    with CheckpointEngine(directory, config()) as engine:
        restored = engine.restore(found, step=step)
    assert restored is not None
    values = {t.unique().item() for t in found["model"].values()}
    assert values == {float(restored.step)} and found["n"] == restored.step
    assert restored.train_state is not None and restored.train_state.consumed_train_samples == restored.step * 10
    return restored.step, restored.report


def path_of(directory: Path, step: int) -> Path:
    return directory / f"iter_{step:07d}"


def cut(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)


def test_directories_that_are_not_whole_are_passed_over_and_named(tmp_path: Path) -> None:
    """B032: without metadata, without a shard, a shard one byte short."""
    save_steps(tmp_path, 1, 2, 3, 4)
    shard = path_of(tmp_path, 3) / "__0_0.distcp"
    (path_of(tmp_path, 2) / ".metadata").unlink()
    shard.unlink()
    short = path_of(tmp_path, 4) / "__0_0.distcp"
    cut(short, short.stat().st_size - 1)
    step, report = restored_value(tmp_path)
    assert step == 1
    assert [skipped for skipped, _ in report.skipped] == [4, 3, 2]
    for number, name in ((2, ".metadata"), (3, "__0_0.distcp"), (4, "__0_0.distcp")):
        with CheckpointEngine(tmp_path, config()) as engine:
            with pytest.raises(CorruptionError, match=name.replace(".", r"\.")):
                engine.restore(state(0), step=number)
            report = engine.verify(number)
            assert not report.ok and any(name in problem for problem in report.problems)


def test_a_directory_without_a_commit_record_is_no_checkpoint(tmp_path: Path) -> None:
    """B032, B107: everything is there but the commit record."""
    save_steps(tmp_path, 1, 2)
    (path_of(tmp_path, 2) / "ckpt_engine" / "commit.json").unlink()
    assert restored_value(tmp_path)[0] == 1
    with CheckpointEngine(tmp_path, config()) as engine:
        assert engine.steps() == [1] and engine.latest() == 1
        with pytest.raises(NotCommittedError):
            engine.restore(state(0), step=2)
        engine.save(state(2), 2, TrainState(step=2, consumed_train_samples=20)).result(30)  # needs no clean-up by hand
    assert restored_value(tmp_path)[0] == 2


def test_a_file_cut_at_any_length_is_found(tmp_path: Path) -> None:
    """B107: 50 random lengths, each resume finds the step before."""
    save_steps(tmp_path, 1, 2)
    shard = path_of(tmp_path, 2) / "__0_0.distcp"
    whole = shard.read_bytes()
    generator = random.Random(3)
    for _ in range(50):
        shard.write_bytes(whole[: generator.randrange(len(whole))])
        assert restored_value(tmp_path)[0] == 1
    shard.write_bytes(whole)
    assert restored_value(tmp_path)[0] == 2


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    """In every file of a checkpoint; those that restore reads make it fall back, verify finds them all and names the file."""
    save_steps(tmp_path, 1, 2)
    generator = random.Random(5)
    files = [p for p in path_of(tmp_path, 2).rglob("*") if p.is_file()]
    assert {p.name for p in files} == {"__0_0.distcp", ".metadata", "train_state.pt", "rank-00000.json", "commit.json"}
    with CheckpointEngine(tmp_path, config()) as engine:
        for file in files:
            whole = file.read_bytes()
            for _ in range(12):
                broken = bytearray(whole)
                broken[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
                file.write_bytes(bytes(broken))
                report = engine.verify(2)
                assert not report.ok and any(file.name in problem for problem in report.problems), file.name
                if file.suffix != ".distcp":
                    assert restored_value(tmp_path)[0] == 1
            file.write_bytes(whole)
        assert engine.verify(2).ok


def test_a_flipped_payload_bit_names_file_and_tensor(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    shard = path_of(tmp_path, 2) / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[content.index(torch.full((4,), 2.0).numpy().tobytes()) + 40] ^= 1
    shard.write_bytes(bytes(content))
    assert restored_value(tmp_path)[0] == 1
    with CheckpointEngine(tmp_path, config()) as engine, pytest.raises(CorruptionError) as caught:
        engine.restore(state(0), step=2)
    assert caught.value.tensor is not None and caught.value.tensor.startswith("model.t")
    assert "__0_0.distcp" in str(caught.value) and caught.value.step == 2


def test_files_swapped_between_steps_are_found(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    for name in ("__0_0.distcp", "train_state.pt", ".metadata"):
        target, other = path_of(tmp_path, 3) / name, path_of(tmp_path, 2) / name
        whole = target.read_bytes()
        shutil.copy(other, target)
        assert restored_value(tmp_path)[0] == 2, name
        target.write_bytes(whole)
    shutil.rmtree(path_of(tmp_path, 3))
    shutil.copytree(path_of(tmp_path, 1), path_of(tmp_path, 3))  # a whole directory under another step's name
    assert restored_value(tmp_path)[0] == 2


def test_when_nothing_is_whole_resume_says_so(tmp_path: Path) -> None:
    """Starting from scratch without a word would throw the run away."""
    save_steps(tmp_path, 1)
    cut(path_of(tmp_path, 1) / "__0_0.distcp", 100)
    with CheckpointEngine(tmp_path, config()) as engine:
        with pytest.raises(CorruptionError):
            engine.restore(state(0))
        assert CheckpointEngine(tmp_path / "new", config()).restore(state(0)) is None


def test_garbage_in_the_trackers_does_not_matter(tmp_path: Path) -> None:
    """B103"""
    save_steps(tmp_path, 1, 2)
    for content in (b"", b"release", b"\xff\x00", b"99", b"-1", b"1" * 100):
        (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(content)
        assert restored_value(tmp_path)[0] == 2
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "latest_train_state.pt").unlink()
    assert restored_value(tmp_path)[0] == 2


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, matches: Callable[[str], bool]) -> list[str]:
    """``os.<name>`` fails with EIO for paths that match."""
    real = getattr(os, name)
    hits: list[str] = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        paths = [os.fspath(a) for a in args if isinstance(a, (str, Path))]
        if any(matches(p) for p in paths):
            hits.append(str(paths))
            raise OSError(5, "Input/output error", *paths[:1])
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, broken)
    return hits


@pytest.mark.parametrize("where", ["rank-00000.json", ".metadata", "train_state.pt", "commit.json", "publish"])
def test_a_save_that_fails_on_its_way_to_the_commit_leaves_nothing_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """B017, B025: all bytes are written, the commit isn't reached; the next save is its own, and the old one stays."""
    save_steps(tmp_path, 1)
    with CheckpointEngine(tmp_path, config(keep_last=1)) as engine:
        with monkeypatch.context() as patch:
            target = (
                (lambda p: p.endswith("iter_0000002")) if where == "publish" else (lambda p: p.endswith(f"/{where}"))
            )
            hits = fail_at(patch, "rename", target)
            with pytest.raises(CheckpointError) as caught:
                engine.save({"a": torch.ones(10)}, 2, TrainState(step=2)).result(30)
        assert hits and caught.value.step == 2 and caught.value.errno in (5, None)
        assert engine.steps() == [1] and [p.name for p in tmp_path.glob("iter*")] == ["iter_0000001"]
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
        engine.save({f"b{i}": torch.ones(5) for i in range(5)}, 3).result(30)
        found: dict[str, Any] = {}
        engine.restore(found)
        assert sorted(found) == [f"b{i}" for i in range(5)]
        assert engine.steps() == [3] and engine.verify(3).ok
