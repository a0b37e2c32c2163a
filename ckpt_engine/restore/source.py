"""An opened checkpoint directory: ours, which a commit record vouches for, or one that stock DCP wrote.

::

    iter_0000100/                            opening compares
      ckpt_engine/commit.json                its own SHA-256, the step asked for
      ckpt_engine/rank-00000.json ...        size and SHA-256 in the commit record
      .metadata, train_state.pt              size and SHA-256 in the commit record
      __0_0.distcp ...                       size in the part manifest

Opening reads the small files only. That the bytes of the shard files are right is for the reader and for verify to
find; a shard file that is missing, short or long is found here. A stock directory has no commit record; its
``.metadata`` has to load, and the files named in there have to be long enough for what it says they hold.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ckpt_engine.commit.manifest import CommitRecord, FileEntry, PartEntry, PartItem, PartManifest
from ckpt_engine.commit.manifest import parse_commit as _parse_commit
from ckpt_engine.commit.manifest import parse_part as _parse_part
from ckpt_engine.errors import CheckpointError, KeyMismatchError, NotCommittedError
from ckpt_engine.restore.files import CheckpointFiles
from ckpt_engine.restore.unpickle import load_metadata

log = logging.getLogger("ckpt_engine")

PART_DIRECTORY = "ckpt_engine"
COMMIT = f"{PART_DIRECTORY}/commit.json"
METADATA = ".metadata"
TRAIN_STATE = "train_state.pt"

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class RecordInfo(NamedTuple):
    """Where a saved tensor chunk or pickled value lies.

    Attributes:
        path: the shard file.
        offset, length: the record, as ``torch.save`` writes it.
        payload, nbytes: the raw tensor bytes in it, counted from the start of the file; ``None`` in a stock checkpoint,
            where only the record itself tells.
        crc32: of the payload; ``None`` where none was saved.
        kind: ``"tensor"`` or ``"bytes"``; ``dtype`` and ``shape`` (of the chunk) are ``None`` for the latter.
        chunk: where the chunk lies in the whole tensor.
        transforms: what a stock record was written through (compression, say).
    """

    fqn: str
    path: str
    offset: int
    length: int
    payload: int | None
    nbytes: int | None
    crc32: int | None
    kind: str
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    chunk: tuple[int, ...] | None
    transforms: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The record's name in messages."""
        if self.chunk is None or not any(self.chunk):
            return self.fqn
        return f"{self.fqn} (chunk at {list(self.chunk)})"


@dataclasses.dataclass
class _Part:
    """A part manifest. ``items`` is filled when the first of them is asked for."""

    entry: PartEntry
    path: str
    files: dict[str, int]
    items: dict[tuple[str, int], PartItem] | None = None


class CheckpointSource:
    """A checkpoint to read from. Made by :meth:`open`; used by one thread at a time; holds no descriptor.

    Attributes:
        path: absolute path of the directory.
        step: step of the commit record, else the one that was asked for.
        metadata: DCP's metadata.
        commit: the commit record; ``None`` for a stock checkpoint.
        verified_by: what checks content that is read: our ``"manifest"``, or the CRCs in stock's ``"zip"`` files.
    """

    def __init__(self, path: str, step: int | None) -> None:
        self.path = path
        self.step = step
        self.metadata: Metadata = Metadata({}, storage_data={})
        self.commit: CommitRecord | None = None
        self._files = CheckpointFiles(path, step=step, phase="restore")
        self._parts: list[_Part] = []
        self._owner: dict[str, _Part] = {}
        self._paths: dict[str, str] = {}
        self._chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, step: int | None = None) -> CheckpointSource:
        """Opens a checkpoint directory.

        Args:
            step: the step that it has to be of, if known.

        Raises:
            NotCommittedError: there is no checkpoint, or one whose commit was never reached.
            CorruptionError: a file is missing, has another size or content than recorded, or is of another step.
            CheckpointError: a newer engine wrote it, or ``.metadata`` names something that isn't let through.
        """
        source = cls(os.path.abspath(os.fspath(path)), step)
        if not os.path.isdir(source.path):
            raise NotCommittedError(
                "there is no such checkpoint directory", step=step, path=source.path, phase="restore"
            )
        if source._files.exists(COMMIT):
            source._open_committed()
        else:
            source._open_stock()
        return source

    @property
    def verified_by(self) -> Literal["manifest", "zip"]:
        return "zip" if self.commit is None else "manifest"

    # -- what is in it ----------------------------------------------------------------------------------------------

    def record(self, fqn: str, chunk_offsets: torch.Size | tuple[int, ...] | None) -> RecordInfo:
        """Where a chunk of a tensor, or (without offsets) a pickled value, lies.

        Raises:
            KeyMismatchError: the checkpoint doesn't have it.
            CorruptionError: metadata and manifest contradict each other.
        """
        return self.record_of(MetadataIndex(fqn, chunk_offsets))

    def record_of(self, index: MetadataIndex) -> RecordInfo:
        """Like :meth:`record`, by DCP's key."""
        storage: dict[MetadataIndex, Any] = self.metadata.storage_data
        place = storage.get(index)
        if place is None:
            offset = tuple(index.offset or ())
            which = f" (chunk at {list(offset)})" if any(offset) else ""
            raise KeyMismatchError(
                f"{index.fqn!r}{which} is not in the checkpoint",
                missing=(index.fqn,),
                step=self.step,
                path=self.path,
                phase="restore",
            )
        name, start, length = place.relative_path, place.offset, place.length
        if self.commit is None:
            return self._stock_record(index, self._files.full(name), place)
        part = self._owner.get(name)
        item = None if part is None else self._items(part).get((name, start))
        # Names may differ: tied tensors share one record, which the manifest lists once, under one of their names.
        if item is None or item.length != length:
            self._files.fail(
                METADATA,
                f"says that {index.fqn!r} lies at {start}+{length} of {name}; the part manifest says otherwise",
                tensor=index.fqn,
            )
        dtype = None if item.dtype is None else _DTYPES.get(item.dtype)
        if item.kind == "tensor" and dtype is None:
            raise CheckpointError(
                f"{index.fqn!r} has dtype {item.dtype}, which torch {torch.__version__} doesn't have",
                step=self.step,
                path=self.path,
                phase="restore",
                hint="use the version of torch that saved it, or a later one",
            )
        where = (index.fqn, self._paths[name], start, length, item.payload, item.nbytes, item.crc32)
        chunk = None if index.offset is None else tuple(index.offset)
        return RecordInfo(*where, item.kind, dtype, item.shape, chunk)

    def records(self) -> Iterator[RecordInfo]:
        """Every record."""
        for index in self.metadata.storage_data:
            yield self.record_of(index)

    def train_state_bytes(self) -> bytes | None:
        """The content of ``train_state.pt``, or ``None``.

        Raises:
            CorruptionError: it isn't what the commit record says.
        """
        entry = None if self.commit is None else self.commit.files.get(TRAIN_STATE)
        if entry is not None:
            return self._files.vouched(TRAIN_STATE, entry)
        if not self._files.exists(TRAIN_STATE):
            return None
        if self.commit is not None:  # a framework on top of the engine may write its own
            log.info("%s/%s is not covered by the commit record", self.path, TRAIN_STATE)
        return self._files.read(TRAIN_STATE)

    # -- opening ----------------------------------------------------------------------------------------------------

    def _open_committed(self) -> None:
        where = os.path.join(self.path, COMMIT)
        self.commit = commit = _parse_commit(self._files.read(COMMIT), path=where)
        if self.step is not None and commit.step != self.step:
            self._files.fail(COMMIT, f"is of step {commit.step}, expected {self.step}")
        self.step = self._files.step = commit.step
        total = 0
        for entry in commit.parts:
            name = f"{PART_DIRECTORY}/{entry.name}"
            data = self._files.vouched(name, FileEntry(entry.bytes, entry.sha256))
            part = _Part(entry, os.path.join(self.path, name), self._file_list(data, os.path.join(self.path, name)))
            self._parts.append(part)
            for file, size in part.files.items():
                if file in self._owner:
                    self._files.fail(name, f"lists {file}, which another rank's manifest lists too")
                self._owner[file] = part
                self._paths[file] = self._files.sized(file, size, exact=True)
                total += size
        if total != commit.bytes:
            self._files.fail(COMMIT, f"counts {commit.bytes} bytes of shard files, the part manifests {total}")
        if METADATA not in commit.files:
            self._files.fail(COMMIT, f"doesn't list {METADATA}")
        for name, file_entry in commit.files.items():
            if name == METADATA:
                data = self._files.vouched(name, file_entry)
                self.metadata = load_metadata(data, path=os.path.join(self.path, name), step=self.step)
            else:
                self._files.sized(name, file_entry.bytes, exact=True)

    def _open_stock(self) -> None:
        if os.path.isdir(os.path.join(self.path, PART_DIRECTORY)):
            raise NotCommittedError(
                f"{COMMIT} is missing: this save never reached its commit, or was damaged",
                step=self.step,
                path=self.path,
                phase="restore",
                hint="restore an older step",
            )
        for name, size in self.load_stock_metadata().items():
            self._files.sized(name, size, exact=False)

    def load_stock_metadata(self) -> dict[str, int]:
        """Opens a stock checkpoint without a look at its files.

        Returns:
            The files, and how long each has to be at least.
        """
        if not self._files.exists(METADATA):
            raise NotCommittedError(
                f"neither {COMMIT} nor {METADATA} is there: no save was completed in this directory",
                step=self.step,
                path=self.path,
                phase=self._files.phase,
            )
        self.metadata = load_metadata(self._files.read(METADATA), path=self._files.full(METADATA), step=self.step)
        needed: dict[str, int] = {}
        for index, place in self.metadata.storage_data.items():
            name, offset, length = (getattr(place, field, None) for field in ("relative_path", "offset", "length"))
            if not (
                isinstance(index, MetadataIndex)
                and isinstance(name, str)
                and type(offset) is int
                and type(length) is int
                and min(offset, length) >= 0
            ):
                self._files.fail(METADATA, f"has no place for {getattr(index, 'fqn', index)!r}: {place!r}")
            needed[name] = max(needed.get(name, 0), offset + length)
        return needed

    def _stock_record(self, index: MetadataIndex, path: str, place: Any) -> RecordInfo:
        entry = self.metadata.state_dict_metadata.get(index.fqn)
        transforms = tuple(getattr(place, "transform_descriptors", None) or ())
        if not isinstance(entry, TensorStorageMetadata):
            where = (index.fqn, path, place.offset, place.length, None, None, None)
            return RecordInfo(*where, "bytes", None, None, None, transforms)
        chunks = self._chunks.get(index.fqn)
        if chunks is None:
            chunks = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
            self._chunks[index.fqn] = chunks
        offsets = (0,) * len(entry.size) if index.offset is None else tuple(index.offset)
        shape = chunks.get(offsets)
        if shape is None:
            self._files.fail(METADATA, f"has no chunk of {index.fqn!r} at {list(offsets)}", tensor=index.fqn)
        where = (index.fqn, path, place.offset, place.length, None, None, None)
        return RecordInfo(*where, "tensor", entry.properties.dtype, shape, offsets, transforms)

    def _file_list(self, data: bytes, path: str) -> dict[str, int]:
        """The files that a part manifest lists, without its items: they are many, and a rank needs few of them."""
        try:
            head = json.loads(data[: data.index(b',"items":')] + b"}")
            return {str(file["name"]): int(file["bytes"]) for file in head["files"]}
        except (ValueError, KeyError, TypeError):  # not in the order that this version writes
            return dict(_parse_part(data, path=path, commit=self.commit).files)

    def _items(self, part: _Part) -> dict[tuple[str, int], PartItem]:
        if part.items is None:
            manifest = self._parse(part)
            names = [file.name for file in manifest.files]
            part.items = {(names[item.file], item.offset): item for item in manifest.items}
        return part.items

    def _parse(self, part: _Part) -> PartManifest:
        return _parse_part(self._files.read(f"{PART_DIRECTORY}/{part.entry.name}"), path=part.path, commit=self.commit)
