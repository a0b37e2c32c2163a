"""Checksums: every backend, the pure-Python combination included, gives the numbers of zlib."""

from __future__ import annotations

import importlib.util
import itertools
import threading
import time
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.storage import checksum

pytestmark = pytest.mark.timeout(60)

BACKENDS = [name for name, module in checksum._MODULES.items() if importlib.util.find_spec(module.split(".")[0])]
BUFFERS = st.binary(max_size=2000)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=50, deadline=None)
@given(data=BUFFERS, value=st.integers(0, 2**32 - 1))
def test_every_backend_computes_the_sums_of_zlib(name: str, data: bytes, value: int) -> None:
    assert checksum._load(name)[0](data, value) == zlib.crc32(data, value)


@pytest.mark.parametrize("name", [*BACKENDS, "pure Python"])
@settings(max_examples=100, deadline=None)
@given(a=BUFFERS, b=BUFFERS)
def test_combining_gives_the_sum_of_both_parts(name: str, a: bytes, b: bytes) -> None:
    combine = checksum._combine if name == "pure Python" else checksum._load(name)[1]
    assert combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@settings(max_examples=100, deadline=None)
@given(a=BUFFERS, b=BUFFERS)
def test_public_functions_agree_with_each_other(a: bytes, b: bytes) -> None:
    assert checksum.crc32(b, checksum.crc32(a)) == checksum.crc32(a + b)
    assert checksum.crc32_combine(checksum.crc32(a), checksum.crc32(b), len(b)) == checksum.crc32(a + b)


@settings(max_examples=100, deadline=None)
@given(crc1=st.integers(0, 2**32 - 1), crc2=st.integers(0, 2**32 - 1), length=st.integers(0, 2**62))
def test_all_combinations_agree_for_lengths_of_any_size(crc1: int, crc2: int, length: int) -> None:
    results = {name: checksum._load(name)[1](crc1, crc2, length) for name in BACKENDS}
    assert set(results.values()) == {checksum._combine(crc1, crc2, length)}, results


def test_pure_combination_of_a_length_above_4_gib() -> None:
    """Zeros: the sum of a long run comes from doubling a short one, checked against a plain computation in between."""
    length, crc = 1 << 20, zlib.crc32(bytes(1 << 20))
    while length < 1 << 33:
        crc, length = checksum._combine(crc, crc, length), length * 2
        if length == 1 << 22:
            assert crc == zlib.crc32(bytes(1 << 22))
    half = checksum.crc32_combine(0, zlib.crc32(bytes(1 << 20)), 1 << 20)
    assert half == zlib.crc32(bytes(1 << 20))
    assert checksum.crc32_combine(crc, zlib.crc32(b"x"), 1) == checksum._combine(crc, zlib.crc32(b"x"), 1)


def test_without_isal_the_next_backend_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(missing: set[str], name: str) -> object:
        if name in missing:
            raise ImportError(name)
        return zlib.crc32, checksum._combine

    order = list(checksum._MODULES)
    assert order == ["isal", "zlib_ng", "zlib"]
    for gone in range(len(order)):
        monkeypatch.setattr(checksum, "_load", lambda name, gone=gone: load(set(order[:gone]), name))
        assert checksum._choose()[0] == order[gone]


def test_backend_in_use_is_the_fastest_installed() -> None:
    assert BACKENDS[0] == checksum.BACKEND


def test_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="-5"):
        checksum.crc32_combine(1, 2, -5)


def test_views_and_arrays_are_taken_as_their_bytes() -> None:
    data = bytes(range(256)) * 8
    assert checksum.crc32(memoryview(data)[16:-16]) == zlib.crc32(data[16:-16])
    assert checksum.crc32(memoryview(data).cast("Q")) == zlib.crc32(data)
    assert checksum.crc32(bytearray(data)) == zlib.crc32(data)


def test_another_thread_runs_while_a_large_buffer_is_summed() -> None:
    """The trainer keeps its GIL: a counter in another thread goes on during one call over 256 MiB."""
    data = bytearray(256 << 20)
    ticks = itertools.count()
    started, stop = threading.Event(), threading.Event()

    def tick() -> None:
        started.set()
        while not stop.is_set():
            next(ticks)
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        started.wait(10)
        most = 0
        for _ in range(20):  # on a busy machine the counter may not get a processor; with the GIL held it never gets on
            before = next(ticks)
            checksum.crc32(data)
            most = max(most, next(ticks) - before - 1)
            if most >= 4:
                break
    finally:
        stop.set()
        thread.join(10)
    assert most >= 4, f"at most {most} ticks during one call"
