"""Promises of the agreement between ranks that concern the protocol alone: ranks are threads over a store in memory."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_engine.commit.coordinator import Coordinator, pack_error, unpack_error
from ckpt_engine.commit.store_client import StoreClient
from ckpt_engine.errors import CheckpointError, CommitTimeoutError

pytestmark = pytest.mark.timeout(60)


def joined(payloads: list[bytes]) -> bytes:
    return b",".join(payloads)


def told(action: Any) -> tuple[Any, ...]:
    """What a rank is told: the verdict, or the error and all its fields."""
    try:
        return (action(),)
    except CheckpointError as error:
        return type(error).__name__, error.message, error.__dict__


def thread_ranks(world: int, timeout: float) -> tuple[Any, list[Coordinator]]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return store, [Coordinator(StoreClient(store, world), rank, world, timeout=timeout) for rank in range(world)]


def test_ranks_agree_even_where_deadlines_and_answers_cross() -> None:
    """B035, B041: delays around the deadline; some rounds succeed, some fail, none is seen differently by two ranks."""
    store, ranks = thread_ranks(3, timeout=0.15)
    delays = random.Random(5)
    outcomes: list[list[Any]] = []
    for turn in range(25):
        outcome: list[Any] = [None] * 3
        pauses = [delays.choice((0.0, 0.1, 0.14, 0.15, 0.16, 0.3)) for _ in range(3)]

        def work(rank: int, turn: int = turn, outcome: list[Any] = outcome, pauses: list[float] = pauses) -> None:
            time.sleep(pauses[rank])
            decide = ranks[rank].decide
            outcome[rank] = told(lambda: decide(f"t/{turn}", b"%d" % rank, joined, phase="vote", step=turn))

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcome[0] == outcome[1] == outcome[2], f"delays {pauses}: {outcome}"
        outcomes.append(outcome)
    assert {outcome[0][0] for outcome in outcomes} == {b"0,1,2", "CommitTimeoutError"}
    assert store.num_keys() == 0
    for coordinator in ranks:
        coordinator.close()


def test_an_interrupted_wait_frees_the_coordinator() -> None:
    store, (first, second) = thread_ranks(2, timeout=60)
    begin = time.monotonic()

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    mask = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            first.decide("a", b"0", joined, phase="vote", step=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *mask)
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(CheckpointError, match="rank 0 failed in phase vote: KeyboardInterrupt"):
        second.decide("a", b"1", joined, phase="vote", step=1)  # hears of it instead of waiting for a minute
    other = threading.Thread(target=second.decide, args=("b", b"1", joined), kwargs={"phase": "vote", "step": 2})
    other.start()
    assert first.decide("b", b"0", joined, phase="vote", step=2, timeout=10) == b"0,1"
    other.join()
    assert time.monotonic() - begin < 20, "the wait that was interrupted went on"
    first.close()
    second.close()
    assert store.num_keys() == 0


def test_threads_end_with_the_coordinator() -> None:
    def living() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "ckpt-store" and thread not in before]

    before = threading.enumerate()
    _, ranks = thread_ranks(2, timeout=60)
    ranks[0].close()
    assert len(living()) <= 2
    del ranks  # the other is forgotten without a close()
    gc.collect()
    deadline = time.monotonic() + 5
    while living() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert living() == []


def test_a_failed_judge_leaves_no_frame_alive() -> None:
    class Marker:
        pass

    watched: list[weakref.ref[Marker]] = []

    def judge(payloads: list[bytes]) -> bytes:
        marker = Marker()
        watched.append(weakref.ref(marker))
        raise ValueError("late")

    coordinator = Coordinator.for_group(None, timeout=5)
    with pytest.raises(CheckpointError, match="late") as caught:
        coordinator.decide("t", b"", judge, phase="commit", step=1)
    assert watched[0]() is None, "the error keeps the locals of the judge"
    assert "in judge" in (caught.value.remote_traceback or "")


def test_commit_timeouts_are_not_given_the_traceback_of_a_rank_that_waited() -> None:
    _, (first, second) = thread_ranks(2, timeout=0.1)
    with pytest.raises(CommitTimeoutError) as caught:
        first.decide("t", b"", joined, phase="vote", step=1)
    relayed = unpack_error(pack_error(caught.value, rank=0, step=1, phase="commit"))
    assert "Traceback" not in str(relayed) and relayed.rank == 1
    first.close()
    second.close()
