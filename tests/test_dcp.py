"""Promises of the DCP storage writer and reader: stock API, the engine's guarantees."""

from __future__ import annotations

import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_engine import CheckpointEngine, CheckpointError, CorruptionError, EngineConfig, StateError, StorageError
from ckpt_engine.dcp import EngineStorageReader, EngineStorageWriter
from ckpt_engine.restore.verify import verify_checkpoint
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
CONFIG = EngineConfig(staging_budget=16 * MIB, commit_timeout=20.0)


def state(value: float = 1.0) -> dict[str, Any]:
    value = float(value)
    tied = torch.full((100,), value)
    return {
        "m": {
            "w": torch.full((300, 70), value).bfloat16(),
            "t": torch.arange(12.0).view(3, 4).t() * value,
            "a": tied,
            "b": tied,
        },
        "scalar": torch.tensor(value),
        "n": {"lr": value, "names": ["x"]},
    }


def save(directory: Path, value: float = 1.0) -> Any:
    return dcp.save(state(value), storage_writer=EngineStorageWriter(directory, CONFIG), no_dist=True)


def check(found: dict[str, Any], value: float) -> None:
    wanted = state(value)
    assert all(torch.equal(found["m"][k], wanted["m"][k]) for k in wanted["m"])
    assert torch.equal(found["scalar"], wanted["scalar"]) and found["n"] == wanted["n"]


def test_ours_and_stock_read_each_other(tmp_path: Path) -> None:
    metadata = save(tmp_path / "ours")
    dcp.save(state(2), checkpoint_id=tmp_path / "stock", no_dist=True)
    for directory, value in ((tmp_path / "ours", 1.0), (tmp_path / "stock", 2.0)):
        for reader in (EngineStorageReader(directory), dcp.FileSystemReader(directory)):
            found = state(0)
            dcp.load(found, storage_reader=reader, no_dist=True)
            check(found, value)
    assert verify_checkpoint(tmp_path / "ours").ok
    assert metadata.storage_meta is not None
    found = state(0)
    with CheckpointEngine(tmp_path / "run", CONFIG) as engine:
        engine.restore(found, path=str(tmp_path / "ours"))
    check(found, 1)


def test_the_metadata_returned_is_that_on_disk(tmp_path: Path) -> None:
    """B079"""
    metadata = save(tmp_path)
    on_disk = pickle.loads((tmp_path / ".metadata").read_bytes())
    for field in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"):
        assert getattr(metadata, field, None) == getattr(on_disk, field, None), field


def test_one_writer_serves_many_saves_and_replaces_what_is_there(tmp_path: Path) -> None:
    """B034"""
    writer = EngineStorageWriter(tmp_path / "a", CONFIG)
    for value in (1.0, 2.0, 3.0):
        dcp.save(state(value), storage_writer=writer, no_dist=True)
        found = state(0)
        dcp.load(found, storage_reader=EngineStorageReader(tmp_path / "a"), no_dist=True)
        check(found, value)
    dcp.save(state(4), checkpoint_id=tmp_path / "b", storage_writer=writer, no_dist=True)
    (tmp_path / "b" / f".__0_0.distcp.tmp-{'0' * 32}").write_bytes(b"of a save that was killed")
    dcp.save(state(4), storage_writer=writer, no_dist=True)
    assert verify_checkpoint(tmp_path / "a").ok and verify_checkpoint(tmp_path / "b").ok
    assert not list(tmp_path.rglob("*tmp*"))


def test_a_flipped_bit_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    save(tmp_path)
    shard = next(tmp_path.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[content.index(torch.full((8,), 1.0).bfloat16().view(torch.uint8).numpy().tobytes()) + 5] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state(0), storage_reader=EngineStorageReader(tmp_path), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, CorruptionError) and error.tensor == "m.w"


def test_a_full_disk_fails_the_save_and_publishes_nothing(tmp_path: Path) -> None:
    """Stock DCP returned success here when it was a thread that failed."""
    save(tmp_path / "before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(CheckpointException) as caught:
            big = {f"t{i}": torch.ones(MIB) for i in range(4)}
            dcp.save(big, storage_writer=EngineStorageWriter(tmp_path / "full", CONFIG), no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value.failures[0][0], StorageError)
    assert [p.name for p in (tmp_path / "full").rglob("*") if p.is_file()] == []
    with pytest.raises(CheckpointException):
        dcp.load(state(0), storage_reader=EngineStorageReader(tmp_path / "full"), no_dist=True)


def test_a_tensor_that_cannot_be_saved_exactly_is_refused_by_name(tmp_path: Path) -> None:
    """B026"""
    with pytest.raises(CheckpointException) as caught:
        odd = {"good": torch.ones(3), "sparse": torch.eye(3).to_sparse()}
        dcp.save(odd, storage_writer=EngineStorageWriter(tmp_path, CONFIG), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, StateError) and error.key == "sparse"
    assert not (tmp_path / ".metadata").exists()


def two_ranks(rank: int, world: int, directory: str) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(64 * 3, dtype=torch.float32).reshape(64, 3)

    def make(scale: float) -> dict[str, Any]:
        return {"rows": distribute_tensor(full * scale, mesh, [Shard(0)]), "plain": full * scale, "n": scale}

    group = dist.new_group(backend="gloo")
    future = dcp.async_save(
        make(2.0), storage_writer=EngineStorageWriter(directory + "/async", CONFIG), process_group=group
    )
    future.result()
    dist.barrier()
    found = make(0.0)
    dcp.load(found, storage_reader=EngineStorageReader(directory + "/async"))
    assert (
        torch.equal(found["rows"].full_tensor(), full * 2)
        and torch.equal(found["plain"], full * 2)
        and found["n"] == 2.0
    )
    import os

    real = os.pwrite
    if rank == 1:

        def broken(fd: int, data: Any, offset: int) -> int:
            raise OSError(28, "No space left on device")

        os.pwrite = broken
    told: list[str] = []
    try:
        dcp.save(make(3.0), storage_writer=EngineStorageWriter(directory + "/bad", CONFIG))
    except CheckpointException as error:
        told = [type(failure[0]).__name__ for failure in error.failures.values()]
        assert list(error.failures) == [1] and isinstance(error.failures[1][0], CheckpointError)
    os.pwrite = real
    dist.barrier()
    assert not Path(directory, "bad", ".metadata").exists()
    return told


def test_two_ranks_save_in_the_background_and_fail_together(tmp_path: Path) -> None:
    assert run_ranks(2, two_ranks, str(tmp_path)) == [["StorageError"], ["StorageError"]]
    assert verify_checkpoint(tmp_path / "async").ok
