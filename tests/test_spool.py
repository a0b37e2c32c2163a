"""Promises of the spool: large pickled values wait in an unlinked file, not in memory, and are the same bytes as ever."""

from __future__ import annotations

import gc
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine import CheckpointEngine, EngineConfig
from ckpt_engine.spool import SPOOL_BYTES, Spool
from ckpt_engine.values import pickle_value

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20


def anonymous_memory() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@given(st.lists(st.integers(0, SPOOL_BYTES // 3), max_size=9), st.booleans())
def test_what_goes_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], with_directory: bool
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    spool = Spool(str(directory) if with_directory else None)
    expected = b""
    for number, size in enumerate(sizes):
        piece = bytes([number]) * size
        spool.write(memoryview(piece))
        expected += piece
    taken = spool.take()
    assert len(taken) == len(expected) and bytes(taken) == expected
    assert isinstance(taken, bytes) == (not with_directory or len(expected) <= SPOOL_BYTES)
    assert os.listdir(directory) == []


def test_a_directory_that_takes_no_file_costs_memory_not_the_value() -> None:
    value = os.urandom(2 * MIB)
    record = pickle_value("v", value, "/proc/no/such/directory")
    assert isinstance(record, bytes)
    assert torch.load(io.BytesIO(record), weights_only=True) == value


def test_no_space_for_the_file_costs_memory_not_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    record = pickle_value("v", os.urandom(2 * MIB), str(tmp_path))
    assert isinstance(record, bytes)


def test_a_large_value_is_not_held_in_memory_while_it_waits_to_be_written(tmp_path: Path) -> None:
    """B010's kind: what the engine holds must not grow with the checkpoint, for values as for tensors."""
    value = os.urandom(48 * MIB)
    hold, real = threading.Event(), os.pwrite

    def held(fd: int, data: Any, offset: int) -> int:
        hold.wait(30)
        return real(fd, data, offset)

    with CheckpointEngine(tmp_path, EngineConfig(staging_budget=4 * MIB, extent_bytes=MIB)) as engine:
        engine.save({"v": b"", "n": 1}, 1)
        engine.wait()
        os.pwrite = held
        try:
            saver = threading.Thread(target=engine.save, args=({"v": value, "n": 2}, 2))
            gc.collect()
            before = anonymous_memory()
            saver.start()
            saver.join(4)  # planned by then, and waiting for extents: the state is larger than the budget
            waiting, grown = saver.is_alive(), anonymous_memory() - before
        finally:
            hold.set()
            os.pwrite = real
        saver.join(30)
        engine.wait()
        assert waiting
        assert grown < 16 * MIB
        state: dict[str, Any] = {"v": None, "n": 0}
        engine.restore(state)
        assert state == {"v": value, "n": 2}
        assert engine.verify(2).ok
