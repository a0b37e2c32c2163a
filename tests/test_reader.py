"""Promises of the reader: every target holds exactly what was saved, or a typed error names the file and the tensor."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_engine.errors import (
    CheckpointError,
    CorruptionError,
    KeyMismatchError,
    StateError,
    StorageError,
)
from ckpt_engine.restore import boxes, reader
from ckpt_engine.restore.reader import TensorRead, load_object, read_object, read_tensors
from ckpt_engine.restore.source import CheckpointSource
from tests.handmade import DTYPES, Chunk, example, flip, same_bits, stock_save, write_checkpoint

pytestmark = pytest.mark.timeout(60)

SHAPES = [(), (1,), (0,), (0, 4), (3, 5), (2, 3, 4)]


def whole(fqn: str, target: torch.Tensor) -> TensorRead:
    zeros = torch.Size([0] * target.dim())
    return TensorRead(MetadataIndex(fqn, zeros), zeros, target.shape, target, fqn)


def box(fqn: str, chunk: Sequence[int], low: Sequence[int], target: torch.Tensor) -> TensorRead:
    return TensorRead(MetadataIndex(fqn, chunk), torch.Size(low), target.shape, target, fqn)


def load(path: Path, targets: Mapping[str, torch.Tensor], *, threads: int = 2, verify: bool = True) -> int:
    reads = [whole(fqn, target) for fqn, target in targets.items()]
    return read_tensors(CheckpointSource.open(path), reads, threads=threads, verify=verify)


def small_pieces(monkeypatch: pytest.MonkeyPatch, size: int = 256) -> None:
    """Makes payloads of a few hundred bytes take the paths of those with many megabytes."""
    for name, value in (("_SMALL", 64), ("_PIECE", size), ("_SEGMENT", 4 * size), ("WINDOW", size)):
        monkeypatch.setattr(reader, name, value)


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, stock: bool, verify: bool) -> None:
    """B043: 0-d and empty tensors keep value and shape. B100: raw bytes of quantised payloads too."""
    state = {f"{d}.{i}": example(s, d, i) for d in DTYPES for i, s in enumerate(SHAPES)}
    if stock:
        stock_save(tmp_path, dict(state))
    else:
        write_checkpoint(tmp_path, state, files=2, ranks=2)
    targets = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    assert load(tmp_path, targets, verify=verify) == sum(tensor.nbytes for tensor in state.values())
    assert [fqn for fqn in state if not same_bits(state[fqn], targets[fqn])] == []


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("verify", [True, False])
def test_strided_cast_and_conjugated_targets_are_filled_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: bool, verify: bool
) -> None:
    """B100: non-contiguous targets; also leaves that require gradients and targets made in inference mode."""
    if big:
        small_pieces(monkeypatch)
    saved = torch.arange(60 * 40, dtype=torch.float32).reshape(60, 40)
    complex_saved = torch.view_as_complex(saved.reshape(60, 20, 2).contiguous())
    write_checkpoint(tmp_path, {"w": saved, "c": complex_saved})
    conjugated = torch.zeros(60, 20, dtype=torch.complex64).conj()
    with torch.inference_mode():
        inference = torch.zeros(60, 40, dtype=torch.float64)
    wide = torch.full((60, 80), -1.0)
    cases = [
        torch.zeros(40, 60).t(),
        wide[:, ::2],
        torch.zeros(60, 40, dtype=torch.float64),
        torch.nn.Parameter(torch.zeros(60, 40)),
        inference,
    ]
    for target in cases:
        load(tmp_path, {"w": target}, verify=verify)
        assert torch.equal(target.detach().to(torch.float32), saved)
    assert bool((wide[:, 1::2] == -1).all()), "elements between those of a strided target were touched"
    load(tmp_path, {"c": conjugated}, verify=verify)
    assert torch.equal(conjugated.resolve_conj(), complex_saved)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_large_tensor_read_by_several_threads_is_checked_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    small_pieces(monkeypatch)
    saved = example((101, 37), torch.float32)
    (item,) = write_checkpoint(tmp_path, {"w": saved})
    target = torch.zeros_like(saved)
    assert load(tmp_path, {"w": target}, threads=threads) == saved.nbytes
    assert same_bits(target, saved)
    for position in (0, 255, 256, item.nbytes // 2, item.nbytes - 1):
        flip(tmp_path / item.file, item.payload + position)
        for damaged in (torch.zeros_like(saved), torch.zeros(37, 101).t()):
            with pytest.raises(CorruptionError, match="CRC-32"):
                load(tmp_path, {"w": damaged}, threads=threads)
        flip(tmp_path / item.file, item.payload + position)


@st.composite
def boxes_of_chunks(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        low = tuple(draw(st.integers(0, size)) for size in shape)
        high = tuple(draw(st.integers(start, size)) for start, size in zip(low, shape, strict=True))
        found.append((low, high))
    return shape, found


@given(case=boxes_of_chunks(), limit=st.sampled_from([4, 12, 40, 1 << 20]), verify=st.booleans())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_box_of_a_chunk_equals_slicing_the_tensor(
    tmp_path_factory: pytest.TempPathFactory, case: Any, limit: int, verify: bool
) -> None:
    """Resharding: each box is what slicing gives, through windows of any size, several boxes of one record at once."""
    shape, found = case
    path = tmp_path_factory.mktemp("box")
    saved = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    write_checkpoint(path, {"w": saved})
    expected = [saved[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] for low, high in found]
    targets = [torch.full(part.shape, -1, dtype=torch.int32) for part in expected]
    reads = [box("w", [0] * len(shape), low, target) for (low, _), target in zip(found, targets, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        if limit < 1 << 20:
            small_pieces(patch, limit)
            patch.setattr(reader, "_SMALL", 0)
        read_tensors(CheckpointSource.open(path), reads, threads=2, verify=verify)
    assert [t.tolist() for t in targets] == [e.tolist() for e in expected]


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    limit=st.integers(16, 400),
)
@settings(deadline=None)
def test_windows_cover_a_payload_once_in_order_within_the_limit(
    shape: tuple[int, ...], itemsize: int, limit: int
) -> None:
    found = list(boxes.windows(shape, itemsize, limit))
    edges = [0] + [window.stop for window in found]
    assert [window.start for window in found] == edges[:-1]
    assert edges[-1] == torch.Size(shape).numel() * itemsize
    assert max(window.stop - window.start for window in found) <= limit


def test_a_tensor_saved_in_chunks_is_put_together(tmp_path: Path) -> None:
    saved = example((6, 8), torch.bfloat16)
    chunks = [Chunk((r, c), saved[r : r + 3, c : c + 4].contiguous()) for r in (0, 3) for c in (0, 4)]
    write_checkpoint(tmp_path, {"w": chunks}, ranks=2, files=2)
    target = torch.zeros_like(saved)
    reads = [
        box("w", chunk.offsets, (0, 0), target[chunk.offsets[0] :, chunk.offsets[1] :][:3, :4]) for chunk in chunks
    ]
    read_tensors(CheckpointSource.open(tmp_path), reads, threads=2, verify=True)
    assert same_bits(target, saved)


# -- amount of work ----------------------------------------------------------------------------------------------------


def test_a_record_wanted_several_times_is_read_once(tmp_path: Path) -> None:
    """B095: tied tensors, and boxes of one chunk."""
    saved = torch.arange(5000.0)
    write_checkpoint(tmp_path, {"w": saved})
    target = torch.zeros(5000)
    halves = torch.zeros(2, 2500)
    reads = [whole("w", target), whole("w", target), box("w", [0], [0], halves[0]), box("w", [0], [2500], halves[1])]
    source = CheckpointSource.open(tmp_path)
    assert read_tensors(source, reads[:2], threads=2, verify=True) == saved.nbytes
    assert torch.equal(target, saved)
    target.zero_()
    assert read_tensors(source, reads, threads=2, verify=True) == saved.nbytes
    assert torch.equal(target, saved) and torch.equal(halves.reshape(-1), saved)


def test_an_unchecked_box_reads_only_its_rows(tmp_path: Path) -> None:
    """B056: a small slice doesn't drag its whole chunk along."""
    saved = torch.arange(4 << 20, dtype=torch.float32).reshape(4096, 1024)
    write_checkpoint(tmp_path, {"w": saved})
    source = CheckpointSource.open(tmp_path)
    target = torch.zeros(3, 10)
    assert read_tensors(source, [box("w", [0, 0], [2000, 7], target)], threads=1, verify=False) == 3 * 1024 * 4
    assert torch.equal(target, saved[2000:2003, 7:17])
    assert read_tensors(source, [box("w", [0, 0], [2000, 7], target)], threads=1, verify=True) == saved.nbytes


def test_many_small_tensors_take_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{number}": example((50,), torch.float32, number) for number in range(1500)}
    write_checkpoint(tmp_path, state, files=2)
    calls: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: calls.append(at) or real(fd, buffers, at))
    targets = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    load(tmp_path, targets)
    assert all(same_bits(state[fqn], targets[fqn]) for fqn in state)
    assert len(calls) <= 6


def test_short_reads_of_the_system_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{number}": example((number * 7,), torch.uint8, number) for number in range(40)}
    write_checkpoint(tmp_path, state)
    real = os.preadv

    def stingy(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        first = next(buffer for buffer in buffers if len(buffer))
        return real(fd, [first[: max(1, len(first) // 2)]], at)

    monkeypatch.setattr(os, "preadv", stingy)
    targets = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    load(tmp_path, targets)
    assert all(same_bits(state[fqn], targets[fqn]) for fqn in state)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_a_flipped_payload_bit_is_found_and_named(tmp_path: Path, direct: bool) -> None:
    """B100: one byte, in the middle of neighbours that are fine."""
    state = {f"w{number}": example((64,), torch.uint8, number) for number in range(9)}
    items = write_checkpoint(tmp_path, state)
    item = next(item for item in items if item.fqn == "w4")
    flip(tmp_path / item.file, item.payload + 33, 5)
    targets = {f: torch.zeros(64, dtype=torch.uint8 if direct else torch.int32) for f in state}
    with pytest.raises(CorruptionError, match=r"'w4'.*CRC-32.*expected") as caught:
        load(tmp_path, targets)
    assert (caught.value.file, caught.value.tensor, caught.value.step) == (item.file, "w4", 100)
    load(tmp_path, targets, verify=False)
    assert same_bits(targets["w3"].to(torch.uint8), state["w3"])


def test_a_flipped_bit_in_a_stock_record_is_found(tmp_path: Path) -> None:
    stock_save(tmp_path, {"w": torch.arange(1000.0), "v": torch.arange(10)})
    source = CheckpointSource.open(tmp_path)
    info = source.record("w", (0,))
    assert source.verified_by == "zip"
    flip(info.path, info.offset + info.length // 2)
    with pytest.raises(CorruptionError, match="'w'") as caught:
        load(tmp_path, {"w": torch.zeros(1000)})
    assert caught.value.tensor == "w"
    load(tmp_path, {"v": torch.zeros(10, dtype=torch.int64)})


def test_a_file_that_shrinks_after_opening_is_a_typed_error(tmp_path: Path) -> None:
    """B107: the shard is cut between opening and reading."""
    (item,) = write_checkpoint(tmp_path, {"w": torch.arange(1000.0)})
    source = CheckpointSource.open(tmp_path)
    os.truncate(tmp_path / item.file, item.payload + 10)
    with pytest.raises(CorruptionError, match="ends at byte") as caught:
        read_tensors(source, [whole("w", torch.zeros(1000))], threads=1, verify=False)
    assert (caught.value.file, caught.value.tensor) == (item.file, "w")


def test_files_swapped_between_two_steps_are_found(tmp_path: Path) -> None:
    for step, fill in ((1, 1.0), (2, 2.0)):
        write_checkpoint(tmp_path / str(step), {"w": torch.full((100,), fill)}, step=step, save_id=f"id{step}")
    for name in (".metadata", "ckpt_engine/rank-00000.json"):
        paths = [tmp_path / str(step) / name for step in (1, 2)]
        ours, theirs = (path.read_bytes() for path in paths)
        paths[0].write_bytes(theirs)
        with pytest.raises(CorruptionError, match=os.path.basename(name)):
            CheckpointSource.open(tmp_path / "1", step=1)
        paths[0].write_bytes(ours)
    (tmp_path / "1" / "__0_0.distcp").write_bytes((tmp_path / "2" / "__0_0.distcp").read_bytes())
    with pytest.raises(CorruptionError, match="CRC-32"):
        load(tmp_path / "1", {"w": torch.zeros(100)})
    with pytest.raises(CorruptionError, match="is of step 2, expected 1"):
        CheckpointSource.open(tmp_path / "2", step=1)


def test_an_input_output_error_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, {"w": torch.ones(10)})
    source = CheckpointSource.open(tmp_path)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match="Input/output error") as caught:
        read_tensors(source, [whole("w", torch.zeros(10))], threads=1, verify=True)
    assert caught.value.errno == 5


@pytest.mark.parametrize("damaged", [False, True])
def test_threads_and_descriptors_are_gone_afterwards(tmp_path: Path, damaged: bool) -> None:
    state = {f"w{number}": example((300_000,), torch.float32, number) for number in range(6)}
    items = write_checkpoint(tmp_path, state, files=3)
    if damaged:
        flip(tmp_path / items[2].file, items[2].payload)
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    try:
        load(tmp_path, {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}, threads=4)
        assert not damaged
    except CorruptionError:
        assert damaged
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(1).expand(10),
        torch.zeros(1, 3).expand(10, 3)[:, 0],
        torch.zeros(10, device="meta"),
        torch.zeros(10).to_sparse(),
    ],
    ids=["expanded", "expanded-column", "meta", "sparse"],
)
def test_targets_that_cannot_hold_the_values_are_refused_by_name(tmp_path: Path, target: torch.Tensor) -> None:
    write_checkpoint(tmp_path, {"w": torch.arange(10.0)})
    with pytest.raises(StateError, match="'w' can't be filled") as caught:
        load(tmp_path, {"w": target})
    assert caught.value.key == "w"


def test_overlapping_and_real_for_complex_targets_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"w": torch.ones(5, 2), "c": torch.ones(3, dtype=torch.complex64)})
    with pytest.raises(StateError, match="shares elements with itself"):
        load(tmp_path, {"w": torch.zeros(6).as_strided((5, 2), (1, 1))})
    with pytest.raises(StateError, match=r"can't hold the saved torch\.complex64"):
        load(tmp_path, {"c": torch.zeros(3)})


def test_what_the_checkpoint_does_not_have_is_an_error_not_silence(tmp_path: Path) -> None:
    """B104: a missing key, another shape, a box outside the chunk, a value where a tensor is wanted."""
    moments = example((4, 4), torch.float32)
    write_checkpoint(tmp_path, {"optim.exp_avg": moments}, {"v": 1})
    target = torch.zeros(4, 4)
    load(tmp_path, {"optim.exp_avg": target})
    assert same_bits(target, moments)
    with pytest.raises(KeyMismatchError, match=r"'optim.exp_avg_sq' is not in the checkpoint") as caught:
        load(tmp_path, {"optim.exp_avg_sq": torch.zeros(4, 4)})
    assert caught.value.missing == ("optim.exp_avg_sq",)
    source = CheckpointSource.open(tmp_path)
    wrong = [
        whole("optim.exp_avg", torch.zeros(4, 5)),
        box("optim.exp_avg", [0, 0], [2, 0], torch.zeros(3, 4)),
        whole("optim.exp_avg", torch.zeros(4, 4))._replace(target=torch.zeros(16)),
        TensorRead(MetadataIndex("v"), torch.Size([]), torch.Size([]), torch.zeros(()), "v"),
    ]
    for read in wrong:
        with pytest.raises(KeyMismatchError, match=read.fqn):
            read_tensors(source, [read], threads=1, verify=True)


# -- values ------------------------------------------------------------------------------------------------------------


class Custom:
    """Something that weights_only refuses."""

    def __init__(self) -> None:
        self.x = 1


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_values_are_checked_and_loaded_without_running_code(tmp_path: Path, stock: bool) -> None:
    values: dict[str, Any] = {"plain": (0.1, 2, "text"), "custom": Custom()}
    if stock:
        stock_save(tmp_path, dict(values))
    else:
        write_checkpoint(tmp_path, {}, values)
    source = CheckpointSource.open(tmp_path)
    with pytest.raises(KeyMismatchError, match="'absent'"):
        read_object(source, "absent", verify=True)
    data = read_object(source, "plain", verify=True)
    assert load_object(data, fqn="plain", trusted=False) == values["plain"]
    data = read_object(source, "custom", verify=True)
    with pytest.raises(CheckpointError, match=r"'custom' needs \S*Custom"):
        load_object(data, fqn="custom", trusted=False)
    assert load_object(data, fqn="custom", trusted=True).x == 1
    info = source.record("custom", None)
    flip(info.path, info.offset + info.length // 2)
    with pytest.raises(CorruptionError, match="'custom'"):
        read_object(source, "custom", verify=True)
    with pytest.raises(CorruptionError, match="'cut'"):
        load_object(data[:50], fqn="cut", trusted=True)
