"""Promises of the part manifest and the commit record: what was composed is read back, and composing again is cheap."""

from __future__ import annotations

import array
import dataclasses
import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.commit.manifest import (
    CommitRecord,
    FileEntry,
    PartEntry,
    PartStatic,
    compose_commit,
    compose_part,
    parse_commit,
    parse_part,
    part_name,
)
from ckpt_engine.errors import CheckpointError, CorruptionError
from tests.manifests import (
    COMMIT_PATH,
    MAX,
    PART_PATH,
    Item,
    assert_names,
    blob,
    build,
    sample_commit,
    sample_part,
    seal,
    tensor,
)

pytestmark = pytest.mark.timeout(60)

# -- round trips ------------------------------------------------------------

crc_values = st.integers(0, MAX)
frames = st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(0, 63))
names = st.text(max_size=12)  # keys may hold anything: slashes, dots, quotes, lone surrogates
shapes = st.lists(st.integers(0, 9), max_size=4)
tensors_strategy = st.builds(
    lambda fqn, shape, with_chunk, frame, crc, frame_crc: Item(
        fqn, shape, [7] * len(shape) if with_chunk else None, frame, 0, crc, frame_crc
    ),
    *(names, shapes, st.booleans(), frames, crc_values, crc_values),
)
blobs_strategy = st.builds(blob, names, st.integers(1, 5000), crc=crc_values, frame_crc=crc_values)


@given(st.lists(st.lists(st.one_of(tensors_strategy, blobs_strategy), max_size=5), max_size=4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_part_manifest_comes_back_as_it_was_composed(files: list[list[Item]], checksum: bool) -> None:
    data, expected, sizes = build(files, checksum=checksum)
    part = parse_part(data, path=PART_PATH)
    assert [item._asdict() for item in part.items] == expected
    assert [file.bytes for file in part.files] == sizes
    assert (part.save_id, part.step, part.rank, part.world_size) == ("9f3a", 100, 0, 2)
    assert part.checksum == ("crc32" if checksum else None)


entries = st.builds(FileEntry, st.integers(0, 2**63 - 1), st.binary(min_size=32, max_size=32).map(bytes.hex))
plain_names = st.text(min_size=1, max_size=20).filter(lambda n: "/" not in n and "\0" not in n and n not in (".", ".."))


@given(
    step=st.integers(0, 2**63 - 1),
    parts=st.lists(entries, min_size=1, max_size=12),
    files=st.dictionaries(plain_names, entries, max_size=4),
    int_keys=st.lists(st.text(max_size=8), max_size=4),
    text=st.text(max_size=20),
    checksum=st.sampled_from([None, "crc32"]),
    empty=st.lists(st.lists(st.text(max_size=6) | st.integers(0, 99), max_size=4).map(tuple), max_size=4).map(tuple),
    generation=st.integers(0, 2**63 - 1),
)
@settings(max_examples=100, deadline=None)
def test_a_commit_record_comes_back_as_it_was_composed(
    step: int,
    parts: list[FileEntry],
    files: dict[str, FileEntry],
    int_keys: list[str],
    text: str,
    checksum: str | None,
    empty: tuple[tuple[str | int, ...], ...],
    generation: int,
) -> None:
    record = CommitRecord(
        step=step,
        save_id="0" * 32,
        world_size=len(parts),
        bytes=2**62,
        created=text,
        engine=text,
        checksum=checksum,
        parts=tuple(PartEntry(rank, part_name(rank), *entry) for rank, entry in enumerate(parts)),
        files=files,
        int_keys=tuple(int_keys),
        structure_digest=text,
        empty=empty,
        generation=generation,
    )
    assert parse_commit(compose_commit(record), path=COMMIT_PATH) == record


def test_the_crc_columns_are_eight_plain_hex_digits_per_item() -> None:
    document = json.loads(build([[tensor("a", [1], crc=0x1, frame_crc=0xDEADBEEF), blob("b", 9, crc=MAX)]])[0])
    assert document["crc32"] == "00000001ffffffff"
    assert document["frame_crc32"] == "deadbeef00000004"


def test_crcs_may_be_given_as_bytes() -> None:
    static = PartStatic(
        rank=0, checksum=True, file_names=["f"], fqn=["a"], chunk=[None], dtype=["torch.int8"], shape=[[2]],
        file=[0], offset=[0], length=[2], payload=[0], nbytes=[2],
    )  # fmt: skip
    words = array.array("I", [77])
    fields: dict[str, Any] = {"save_id": "1", "step": 1, "world_size": 1, "file_bytes": [2]}
    as_array = compose_part(static, crcs=words, frame_crcs=words, **fields)
    assert compose_part(static, crcs=words.tobytes(), frame_crcs=words.tobytes(), **fields) == as_array
    assert parse_part(as_array, path=PART_PATH).items[0].crc32 == 77


# -- cost ------------------------------------------------------------


def lines_of_second_compose(count: int) -> int:
    static = PartStatic(
        rank=0,
        checksum=True,
        file_names=["f"],
        fqn=[f"layer.{n}" for n in range(count)],
        chunk=[[0]] * count,
        dtype=["torch.int8"] * count,
        shape=[[64]] * count,
        file=[0] * count,
        offset=[64 * n for n in range(count)],
        length=[64] * count,
        payload=[64 * n for n in range(count)],
        nbytes=[64] * count,
    )
    crcs = array.array("I", bytes(4 * count))
    lines = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    def compose() -> bytes:
        return compose_part(
            static, save_id="1", step=1, world_size=1, file_bytes=[64 * count], crcs=crcs, frame_crcs=crcs
        )

    first = compose()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        second = compose()
    finally:
        sys.settrace(before)
    assert first == second
    assert len(parse_part(second, path=PART_PATH).items) == count
    return lines


def test_the_second_compose_runs_no_python_per_tensor() -> None:
    """Invariant 7: it runs on a background thread, where each line of Python takes the GIL from the trainer."""
    few = lines_of_second_compose(10)
    assert few > 0
    assert lines_of_second_compose(20_000) == few


def test_columns_of_different_lengths_are_refused_before_anything_is_written() -> None:
    columns: dict[str, Any] = {"chunk": [], "dtype": [], "shape": [], "file": [], "offset": [], "length": []}
    with pytest.raises(ValueError, match="different lengths"):
        PartStatic(rank=0, checksum=True, file_names=["f"], fqn=["a"], payload=[], nbytes=[], **columns)


def test_a_missing_crc_is_refused_before_anything_is_written() -> None:
    static = PartStatic(
        rank=0, checksum=True, file_names=["f"], fqn=["a"], chunk=[None], dtype=["torch.int8"], shape=[[2]],
        file=[0], offset=[0], length=[2], payload=[0], nbytes=[2],
    )  # fmt: skip
    with pytest.raises(ValueError, match="0 CRCs given for 1 items"):
        compose_part(static, save_id="1", step=1, world_size=1, file_bytes=[2], crcs=b"", frame_crcs=b"\0\0\0\0")
    with pytest.raises(ValueError, match="2 file sizes given for 1 files"):
        compose_part(static, save_id="1", step=1, world_size=1, file_bytes=[2, 3], crcs=b"", frame_crcs=b"")


# -- other promises ------------------------------------------------------------


def test_a_newer_format_is_refused_with_a_word_about_upgrading() -> None:
    part = json.loads(sample_part())
    record = json.loads(compose_commit(sample_commit()))["record"]
    newer = {"format": 2, "kind": "part", "layout": "unknown here"}
    for parse, data, path in (
        (parse_part, json.dumps({**part, "format": 2}).encode(), PART_PATH),
        (parse_part, json.dumps(newer).encode(), PART_PATH),
        (parse_commit, seal({**record, "format": 2}), COMMIT_PATH),
        (parse_commit, seal({**newer, "kind": "commit"}), COMMIT_PATH),
    ):
        with pytest.raises(CheckpointError, match="format 2, newer") as caught:
            parse(data, path=path)
        assert not isinstance(caught.value, CorruptionError)
        assert "upgrade" in str(caught.value)
        assert_names(caught.value, path)


def test_unknown_keys_of_the_same_format_are_let_through() -> None:
    part = {**json.loads(sample_part()), "later": {"a": 1}}
    record = {**json.loads(compose_commit(sample_commit()))["record"], "later": [None]}
    assert parse_part(json.dumps(part).encode(), path=PART_PATH).step == 100
    assert parse_commit(seal(record), path=COMMIT_PATH).step == 100


def test_a_record_from_before_generations_and_empty_mappings_is_read() -> None:
    record = json.loads(compose_commit(sample_commit()))["record"]
    assert (record.pop("generation"), record["structure"].pop("empty")) == (7, [["optim", "state", 0], ["é"]])
    assert parse_commit(seal(record), path=COMMIT_PATH) == dataclasses.replace(sample_commit(), generation=0, empty=())


@pytest.mark.parametrize(
    ("field", "value"), [("save_id", "other"), ("step", 101), ("world_size", 3), ("checksum", None)]
)
def test_a_part_of_another_save_is_refused_even_if_the_commit_record_lists_it(field: str, value: Any) -> None:
    changed: dict[str, Any] = {field: value}
    if field == "checksum":
        changed = {"checksum": False}
    data = build([[tensor("a", [2])]], **changed)[0]
    with pytest.raises(CorruptionError, match=f"{field} is .*the commit record says"):
        parse_part(data, path=PART_PATH, commit=sample_commit(data))


def test_a_part_under_another_ranks_name_is_refused() -> None:
    data = sample_part()
    commit = sample_commit(data)  # lists the same bytes for both ranks
    with pytest.raises(CorruptionError, match="it is the manifest of rank 0"):
        parse_part(data, path=PART_PATH.replace("00000.json", "00001.json"), commit=commit)
    with pytest.raises(CorruptionError, match="does not list it"):
        parse_part(data, path=PART_PATH.replace("00000.json", "00002.json"), commit=commit)


def test_a_commit_record_that_could_not_be_read_back_is_not_composed() -> None:
    with pytest.raises(CorruptionError, match="lists 2 parts for 3 ranks"):
        compose_commit(dataclasses.replace(sample_commit(), world_size=3))
    with pytest.raises(CorruptionError, match="step"):
        compose_commit(dataclasses.replace(sample_commit(), step=-1))
    with pytest.raises(CorruptionError, match="generation"):
        compose_commit(dataclasses.replace(sample_commit(), generation=-1))
    wrong: Any = ((None,),)
    with pytest.raises(CorruptionError, match=r"structure\.empty"):
        compose_commit(dataclasses.replace(sample_commit(), empty=wrong))


def test_part_names_have_five_digits_at_least() -> None:
    assert [part_name(rank) for rank in (0, 99_999, 100_000)] == [
        "rank-00000.json",
        "rank-99999.json",
        "rank-100000.json",
    ]
