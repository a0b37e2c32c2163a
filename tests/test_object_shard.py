"""Promises of the stream that a shard file becomes on its way into an object store (``ckpt_engine.storage.msc``).

The stores here are functions that read the stream as clients do; the real client and a real server are in
:mod:`tests.test_megatron_msc`.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import CommitTimeoutError, ConfigError, StorageError
from ckpt_engine.storage import msc
from ckpt_engine.storage.msc import ObjectShard
from ckpt_engine.storage.writer import FileWriter, Filled, WriteQueue

pytestmark = pytest.mark.timeout(30)

KIB = 1 << 10


class Store:
    """Reads streams in parts; keeps what it got by name."""

    def __init__(self, part: int = 40 * KIB) -> None:
        self.part = part
        self.objects: dict[str, bytes] = {}
        self.removed: list[str] = []

    def shard(self, name: str, size: int, *, upload: Callable[[Any], int] | None = None, **options: Any) -> ObjectShard:
        def whole(stream: Any) -> int:
            stream.seek(0, os.SEEK_END)
            length = stream.tell()
            stream.seek(0)
            got = bytearray()
            while len(got) < length:
                got += stream.read(self.part)
            self.objects[name] = bytes(got)
            return len(got)

        def remove() -> None:
            self.objects.pop(name, None)
            self.removed.append(name)

        settings: dict[str, Any] = {"step": 3, "timeout": 5.0, "cancelled": lambda: False, "room": 1 << 20, **options}
        return ObjectShard(upload or whole, remove, f"msc://s/{name}", size, **settings)


def write_all(shard: ObjectShard, data: bytes, extent: int = 16 * KIB) -> None:
    for offset in range(0, len(data), extent):
        shard.write(memoryview(data)[offset : offset + extent], offset)


def read_forever(stream: Any) -> int:
    """An upload that reads nothing until it is ended."""
    while True:
        stream.read(1)


@pytest.fixture
def stuck() -> Iterator[Callable[[Any], int]]:
    """An upload that neither reads nor ends, until the test does."""
    end = threading.Event()

    def upload(stream: Any) -> int:
        end.wait(20)
        return 0

    yield upload
    end.set()


def test_extents_in_any_order_from_any_thread_arrive_in_file_order() -> None:
    store, data = Store(), os.urandom(300 * KIB + 5)
    shard = store.shard("a", len(data))
    padded = memoryview(data + bytes(4096))  # the last extent is padded, as for O_DIRECT
    offsets = list(range(0, len(data), 16 * KIB))
    with ThreadPoolExecutor(4) as threads:
        for offset in (*offsets[1:4], offsets[0], *offsets[4:]):
            stop = min(offset + 16 * KIB, len(padded))
            threads.submit(shard.write, padded[offset:stop], offset)
    shard.finish()
    assert store.objects == {"a": data}
    assert not shard.direct


def test_small_reads_are_served_too() -> None:
    store, data = Store(part=7), os.urandom(20 * KIB)
    shard = store.shard("a", len(data))
    write_all(shard, data, extent=4096)
    shard.finish()
    assert store.objects["a"] == data


def test_a_write_returns_only_when_its_memory_is_no_longer_needed() -> None:
    """The extent goes back to the pool then, and is filled with something else."""
    store, memory = Store(part=50 * KIB), bytearray(16 * KIB)
    shard = store.shard("a", 10 * len(memory))
    for number in range(10):
        memory[:] = bytes([number]) * len(memory)
        shard.write(memoryview(memory), number * len(memory))
        memory[:] = bytes([255]) * len(memory)
    shard.finish()
    assert store.objects["a"] == b"".join(bytes([number]) * len(memory) for number in range(10))
    memory.clear()  # BufferError if somebody still held a view


def test_files_of_one_save_dont_block_each_other_with_one_writer_and_one_extent_each() -> None:
    """Parts are larger than all the memory there is: a client that waits for a whole part must not wait for ever."""
    store, sizes = Store(part=100 * KIB), {"a": 400 * KIB, "b": 300 * KIB, "c": 20 * KIB}
    extent = 8 * KIB
    free = threading.Semaphore(3)
    shards = {name: store.shard(name, size) for name, size in sizes.items()}
    files = [
        FileWriter(
            lambda name=name: shards[name],  # type: ignore[misc]
            -(-size // extent),
            extent,
            lambda number, view, size=size: min(extent, size - number * extent),  # type: ignore[misc]
        )
        for name, size in sizes.items()
    ]
    queue = WriteQueue(files, on_failure=lambda: None)
    pump = threading.Thread(target=queue.pump)
    pump.start()
    for number in range(50):
        for file in files:
            if number < file.extents:
                assert free.acquire(timeout=10), "no extent came back"
                queue.put(file, number, Filled(memoryview(bytes([number]) * extent), free.release))
    assert queue.done.wait(10)
    pump.join()
    assert queue.failure is None
    assert {name: len(data) for name, data in store.objects.items()} == sizes


@pytest.mark.skipif(not hasattr(sys, "getrefcount"), reason="only CPython tells what a client still holds")
def test_a_client_that_reads_ahead_is_held_back() -> None:
    """B010: boto3 reads ten parts before it has sent the first; here it never holds more than two."""
    part, count = 64 * KIB, 20
    held: list[io.BytesIO] = []
    most = 0
    lock = threading.Lock()

    def upload(stream: Any) -> int:
        nonlocal most
        sent = 0
        with ThreadPoolExecutor(8) as senders:

            def send(body: io.BytesIO) -> None:
                time.sleep(0.01)
                with lock:
                    held.remove(body)
                body.close()

            for _ in range(count):
                body = io.BytesIO(stream.read(part))  # shares the bytes, as s3transfer's does
                sent += part
                with lock:
                    held.append(body)
                    most = max(most, len(held))
                senders.submit(send, body)
                del body
        return sent

    shard = Store().shard("a", part * count, upload=upload, room=part)
    write_all(shard, bytes(part * count))
    shard.finish()
    assert 1 <= most <= 2


def test_a_failing_upload_fails_the_writers_and_the_end() -> None:
    def refused(stream: Any) -> int:
        stream.read(10 * KIB)
        raise PermissionError(13, "not yours")

    shard = Store().shard("a", 100 * KIB, upload=refused)
    for call in (lambda: write_all(shard, bytes(100 * KIB)), shard.finish, shard.finish):
        with pytest.raises(StorageError, match="not yours") as caught:
            call()
        assert caught.value.errno == 13 and caught.value.step == 3 and caught.value.path == "msc://s/a"
        assert caught.value.hint


def test_no_traceback_keeps_the_memory_of_an_extent() -> None:
    def refused(stream: Any) -> int:
        raise RuntimeError("no")

    shard, view = Store().shard("a", 100 * KIB, upload=refused), memoryview(bytearray(16 * KIB))
    errors = []
    for _ in range(3):
        try:
            shard.write(view, 0)
        except StorageError as error:
            errors.append(error)
    assert len(errors) == 3
    gc.disable()
    try:
        view.release()  # BufferError if a part of it is alive in a frame
    finally:
        gc.enable()


def test_an_upload_that_ends_early_or_stores_something_else_is_an_error() -> None:
    def short(stream: Any) -> int:
        stream.read(10)
        return 100

    def other(stream: Any) -> int:
        stream.read()
        return 99

    shard = Store().shard("a", 100, upload=short)
    with pytest.raises(StorageError, match="10 of 100 bytes"):
        shard.write(memoryview(bytes(100)), 0)
        shard.finish()
    shard = Store().shard("a", 100, upload=other)
    shard.write(memoryview(bytes(100)), 0)
    with pytest.raises(StorageError, match="100 of 100 bytes were sent, the store has got 99"):
        shard.finish()


def test_a_client_that_starts_again_is_told_that_the_bytes_are_gone() -> None:
    def again(stream: Any) -> int:
        stream.read(20)
        stream.seek(0)
        stream.read(20)
        return 100

    shard = Store().shard("a", 100, upload=again)
    with pytest.raises(StorageError, match="bytes from 0 on can't be sent again"):
        shard.write(memoryview(bytes(100)), 0)


def test_a_client_that_wants_a_large_file_in_one_piece_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never spooled, never held: the error says what to do."""
    monkeypatch.setattr(msc, "LARGEST_READ", 1000)
    shard = Store().shard("a", 1001, upload=lambda stream: len(stream.read()))
    with pytest.raises(StorageError, match="wants 1001 bytes in one piece, expected at most 1000") as caught:
        shard.write(memoryview(bytes(1001)), 0)
        shard.finish()
    assert "thread_count" in str(caught.value)
    shard = Store().shard("b", 1000, upload=lambda stream: len(stream.read()))
    shard.write(memoryview(bytes(1000)), 0)
    shard.finish()


def test_a_store_that_takes_nothing_ends_the_write_by_its_deadline(stuck: Callable[[Any], int]) -> None:
    shard = Store().shard("a", 100, upload=stuck, timeout=0.3)
    start = time.monotonic()
    with pytest.raises(CommitTimeoutError, match="took no bytes"):
        shard.write(memoryview(bytes(100)), 0)
    assert time.monotonic() - start < 3


def test_a_store_that_never_answers_ends_the_finish_by_its_deadline() -> None:
    end = threading.Event()

    def silent(stream: Any) -> int:
        stream.read()
        end.wait(20)
        return 100

    shard = Store().shard("a", 100, upload=silent, timeout=0.3)
    shard.write(memoryview(bytes(100)), 0)
    with pytest.raises(CommitTimeoutError, match="100 of 100"):
        shard.finish()
    end.set()


def test_a_failure_elsewhere_ends_a_write_that_waits_and_the_upload(stuck: Callable[[Any], int]) -> None:
    failed = threading.Event()
    waiting = Store().shard("a", 100, upload=stuck, cancelled=failed.is_set)
    reading = Store().shard("b", 100, upload=read_forever, cancelled=failed.is_set)
    threading.Timer(0.2, failed.set).start()
    with pytest.raises(StorageError, match="given up"):
        waiting.write(memoryview(bytes(100)), 0)
    reading._thread.join(5)
    assert not reading._thread.is_alive()


def test_giving_up_ends_the_upload_and_removes_what_came_of_it() -> None:
    store = Store()
    shard = store.shard("a", 100 * KIB)
    write_all(shard, bytes(40 * KIB))
    shard.abort()
    shard.abort()
    assert not shard._thread.is_alive()
    assert store.removed == ["a"] and store.objects == {}
    with pytest.raises(StorageError):
        shard.write(memoryview(bytes(100)), 40 * KIB)


def test_giving_up_a_finished_file_removes_it() -> None:
    store = Store()
    shard = store.shard("a", 100)
    shard.write(memoryview(bytes(100)), 0)
    shard.finish()
    assert store.objects
    shard.abort()
    assert store.objects == {} and store.removed == ["a"]


def test_an_upload_that_ends_long_after_it_was_given_up_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msc, "_ABORT_SECONDS", 0.05)
    store, end = Store(), threading.Event()

    def late(stream: Any) -> int:
        end.wait(10)
        store.objects["a"] = b"half"
        return 4

    shard = store.shard("a", 100, upload=late)
    shard.abort()
    assert store.removed == []
    end.set()
    shard._thread.join(5)
    assert store.removed == ["a"] and store.objects == {}


def test_a_repeated_write_of_bytes_that_are_gone_is_refused_at_once() -> None:
    """A writer's retry must not wait for a turn that never comes."""
    shard = Store(part=10).shard("a", 200)
    shard.write(memoryview(bytes(100)), 0)
    with pytest.raises(StorageError, match="can't be sent again"):
        shard.write(memoryview(bytes(100)), 0)
    shard.abort()


# -- URLs ----------------------------------------------------------------------------------------------------------------


def test_all_spellings_of_a_url_are_one() -> None:
    for url in ("msc://p/a/b", "msc:/p/a/b", "msc://p/a//b/", "msc:///p/a/b", str(Path("msc://p/a/b"))):
        assert msc.is_url(url) and msc.normalized(url) == "msc://p/a/b"
    assert not msc.is_url("/data/msc:/x")


def test_a_missing_package_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "multistorageclient", None)
    with pytest.raises(ConfigError, match="pip install multi-storage-client"):
        msc.object_place("msc://p/a")


def test_an_unknown_profile_is_a_configuration_error() -> None:
    pytest.importorskip("multistorageclient")
    with pytest.raises(ConfigError, match="no-such-profile"):
        msc.object_place("msc://no-such-profile/a")
