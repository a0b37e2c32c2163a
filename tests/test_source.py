"""Promises of an opened checkpoint: whatever is missing, cut, swapped or hostile is refused, and the file is named."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.errors import CheckpointError, CorruptionError, NotCommittedError
from ckpt_engine.restore.source import CheckpointSource
from tests.handmade import stock_save, write_checkpoint

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_incomplete_directories_are_refused_by_name(tmp_path: Path, stock: bool) -> None:
    """B032: no metadata, a missing shard, a shard one byte short."""
    if stock:
        stock_save(tmp_path, {"w": torch.ones(10)})
    else:
        write_checkpoint(tmp_path, {"w": torch.ones(10)})
    shard = tmp_path / "__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(CorruptionError, match=rf"__0_0.distcp has {len(content) - 1} bytes, expected {len(content)}"):
        CheckpointSource.open(tmp_path)
    shard.unlink()
    with pytest.raises(CorruptionError, match=r"__0_0\.distcp is missing"):
        CheckpointSource.open(tmp_path)
    shard.write_bytes(content)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(NotCommittedError if stock else CorruptionError, match=r"\.metadata"):
        CheckpointSource.open(tmp_path)


def test_a_save_that_never_reached_its_commit_is_not_opened(tmp_path: Path) -> None:
    """B032, B107: everything is there but the commit record."""
    write_checkpoint(tmp_path, {"w": torch.ones(10)})
    (tmp_path / "ckpt_engine" / "commit.json").unlink()
    with pytest.raises(NotCommittedError, match=r"commit\.json is missing"):
        CheckpointSource.open(tmp_path)
    with pytest.raises(NotCommittedError, match="no such"):
        CheckpointSource.open(tmp_path / "nowhere")


def test_truncation_anywhere_is_refused_when_opening(tmp_path: Path) -> None:
    """B107: each file, cut at many places."""
    write_checkpoint(tmp_path, {"w": torch.arange(100.0)}, {"v": [1, 2]}, train_state=b"state")
    for path in sorted(p for p in tmp_path.rglob("*") if p.is_file()):
        content = path.read_bytes()
        for size in sorted({0, 1, len(content) - 1, *range(0, len(content), max(1, len(content) // 12))}):
            path.write_bytes(content[:size])
            with pytest.raises(CorruptionError) as caught:
                CheckpointSource.open(tmp_path)
            assert caught.value.file == path.name or path.name in str(caught.value.file)
        path.write_bytes(content)
    CheckpointSource.open(tmp_path)


def test_names_never_lead_out_of_the_directory(tmp_path: Path) -> None:
    outside = tmp_path / "outside.distcp"
    inside = tmp_path / "ckpt"
    write_checkpoint(inside, {"w": torch.ones(10)})
    shard = inside / "__0_0.distcp"
    shard.rename(outside)
    shard.symlink_to(outside)
    with pytest.raises(CorruptionError, match="leads out of the checkpoint"):
        CheckpointSource.open(inside)
    stock = tmp_path / "stock"
    stock_save(stock, {"w": torch.ones(10)})
    (stock / "__0_0.distcp").rename(outside)
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    for name in ("../outside.distcp", str(outside)):
        for place in metadata.storage_data.values():
            place.relative_path = name
        (stock / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CorruptionError, match="no name of a file inside"):
            CheckpointSource.open(stock)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_metadata_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stock_save(tmp_path, {"w": torch.ones(10)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(CheckpointError, match=r"posix.mkdir|os.mkdir"):
        CheckpointSource.open(tmp_path)
    dotted = pickle.dumps(0)[:2] + b"\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09os.getcwd\x93)R."
    (tmp_path / ".metadata").write_bytes(dotted)
    with pytest.raises(CheckpointError, match=r"os\.getcwd"):
        CheckpointSource.open(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_train_state_is_checked(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"w": torch.ones(1)}, train_state=b"eight tensors")
    source = CheckpointSource.open(tmp_path)
    assert source.train_state_bytes() == b"eight tensors"
    (tmp_path / "train_state.pt").write_bytes(b"eight tensorz")
    with pytest.raises(CorruptionError, match=r"train_state\.pt"):
        source.train_state_bytes()
    write_checkpoint(tmp_path / "without", {"w": torch.ones(1)})
    assert CheckpointSource.open(tmp_path / "without").train_state_bytes() is None
