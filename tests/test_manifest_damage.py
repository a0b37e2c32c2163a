"""Promises of the records about damage: any bytes give a consistent record, or an error that names the file."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.commit.manifest import compose_commit, parse_commit, parse_part
from ckpt_engine.errors import CheckpointError, CorruptionError
from tests.manifests import COMMIT_PATH, PART_PATH, assert_names, put, sample_commit, sample_part, seal

pytestmark = pytest.mark.timeout(60)


def test_any_flipped_bit_of_the_commit_record_is_found() -> None:
    good = compose_commit(sample_commit())
    assert b"\\u00e9" in good  # a flip that turns it into \u00E9 reads as the same text
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            with pytest.raises(CorruptionError) as caught:
                parse_commit(bytes(bad), path=COMMIT_PATH)
            assert_names(caught.value, COMMIT_PATH)


def test_any_flipped_byte_of_a_part_manifest_is_found_against_the_commit_record() -> None:
    good = sample_part()
    commit = sample_commit(good)
    assert parse_part(good, path=PART_PATH, commit=commit).step == 100
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        with pytest.raises(CorruptionError) as caught:
            parse_part(bytes(bad), path=PART_PATH, commit=commit)
        assert_names(caught.value, PART_PATH)


def test_a_flipped_byte_of_a_part_manifest_never_raises_anything_else() -> None:
    good = sample_part()
    for position in range(len(good)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            bad = bytearray(good)
            bad[position] ^= mask
            try:
                parse_part(bytes(bad), path=PART_PATH)
            except CheckpointError as error:
                assert_names(error, PART_PATH)


@pytest.mark.parametrize("kind", ["part", "commit"])
def test_every_truncation_is_found(kind: str) -> None:
    good = sample_part() if kind == "part" else compose_commit(sample_commit())
    for length in range(len(good)):
        with pytest.raises(CorruptionError):
            if kind == "part":
                parse_part(good[:length], path=PART_PATH)
            else:
                parse_commit(good[:length], path=COMMIT_PATH)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_another_encoding_of_a_good_record_is_damage(encoding: str) -> None:
    """Python's JSON reader guesses encodings; bytes that nobody wrote would parse."""
    good = sample_part()
    with pytest.raises(CorruptionError):
        parse_part(good.decode().encode(encoding), path=PART_PATH)


def test_bytes_after_the_end_are_found() -> None:
    for rest in (b"\n", b" ", b"\0", b"{}"):
        with pytest.raises(CorruptionError):
            parse_commit(compose_commit(sample_commit()) + rest, path=COMMIT_PATH)


GARBAGE = [
    b"",
    b"\0" * 4096,
    b"\xff\xfe{\x00}\x00",
    b"null",
    b"[]",
    b"{}",
    b"3",
    b'"text"',
    b"[" * 100_000,
    b'{"record":' * 50_000,
    b"1" * 100_000,
    b"NaN",
    b'{"format":NaN}',
    b'{"format":1e999,"kind":"part"}',
    b'{"format":-Infinity}',
    b'{"format":1,"format":1}',
    '{"format":1,"kind":"pärt"}'.encode(),
    json.dumps({"format": 1, "kind": "part"}).encode("utf-16"),
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_corruption_and_never_another_error(data: bytes) -> None:
    with pytest.raises(CorruptionError) as caught:
        parse_part(data, path=PART_PATH)
    assert_names(caught.value, PART_PATH)
    with pytest.raises(CorruptionError) as caught:
        parse_commit(data, path=COMMIT_PATH)
    assert_names(caught.value, COMMIT_PATH)
    assert len(str(caught.value)) < 2000


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_random_bytes_are_corruption(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        parse_part(data, path=PART_PATH)
    with pytest.raises(CorruptionError):
        parse_commit(data, path=COMMIT_PATH)


# -- lies: well-formed, and sealed with a matching digest ------------------------------------------------------------


# Tensor a.weight lies at 0+224 with its payload at 64+60, b at 252+168, blob "step" at 448+700; c at 0+196 of file 1.
PART_LIES: list[tuple[tuple[str | int, ...], Any]] = [
    (("format",), 0),
    (("format",), "1"),
    (("format",), True),
    (("kind",), "commit"),
    (("save_id",), "../../etc"),
    (("save_id",), ""),
    (("step",), -1),
    (("step",), 1.0),
    (("step",), 2**63),
    (("step",), 10**4000),
    (("step",), True),
    (("rank",), 2),
    (("world_size",), 0),
    (("checksum",), "md5"),
    (("checksum",), None),
    (("checksum",), KeyError),
    (("files",), {}),
    (("files",), []),
    (("files", 0), None),
    (("files", 0, "name"), "../__0_0.distcp"),
    (("files", 0, "name"), ".."),
    (("files", 0, "name"), "a/b"),
    (("files", 0, "name"), ""),
    (("files", 0, "name"), "a\0b"),
    (("files", 0, "name"), "__0_1.distcp"),
    (("files", 0, "bytes"), 1147),
    (("files", 0, "bytes"), -1),
    (("files", 0, "bytes"), 10**30),
    (("items",), []),
    (("items", "fqn"), KeyError),
    (("items", "fqn", 0), 7),
    (("items", "fqn"), ["a.weight"]),
    (("items", "chunk", 0), [-1, 0]),
    (("items", "chunk", 0), [0.0, 0]),
    (("items", "chunk", 0), [0] * 65),
    (("items", "chunk", 0), "ab"),
    (("items", "kind", 0), "bytes"),
    (("items", "kind", 0), "object"),
    (("items", "kind", 3), "tensor"),
    (("items", "dtype", 0), None),
    (("items", "dtype", 0), "torch.float64"),
    (("items", "dtype", 0), 3),
    (("items", "shape", 0), None),
    (("items", "shape", 0), [3, 6]),
    (("items", "shape", 0), [3, -5]),
    (("items", "shape", 0), [3, True, 5]),
    (("items", "shape", 0), [2**62, 2**62]),
    (("items", "shape", 0), [2**62] * 64),
    (("items", "file", 0), 2),
    (("items", "file", 0), -1),
    (("items", "file", 0), 1),
    (("items", "offset", 0), 1),
    (("items", "offset", 0), -1),
    (("items", "offset", 1), 223),
    (("items", "offset", 1), 0),
    (("items", "offset", 2), 2**62),
    (("items", "offset", 1), float("nan")),
    (("items", "length", 0), 253),
    (("items", "length", 0), 10**25),
    (("items", "payload", 0), 250),
    (("items", "payload", 1), 64),
    (("items", "nbytes", 0), 64),
    (("items", "nbytes", 0), -60),
    (("items", "nbytes", 3), 699),
    (("crc32",), "00"),
    (("crc32",), "0000000A" * 4),
    (("crc32",), "00 00 00" * 4),
    (("crc32",), 5),
    (("frame_crc32",), ""),
]


@pytest.mark.parametrize(
    ("where", "value"), PART_LIES, ids=[f"{'.'.join(map(str, p))}={str(v)[:20]}" for p, v in PART_LIES]
)
def test_a_lying_part_manifest_is_refused(where: tuple[str | int, ...], value: Any) -> None:
    document = json.loads(sample_part())
    parse_part(json.dumps(document).encode(), path=PART_PATH)  # it is the lie that is refused
    with pytest.raises(CorruptionError) as caught:
        parse_part(dumps(put(document, where, value)), path=PART_PATH)
    assert_names(caught.value, PART_PATH)
    assert len(str(caught.value)) < 2000


def dumps(document: Any) -> bytes:
    limit = sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else None
    try:
        if limit is not None:
            sys.set_int_max_str_digits(0)
        return json.dumps(document).encode()
    finally:
        if limit is not None:
            sys.set_int_max_str_digits(limit)


def test_an_item_of_a_damaged_manifest_is_named() -> None:
    document = put(json.loads(sample_part()), ("items", "offset", 1), 100)
    with pytest.raises(CorruptionError, match=r"starts at 100 of __0_0\.distcp, expected 224 or later") as caught:
        parse_part(json.dumps(document).encode(), path=PART_PATH)
    assert caught.value.tensor == "b"


COMMIT_LIES: list[tuple[tuple[str | int, ...], Any]] = [
    (("kind",), "part"),
    (("format",), 0),
    (("step",), -5),
    (("step",), None),
    (("step",), 2.5),
    (("save_id",), "a/b"),
    (("world_size",), 3),
    (("world_size",), 0),
    (("world_size",), 2**80),
    (("bytes",), -1),
    (("bytes",), KeyError),
    (("created",), 5),
    (("engine",), None),
    (("checksum",), "crc64"),
    (("parts",), []),
    (("parts", 0), []),
    (("parts", 0, "rank"), 1),
    (("parts", 0, "name"), "../rank-00000.json"),
    (("parts", 0, "name"), "rank-00001.json"),
    (("parts", 0, "bytes"), 1e3),
    (("parts", 0, "sha256"), "0" * 63),
    (("parts", 0, "sha256"), "G" * 64),
    (("files",), []),
    (("files", "../../passwd"), {"bytes": 1, "sha256": "0" * 64}),
    (("files", ".."), {"bytes": 1, "sha256": "0" * 64}),
    (("files", ".metadata"), 3),
    (("files", ".metadata", "bytes"), -1),
    (("structure",), None),
    (("structure", "int_keys"), [1]),
    (("structure", "int_keys"), "ab"),
    (("structure", "digest"), None),
    (("structure", "empty"), None),
    (("structure", "empty"), "ab"),
    (("structure", "empty"), {}),
    (("structure", "empty", 0), "optim.state"),
    (("structure", "empty", 0), None),
    (("structure", "empty", 0, 2), True),
    (("structure", "empty", 0, 2), 0.0),
    (("structure", "empty", 0, 2), None),
    (("structure", "empty", 1, 0), ["é"]),
    (("generation",), -1),
    (("generation",), None),
    (("generation",), True),
    (("generation",), 7.0),
    (("generation",), "7"),
    (("generation",), 2**63),
    (("generation",), [7]),
]


@pytest.mark.parametrize(
    ("where", "value"), COMMIT_LIES, ids=[f"{'.'.join(map(str, p))}={str(v)[:20]}" for p, v in COMMIT_LIES]
)
def test_a_lying_commit_record_is_refused_even_with_a_matching_digest(where: tuple[str | int, ...], value: Any) -> None:
    record = json.loads(compose_commit(sample_commit()))["record"]
    parse_commit(seal(record), path=COMMIT_PATH)  # it is the lie that is refused
    with pytest.raises(CorruptionError) as caught:
        parse_commit(seal(put(record, where, value)), path=COMMIT_PATH)
    assert_names(caught.value, COMMIT_PATH)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


def places(document: Any, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [prefix] if prefix else []
    keys: Any = (
        document.keys() if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    )
    for key in keys:
        found += places(document[key], (*prefix, key))
    return found


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_value_anywhere_is_read_or_refused_and_never_another_error(data: st.DataObject) -> None:
    part = json.loads(sample_part())
    changed = put(part, data.draw(st.sampled_from(places(part))), data.draw(json_values))
    try:
        parse_part(json.dumps(changed).encode(), path=PART_PATH)
    except CheckpointError as error:
        assert_names(error, PART_PATH)
    record = json.loads(compose_commit(sample_commit()))["record"]
    changed = put(record, data.draw(st.sampled_from(places(record))), data.draw(json_values))
    try:
        parse_commit(seal(changed), path=COMMIT_PATH)
    except CheckpointError as error:
        assert_names(error, COMMIT_PATH)
