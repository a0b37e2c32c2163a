"""The two JSON records that make a directory a checkpoint: one part manifest per rank, one commit record.

::

    iter_0000100/
      __0_0.distcp  __0_1.distcp  __1_0.distcp ...   shard files
      ckpt_engine/
        rank-00000.json  rank-00001.json ...         part manifests, one per rank
        commit.json                                  the commit record, written last

    part manifest                                    commit record
    {"format": 1, "kind": "part",                    {"record": {"format": 1, "kind": "commit",
     "save_id": "9f..", "step": 100,                    "step": 100, "save_id": "9f..", "world_size": 2,
     "rank": 0, "world_size": 2,                        "bytes": 8192, "created": "2026-..", "engine": "0.1.0",
     "checksum": "crc32" | null,                        "checksum": "crc32" | null,
     "files": [{"name": "__0_0.distcp",                 "generation": 7,
                "bytes": 4096}, ...],                   "parts": [{"rank": 0, "name": "rank-00000.json",
     "items": {"fqn": [..], "chunk": [..], ...},                    "bytes": 700, "sha256": "4c.."}, ...],
     "crc32": "8 hex digits per item",                  "files": {".metadata": {"bytes": 90, "sha256": ".."}},
     "frame_crc32": "8 hex digits per item"}            "structure": {"int_keys": [..], "empty": [..], "digest": ".."}},
                                                      "sha256": "of the record, as it stands between the braces"}

    an item in its shard file
    ... | header | payload ........ | tail | padding | next item ...
        ^ offset ^ payload          ^ + nbytes       ^ end (the next item, or the end of the file)
        |<------------ length ------------->|
    crc32 covers the payload; frame_crc32 covers [offset, payload) and [payload + nbytes, end).

Items of one file stand in offset order, the first at 0, so that every byte of every shard file is under one of the two
sums. A pickled value (kind "bytes") is all payload: ``payload == offset`` and ``nbytes == length``. With ``"checksum":
null`` the two hex strings are empty.

Promises: the commit record vouches for each part manifest by SHA-256 and for itself by its own, so one flipped byte
anywhere is found. Whatever bytes the ``parse_*`` functions are given, they return a record that is consistent in itself
or raise :class:`CorruptionError` naming the file; a newer format raises a :class:`CheckpointError` that says "upgrade".
Unknown keys are let through: a later engine may add some without breaking this one. All formats, future ones too, keep
the outer ``{"record", "sha256"}`` of the commit record, so that damage and news can be told apart.

Not here: reading or writing files, and comparing the records with the files that they list.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_engine.commit.checked_json import JsonReader
from ckpt_engine.commit.items import COLUMNS, check_places, read_columns

FORMAT = 1
CHECKSUM = "crc32"
COMMIT_NAME = "commit.json"

_SLICE = 4096  # values encoded in one go: the interpreter can hand the GIL to the trainer in between
_COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_SORTED = json.JSONEncoder(separators=(",", ":"), allow_nan=False, sort_keys=True).encode


class FileEntry(NamedTuple):
    """Size and SHA-256 of a small file next to the shard files."""

    bytes: int
    sha256: str


class PartEntry(NamedTuple):
    """What the commit record says of a rank's part manifest."""

    rank: int
    name: str
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class CommitRecord:
    """The content of ``commit.json``.

    Attributes:
        bytes: size of all shard files of all ranks.
        created: time of the commit, ISO 8601, UTC.
        engine: version that wrote it.
        checksum: ``"crc32"``, or ``None`` for a checkpoint saved without.
        parts: one entry per rank, in rank order.
        files: the other files of the checkpoint by name (``.metadata``, ``train_state.pt``).
        int_keys: prefixes of mappings with int keys.
        empty: paths of empty mappings, which flat keys can't express (dict keys as str, list positions as int).
        structure_digest: equal for equal names, shapes and dtypes.
        generation: counts the commits of a directory, from 1; 0 where nobody counted (older records). After a rollback
            it tells the live branch from the abandoned one, whose step numbers are higher.
    """

    step: int
    save_id: str
    world_size: int
    bytes: int
    created: str
    engine: str
    checksum: str | None
    parts: tuple[PartEntry, ...]
    files: Mapping[str, FileEntry]
    int_keys: tuple[str, ...] = ()
    structure_digest: str = ""
    empty: tuple[tuple[str | int, ...], ...] = ()
    generation: int = 0


class PartFile(NamedTuple):
    """A shard file of a rank."""

    name: str
    bytes: int


class PartItem(NamedTuple):
    """A tensor chunk or pickled value in a shard file. The module docstring draws the offsets.

    Attributes:
        kind: ``"tensor"`` or ``"bytes"``; ``dtype`` and ``shape`` are ``None`` for the latter.
        chunk: where the chunk lies in the global tensor, or ``None``.
        file: index into the part's ``files``.
        end: where the bytes that belong to this item end.
        crc32, frame_crc32: ``None`` in a checkpoint without checksums.
    """

    fqn: str
    chunk: tuple[int, ...] | None
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    file: int
    offset: int
    length: int
    payload: int
    nbytes: int
    end: int
    crc32: int | None
    frame_crc32: int | None


@dataclasses.dataclass(frozen=True)
class PartManifest:
    """The content of a part manifest."""

    save_id: str
    step: int
    rank: int
    world_size: int
    checksum: str | None
    files: tuple[PartFile, ...]
    items: tuple[PartItem, ...]


def part_name(rank: int) -> str:
    """File name of a rank's part manifest."""
    return f"rank-{rank:05d}.json"


# -- part manifest: writing --------------------------------------------------------------------------------------------


class PartStatic:
    """What repeats in a part manifest while the structure is unchanged: everything about the tensors but their CRCs.

    Encoded at the first :func:`compose_part`, on the thread that runs it; the columns are dropped then and only the
    text is kept, so the caller must not change them any more.

    Args:
        checksum: whether CRCs will be given.
        file_names: the rank's shard files.
        fqn, chunk, dtype, shape, file, offset, length, payload, nbytes: one value per tensor; for the tensors of one
            file, in offset order. ``chunk`` is the offset in the global tensor or ``None``, ``file`` an index into
            ``file_names``.
    """

    def __init__(
        self,
        *,
        rank: int,
        checksum: bool,
        file_names: Sequence[str],
        fqn: Sequence[str],
        chunk: Sequence[Sequence[int] | None],
        dtype: Sequence[str],
        shape: Sequence[Sequence[int]],
        file: Sequence[int],
        offset: Sequence[int],
        length: Sequence[int],
        payload: Sequence[int],
        nbytes: Sequence[int],
    ) -> None:
        columns: tuple[Sequence[Any], ...]
        columns = (fqn, chunk, ["tensor"] * len(fqn), dtype, shape, file, offset, length, payload, nbytes)
        lengths = {name: len(column) for name, column in zip(COLUMNS, columns, strict=True)}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"columns of a part manifest have different lengths: {lengths}")
        self.rank = rank
        self.checksum = checksum
        self.file_names = tuple(file_names)
        self.count = len(fqn)
        self._columns: tuple[Sequence[Any], ...] | None = columns
        self._texts: tuple[bytes, ...] = ()
        self._lock = threading.Lock()  # two saves may reach their commit at once

    def texts(self) -> tuple[bytes, ...]:
        """Each column as JSON text, without the brackets."""
        with self._lock:
            if self._columns is not None:
                self._texts = tuple(_inner(column) for column in self._columns)
                self._columns = None
            return self._texts


def compose_part(
    static: PartStatic,
    *,
    save_id: str,
    step: int,
    world_size: int,
    file_bytes: Sequence[int],
    crcs: array.array[int] | bytes,
    frame_crcs: array.array[int] | bytes,
    blobs: Sequence[tuple[str, int, int, int]] = (),
    blob_crcs: array.array[int] | bytes = b"",
    blob_frame_crcs: array.array[int] | bytes = b"",
) -> bytes:
    """The content of a part manifest. No Python per tensor from the second call on; it runs next to a trainer.

    Args:
        file_bytes: size of each file of ``static``.
        crcs, frame_crcs: per tensor, unsigned 32-bit integers in the machine's byte order. Ignored without checksums.
        blobs: (fqn, file, offset, length) of each pickled value; they come after the tensors of their file.
        blob_crcs, blob_frame_crcs: the same for the blobs.
    """
    if len(file_bytes) != len(static.file_names):
        raise ValueError(f"{len(file_bytes)} file sizes given for {len(static.file_names)} files")
    files = [{"name": name, "bytes": size} for name, size in zip(static.file_names, file_bytes, strict=True)]
    head = {
        "format": FORMAT,
        "kind": "part",
        "save_id": save_id,
        "step": step,
        "rank": static.rank,
        "world_size": world_size,
        "checksum": CHECKSUM if static.checksum else None,
        "files": files,
    }
    pieces = [_COMPACT(head).encode()[:-1], b',"items":{']
    count = len(blobs)
    names, holders, offsets, lengths = zip(*blobs, strict=True) if blobs else ((), (), (), ())
    none = [None] * count
    extra: tuple[Sequence[Any], ...]
    extra = (names, none, ["bytes"] * count, none, none, holders, offsets, lengths, offsets, lengths)
    separator = b""
    for name, text, column in zip(COLUMNS, static.texts(), extra, strict=True):
        more = _inner(column)
        pieces += (separator, b'"', name.encode(), b'":[', text, b"," if text and more else b"", more, b"]")
        separator = b","
    pieces.append(b'},"crc32":"')
    if static.checksum:
        pieces += (_crc_text(crcs, static.count), _crc_text(blob_crcs, count))
    pieces.append(b'","frame_crc32":"')
    if static.checksum:
        pieces += (_crc_text(frame_crcs, static.count), _crc_text(blob_frame_crcs, count))
    pieces.append(b'"}')
    return b"".join(pieces)


def _inner(column: Sequence[Any]) -> bytes:
    texts = [_COMPACT(list(column[start : start + _SLICE]))[1:-1] for start in range(0, len(column), _SLICE)]
    return ",".join(texts).encode()


def _crc_text(crcs: array.array[int] | bytes, count: int) -> bytes:
    words = array.array("I")
    words.frombytes(memoryview(crcs).cast("B"))
    if len(words) != count:
        raise ValueError(f"{len(words)} CRCs given for {count} items")
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes().hex().encode()


# -- commit record: writing --------------------------------------------------------------------------------------------


def compose_commit(record: CommitRecord) -> bytes:
    """The content of ``commit.json``.

    Raises:
        CorruptionError: :func:`parse_commit` would refuse it. Better now than at the restore.
    """
    fields = {
        "format": FORMAT,
        "kind": "commit",
        "step": record.step,
        "save_id": record.save_id,
        "world_size": record.world_size,
        "bytes": record.bytes,
        "created": record.created,
        "engine": record.engine,
        "checksum": record.checksum,
        "generation": record.generation,
        "parts": [entry._asdict() for entry in record.parts],
        "files": {name: entry._asdict() for name, entry in record.files.items()},
        "structure": {
            "int_keys": list(record.int_keys),
            "empty": [list(path) for path in record.empty],
            "digest": record.structure_digest,
        },
    }
    data = _envelope(fields)
    parse_commit(data, path=COMMIT_NAME)
    return data


def _envelope(record: Any) -> bytes:
    text = _SORTED(record)
    return f'{{"record":{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}'.encode()


# -- reading -----------------------------------------------------------------------------------------------------------


def parse_commit(data: bytes, *, path: str) -> CommitRecord:
    """The commit record in ``data``.

    Args:
        path: where it was read, for the errors.

    Raises:
        CorruptionError: this isn't what :func:`compose_commit` wrote.
        CheckpointError: a newer engine wrote it.
    """
    reader = JsonReader(path)
    outer = reader.load(data)
    record = reader.want(outer, "record", dict)
    found = reader.want(outer, "sha256", str)
    # Compared as text, not as parsed: JSON has several spellings of one value, and a flip may turn one into another.
    try:
        expected = _envelope(record)
    except (ValueError, RecursionError) as error:
        reader.fail(f"the record can't be encoded again ({type(error).__name__})")
    if data != expected:
        actual = hashlib.sha256(_SORTED(record).encode()).hexdigest()
        reader.fail(f"SHA-256 of the record is {actual}, the file says {found[:64]!r}")
    reader.check_kind(record, "commit", FORMAT)
    world_size = reader.natural(record, "world_size", low=1)
    structure = reader.want(record, "structure", dict)
    int_keys = reader.want(structure, "int_keys", list)
    if not all(type(key) is str for key in int_keys):
        reader.fail("structure.int_keys holds something that is not a string")
    empty = reader.want(structure, "empty", list) if "empty" in structure else []  # as in the first records
    if not all(type(path) is list and all(type(part) in (str, int) for part in path) for path in empty):
        reader.fail("structure.empty holds something that is not a path")
    parts = [_part_entry(reader, entry, rank) for rank, entry in enumerate(reader.want(record, "parts", list))]
    if len(parts) != world_size:
        reader.fail(f"it lists {len(parts)} parts for {world_size} ranks")
    files = {}
    for name, entry in reader.want(record, "files", dict).items():
        reader.check_name(name)
        files[name] = FileEntry(reader.natural(entry, "bytes"), reader.digest(entry, "sha256"))
    return CommitRecord(
        step=reader.natural(record, "step"),
        save_id=reader.save_id(record),
        world_size=world_size,
        bytes=reader.natural(record, "bytes"),
        created=reader.want(record, "created", str),
        engine=reader.want(record, "engine", str),
        checksum=reader.one_of(record, "checksum", CHECKSUM),
        parts=tuple(parts),
        files=files,
        int_keys=tuple(int_keys),
        empty=tuple(map(tuple, empty)),
        structure_digest=reader.want(structure, "digest", str),
        generation=reader.natural(record, "generation") if "generation" in record else 0,
    )


def _part_entry(reader: JsonReader, entry: Any, rank: int) -> PartEntry:
    name = reader.want(entry, "name", str)
    rank_found, size = reader.natural(entry, "rank"), reader.natural(entry, "bytes")
    if (rank_found, name) != (rank, part_name(rank)):
        reader.fail(f"part {rank} is rank {rank_found} in {name[:80]!r}, expected {part_name(rank)!r}")
    return PartEntry(rank, name, size, reader.digest(entry, "sha256"))


def parse_part(data: bytes, *, path: str, commit: CommitRecord | None = None) -> PartManifest:
    """The part manifest in ``data``.

    Args:
        path: where it was read; with ``commit``, its last component says which part it has to be.
        commit: the commit record that vouches for it. Without it, damage that leaves a consistent manifest goes unseen.

    Raises:
        CorruptionError: the commit record doesn't vouch for these bytes, or they are no consistent manifest.
        CheckpointError: a newer engine wrote it.
    """
    reader = JsonReader(path)
    if commit is not None:
        _check_vouched(data, commit, reader)
    root = reader.load(data)
    reader.check_kind(root, "part", FORMAT)
    files = []
    for entry in reader.want(root, "files", list):
        files.append(PartFile(reader.want(entry, "name", str), reader.natural(entry, "bytes")))
        reader.check_name(files[-1].name)
    if len({file.name for file in files}) != len(files):
        reader.fail("a shard file is listed twice")
    checksum = reader.one_of(root, "checksum", CHECKSUM)
    columns = read_columns(reader, reader.want(root, "items", dict))
    count = len(columns["fqn"])
    crcs = reader.crcs(root, "crc32", count, checksum)
    frames = reader.crcs(root, "frame_crc32", count, checksum)
    ends = check_places(reader, files, columns)
    columns["chunk"] = [None if value is None else tuple(value) for value in columns["chunk"]]
    columns["shape"] = [None if value is None else tuple(value) for value in columns["shape"]]
    part = PartManifest(
        save_id=reader.save_id(root),
        step=reader.natural(root, "step"),
        rank=reader.natural(root, "rank"),
        world_size=reader.natural(root, "world_size", low=1),
        checksum=checksum,
        files=tuple(files),
        items=tuple(map(PartItem, *columns.values(), ends, crcs, frames)),
    )
    if part.rank >= part.world_size:
        reader.fail(f"rank is {part.rank}, expected less than the world size {part.world_size}")
    if commit is not None:
        for field in ("save_id", "step", "world_size", "checksum"):
            ours, theirs = getattr(part, field), getattr(commit, field)
            if ours != theirs:
                reader.fail(f"{field} is {ours!r}, the commit record says {theirs!r}")
        if part_name(part.rank) != os.path.basename(path):
            reader.fail(f"it is the manifest of rank {part.rank}")
    return part


def _check_vouched(data: bytes, commit: CommitRecord, reader: JsonReader) -> None:
    entry = next((part for part in commit.parts if part.name == os.path.basename(reader.path)), None)
    if entry is None:
        reader.fail("the commit record does not list it")
    if len(data) != entry.bytes:
        reader.fail(f"it has {len(data)} bytes, the commit record says {entry.bytes}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.sha256:
        reader.fail(f"its SHA-256 is {digest}, the commit record says {entry.sha256}")
