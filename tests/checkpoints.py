"""Makes small checkpoints through :class:`CheckpointDirectory`, for tests of the directory."""

from __future__ import annotations

import array
import hashlib
import os
import uuid

from ckpt_engine.commit.directory import CheckpointDirectory
from ckpt_engine.commit.manifest import (
    CommitRecord,
    FileEntry,
    PartEntry,
    PartStatic,
    compose_commit,
    compose_part,
    part_name,
)


def fill(path: str, step: int, save_id: str, *, commit: bool = True, ranks: int = 1, generation: int = 0) -> None:
    """Writes the files of a checkpoint into ``path``: one shard of ``step + 1`` bytes per rank."""
    os.makedirs(os.path.join(path, "ckpt_engine"), exist_ok=True)
    size = step + 1
    parts = []
    for rank in range(ranks):
        name = f"__{rank}_0.distcp"
        write(os.path.join(path, name), save_id.encode()[:1] * size)
        static = PartStatic(
            rank=rank,
            checksum=False,
            file_names=[name],
            fqn=["weight"],
            chunk=[None],
            dtype=["torch.uint8"],
            shape=[[size]],
            file=[0],
            offset=[0],
            length=[size],
            payload=[0],
            nbytes=[size],
        )
        empty = array.array("I")
        part = compose_part(
            static,
            save_id=save_id,
            step=step,
            world_size=ranks,
            file_bytes=[size],
            crcs=empty,
            frame_crcs=empty,
        )
        write(os.path.join(path, "ckpt_engine", part_name(rank)), part)
        parts.append(PartEntry(rank, part_name(rank), len(part), hashlib.sha256(part).hexdigest()))
    metadata = b"metadata of " + save_id.encode()
    write(os.path.join(path, ".metadata"), metadata)
    record = CommitRecord(
        step=step,
        save_id=save_id,
        world_size=ranks,
        bytes=ranks * size,
        created="2026-12-01T12:00:00+00:00",
        engine="0.1.0",
        checksum=None,
        parts=tuple(parts),
        files={".metadata": FileEntry(len(metadata), hashlib.sha256(metadata).hexdigest())},
        generation=generation,
    )
    if commit:
        write(os.path.join(path, "ckpt_engine", "commit.json"), compose_commit(record))


def save(directory: CheckpointDirectory, step: int, *, save_id: str = "", ranks: int = 1, track: bool = True) -> str:
    """Saves a step the way the engine does, and returns its final path."""
    save_id = save_id or uuid.uuid4().hex
    tmp = directory.begin(step, save_id)
    fill(tmp, step, save_id, ranks=ranks, generation=directory.next_generation())
    final = directory.publish(tmp, step, save_id)
    if track:
        directory.advance_trackers(step, None)
    return final


def write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
