"""The item columns of a part manifest, checked: types, lengths, and that the items can lie in the files as they say.

A reader that seeks to an offset, or allocates for a shape, may trust columns that passed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ckpt_engine.commit.checked_json import JsonReader, all_natural

#: Names of the columns, in the order in which they are written.
COLUMNS = ("fqn", "chunk", "kind", "dtype", "shape", "file", "offset", "length", "payload", "nbytes")

_MAX_DIMS = 64  # what a tensor can have; bounds the work that a lying shape can cause
_ITEM_BYTES = {str(value): value.itemsize for value in vars(torch).values() if isinstance(value, torch.dtype)}


def read_columns(reader: JsonReader, items: dict[str, Any]) -> dict[str, list[Any]]:
    """The item columns in the order of :data:`COLUMNS`, each of the right type and all of one length."""
    columns: dict[str, list[Any]] = {name: reader.want(items, name, list) for name in COLUMNS}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        reader.fail(f"item columns have different lengths: {lengths}")
    allowed: dict[str, set[type]] = {"fqn": {str}, "kind": {str}, "dtype": {str, type(None)}}
    allowed |= {"chunk": {list, type(None)}, "shape": {list, type(None)}}
    for name, column in columns.items():
        if name not in allowed:
            if not all_natural(column):
                reader.fail(f"items.{name} holds something that is no whole number in 0 ... 2**63-1")
        elif wrong := set(map(type, column)) - allowed[name]:
            reader.fail(f"items.{name} holds a {min(kind.__name__ for kind in wrong)}")
    for name in ("chunk", "shape"):
        lists = [value for value in columns[name] if value is not None]
        if not all_natural(list(chain.from_iterable(lists))) or max(map(len, lists), default=0) > _MAX_DIMS:
            reader.fail(f"items.{name} holds something that is no list of sizes")
    return columns


def check_places(reader: JsonReader, files: Sequence[tuple[str, int]], columns: Mapping[str, list[Any]]) -> list[int]:
    """Checks that each item lies in its file, after the one before it; returns where the bytes of each end."""
    ends: list[int] = []
    last: dict[int, tuple[int, int]] = {}  # file -> (number of its latest item, where that one's record ends)
    rows = zip(*columns.values(), strict=True)
    for number, (fqn, chunk, kind, dtype, shape, file, offset, length, payload, nbytes) in enumerate(rows):
        wrong = ""
        if file >= len(files):
            reader.fail(f"items[{number}] lies in file {file} of {len(files)}", tensor=fqn)
        name, size = files[file]
        before, free = last.get(file, (None, 0))
        if before is not None:
            ends[before] = offset
        if offset < free or (before is None and offset != 0):
            wrong = f"starts at {offset} of {name}, expected {free}{'' if before is None else ' or later'}"
        elif offset + length > size:
            wrong = f"ends at {offset + length} of {name}, which has {size} bytes"
        elif payload < offset or payload + nbytes > offset + length:
            wrong = f"has its payload at {payload}+{nbytes}, outside its record {offset}+{length}"
        elif kind == "bytes":
            if (chunk, dtype, shape, payload, nbytes) != (None, None, None, offset, length):
                wrong = "is of kind 'bytes' but described as a tensor"
        elif kind != "tensor" or dtype is None or shape is None:
            wrong = f"is of kind {kind[:40]!r} with dtype {str(dtype)[:40]!r} and shape {shape}"
        elif not _fits(dtype, math.prod(shape), nbytes):
            wrong = f"has {nbytes} bytes, which can't be a {dtype[:40]} of shape {shape}"
        if wrong:
            reader.fail(f"items[{number}] {wrong}", tensor=fqn)
        last[file] = (number, offset + length)
        ends.append(size)
    for index, (name, size) in enumerate(files):
        if size and index not in last:
            reader.fail(f"{name} has {size} bytes that belong to no item")
    return ends


def _fits(dtype: str, count: int, nbytes: int) -> bool:
    known = _ITEM_BYTES.get(dtype)
    if known is not None:
        return nbytes == count * known
    return nbytes == 0 if count == 0 else nbytes > 0 and nbytes % count == 0  # a dtype that this torch doesn't have
