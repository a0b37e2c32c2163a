"""Makes part manifests and commit records for tests, and lies in them."""

from __future__ import annotations

import array
import copy
import dataclasses
import hashlib
import json
from typing import Any

from ckpt_engine.commit.manifest import CommitRecord, FileEntry, PartEntry, PartStatic, compose_part, part_name
from ckpt_engine.errors import CheckpointError, CorruptionError

PART_PATH = "/checkpoints/iter_0000100/ckpt_engine/rank-00000.json"
COMMIT_PATH = "/checkpoints/iter_0000100/ckpt_engine/commit.json"
MAX = 2**32 - 1


@dataclasses.dataclass
class Item:
    """One item of a model manifest. ``frame`` is (header, tail, padding); a blob has no shape."""

    fqn: str
    shape: list[int] | None
    chunk: list[int] | None
    frame: tuple[int, int, int]
    blob_bytes: int
    crc: int
    frame_crc: int

    @property
    def nbytes(self) -> int:
        if self.shape is None:
            return self.blob_bytes
        count = 4
        for size in self.shape:
            count *= size
        return count


def tensor(fqn: str, shape: list[int], *, chunk: list[int] | None = None, crc: int = 1, frame_crc: int = 2) -> Item:
    return Item(fqn, shape, chunk, (64, 100, 28), 0, crc, frame_crc)


def blob(fqn: str, size: int, *, crc: int = 3, frame_crc: int = 4) -> Item:
    return Item(fqn, None, None, (0, 0, -size % 64), size, crc, frame_crc)


def build(
    files: list[list[Item]], *, checksum: bool = True, step: int = 100, world_size: int = 2, save_id: str = "9f3a"
) -> tuple[bytes, list[dict[str, Any]], list[int]]:
    """Composes a manifest; returns it, the items expected in it (tensors first), and the file sizes."""
    placed: list[tuple[Item, dict[str, Any]]] = []
    sizes = []
    for number, items in enumerate(files):
        at = 0
        for item in sorted(items, key=lambda i: i.shape is None):
            header, tail, padding = item.frame
            length = header + item.nbytes + tail
            row = {
                "fqn": item.fqn,
                "chunk": None if item.chunk is None else tuple(item.chunk),
                "kind": "bytes" if item.shape is None else "tensor",
                "dtype": None if item.shape is None else "torch.float32",
                "shape": None if item.shape is None else tuple(item.shape),
                "file": number,
                "offset": at,
                "length": length,
                "payload": at + header,
                "nbytes": item.nbytes,
                "end": at + length + padding,
                "crc32": item.crc if checksum else None,
                "frame_crc32": item.frame_crc if checksum else None,
            }
            placed.append((item, row))
            at += length + padding
        sizes.append(at)
    tensors = [(i, row) for i, row in placed if i.shape is not None]
    blobs = [(i, row) for i, row in placed if i.shape is None]
    static = PartStatic(
        rank=0,
        checksum=checksum,
        file_names=[f"__0_{n}.distcp" for n in range(len(files))],
        fqn=[i.fqn for i, _ in tensors],
        chunk=[i.chunk for i, _ in tensors],
        dtype=["torch.float32" for _ in tensors],
        shape=[list(i.shape or []) for i, _ in tensors],
        file=[row["file"] for _, row in tensors],
        offset=[row["offset"] for _, row in tensors],
        length=[row["length"] for _, row in tensors],
        payload=[row["payload"] for _, row in tensors],
        nbytes=[row["nbytes"] for _, row in tensors],
    )
    data = compose_part(
        static,
        save_id=save_id,
        step=step,
        world_size=world_size,
        file_bytes=sizes,
        crcs=array.array("I", [i.crc for i, _ in tensors]),
        frame_crcs=array.array("I", [i.frame_crc for i, _ in tensors]),
        blobs=[(i.fqn, row["file"], row["offset"], row["length"]) for i, row in blobs],
        blob_crcs=array.array("I", [i.crc for i, _ in blobs]),
        blob_frame_crcs=array.array("I", [i.frame_crc for i, _ in blobs]),
    )
    return data, [row for _, row in tensors + blobs], sizes


def sample_part() -> bytes:
    files = [
        [tensor("a.weight", [3, 5], chunk=[0, 0]), tensor("b", [], crc=MAX), blob("step", 700)],
        [tensor("c", [8])],
    ]
    return build(files)[0]


def sample_commit(part: bytes = b"") -> CommitRecord:
    part = part or sample_part()
    return CommitRecord(
        step=100,
        save_id="9f3a",
        world_size=2,
        bytes=8192,
        created="2026-12-01T12:00:00+00:00",
        engine="0.1.0",
        checksum="crc32",
        parts=tuple(PartEntry(rank, part_name(rank), len(part), hashlib.sha256(part).hexdigest()) for rank in range(2)),
        files={".metadata": FileEntry(90, hashlib.sha256(b"m").hexdigest()), "é.pt": FileEntry(0, "0" * 64)},
        int_keys=("optim.state", ""),
        structure_digest="ab" * 32,
        empty=(("optim", "state", 0), ("é",)),
        generation=7,
    )


def put(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    if value is KeyError:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return changed


def seal(record: Any) -> bytes:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"record": record, "sha256": digest}, sort_keys=True, separators=(",", ":")).encode()


def assert_names(error: CheckpointError, path: str) -> None:
    name = path.rsplit("/", 1)[1]
    assert name in error.message
    assert error.path == path
    if isinstance(error, CorruptionError):
        assert error.file == name
