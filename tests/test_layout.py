"""Promises of the layout: a file image is byte for byte what torch.save would have written, whatever the extent size."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.layout.image import BlobRun, FileImage, Sealer, TensorSpec, plan_files
from ckpt_engine.layout.records import ALIGNMENT, TemplateCache, fill_crc, make_template
from ckpt_engine.storage.checksum import crc32

pytestmark = pytest.mark.timeout(120)

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def example(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor with arbitrary bytes that are valid for its dtype."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def image_bytes(image: FileImage, run: BlobRun, tensors: list[torch.Tensor], extent_bytes: int) -> tuple[bytes, Sealer]:
    """What staging and sealing put on disk, with extents of the given size."""
    sealer = Sealer(image, run, extent_bytes, checksum=True)
    content = bytearray()
    for extent in range(-(-run.size // extent_bytes)):
        memory = bytearray(b"\xaa" * extent_bytes)  # what an earlier save left in the extent must not show
        base = extent * extent_bytes
        for index in image.records_in(base, base + extent_bytes):
            low, high = max(image.payloads[index], base), min(image.payload_ends[index], base + extent_bytes)
            if low < high:
                data = raw(tensors[image.items[index]])
                memory[low - base : high - base] = data[low - image.payloads[index] : high - image.payloads[index]]
        padded = sealer.seal(extent, memoryview(memory))
        content += memory[:padded]
    assert len(content) == run.size + -run.size % 4096
    assert not any(content[run.size :])
    return bytes(content[: run.size]), sealer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (0, 4), (2, 0, 3), (70, 33)], ids=str)
def test_a_record_is_what_torch_save_writes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = example(shape, dtype)
    template = make_template(shape, dtype)
    tail = bytearray(template.tail)
    fill_crc(tail, template.crc_at, crc32(raw(tensor)))
    record = (template.header + raw(tensor) + bytes(tail))[: template.length]
    stock = io.BytesIO()
    torch.save(tensor, stock)
    assert len(record) == len(stock.getvalue())
    with zipfile.ZipFile(io.BytesIO(record)) as ours, zipfile.ZipFile(stock) as theirs:
        assert ours.testzip() is None
        assert [
            (i.filename, i.CRC, i.header_offset) for i in ours.infolist() if "serialization_id" not in i.filename
        ] == [(i.filename, i.CRC, i.header_offset) for i in theirs.infolist() if "serialization_id" not in i.filename]
    loaded = torch.load(io.BytesIO(record), weights_only=True)
    assert loaded.dtype == dtype and loaded.shape == torch.Size(shape) and raw(loaded) == raw(tensor)


def test_a_template_of_any_size_costs_no_memory() -> None:
    template = make_template((1 << 42,), torch.float32)
    assert template.nbytes == 1 << 44
    assert len(template.header) + len(template.tail) < 4096
    assert len(template.header) % ALIGNMENT == 0


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=8),
    blobs=st.lists(st.binary(min_size=1, max_size=9000), max_size=4),
    extent_bytes=st.sampled_from([4096, 8192, 12288, 65536]),
    files=st.integers(1, 3),
    data=st.data(),
)
def test_every_item_is_found_at_its_offset_whatever_the_extent_size(
    shapes: list[list[int]], blobs: list[bytes], extent_bytes: int, files: int, data: st.DataObject
) -> None:
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    tensors = [
        example(tuple(shape), dtype, seed) for seed, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    specs = [TensorSpec(tuple(t.shape), t.dtype) for t in tensors]
    images, holder = plan_files(specs, [f"__0_{n}.distcp" for n in range(files)], TemplateCache())
    assert holder == list(range(len(specs)))
    assert sorted(item for image in images for item in image.items) == holder
    for image in images:
        run = BlobRun.place(image, blobs)
        content, sealer = image_bytes(image, run, tensors, extent_bytes)
        frames_end = [*image.starts[1:], *(start for start, _ in run.blobs), run.size]
        for number, item in enumerate(image.items):
            start, template = image.starts[number], image.templates[number]
            assert start % ALIGNMENT == 0
            record = content[start : start + template.length]
            with zipfile.ZipFile(io.BytesIO(record)) as archive:
                assert archive.testzip() is None
            loaded = torch.load(io.BytesIO(record), weights_only=True)
            assert raw(loaded) == raw(tensors[item]) and loaded.shape == tensors[item].shape
            payload, end = image.payloads[number], image.payload_ends[number]
            stop = frames_end[number] if number + 1 < len(image.items) or not run.blobs else run.blobs[0][0]
            assert sealer.crcs[number] == crc32(content[payload:end])
            assert sealer.frame_crcs[number] == crc32(content[end:stop], crc32(content[start:payload]))
        for number, (start, blob) in enumerate(run.blobs):
            stop = run.blobs[number + 1][0] if number + 1 < len(run.blobs) else run.size
            assert content[start : start + len(blob)] == blob
            assert sealer.crcs[len(image.items) + number] == crc32(blob)
            assert sealer.frame_crcs[len(image.items) + number] == crc32(content[start + len(blob) : stop])


def test_tied_tensors_share_one_record() -> None:
    specs = [
        TensorSpec((4, 4), torch.float32),
        TensorSpec((8,), torch.int64),
        TensorSpec((4, 4), torch.float32, same_as=0),
    ]
    images, holder = plan_files(specs, ["a", "b"], TemplateCache())
    assert holder == [0, 1, 0]
    assert sorted(item for image in images for item in image.items) == [0, 1]


def test_the_same_specs_give_the_same_layout() -> None:
    specs = [TensorSpec((n % 7 + 1, 33), torch.float32) for n in range(50)]
    first, _ = plan_files(specs, ["a", "b", "c"], TemplateCache())
    second, _ = plan_files(specs, ["a", "b", "c"], TemplateCache())
    assert [(i.name, i.items, i.starts) for i in first] == [(i.name, i.items, i.starts) for i in second]
    sizes = [i.tensor_bytes for i in first]
    assert max(sizes) - min(sizes) <= 4096


def test_extents_out_of_order_are_refused() -> None:
    images, _ = plan_files([TensorSpec((8192,), torch.float32)], ["a"], TemplateCache())
    sealer = Sealer(images[0], BlobRun.place(images[0], []), 4096, checksum=True)
    with pytest.raises(RuntimeError, match="out of order"):
        sealer.seal(1, memoryview(bytearray(4096)))
