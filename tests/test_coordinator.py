"""Promises of the agreement between ranks: one verdict for all, bounded waits, errors that arrive whole, nothing left
over.

Ranks here are processes over gloo; test_coordinator_protocol.py has those that are threads.
"""

from __future__ import annotations

import errno
import os
import signal
import statistics
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt_engine.commit import store_client
from ckpt_engine.commit.coordinator import Coordinator, pack_error, unpack_error
from ckpt_engine.errors import CheckpointError, ConfigError, EngineClosedError, StorageError
from tests.ranks import Died, run_ranks

pytestmark = pytest.mark.timeout(90)

MIB = 1 << 20


def joined(payloads: list[bytes]) -> bytes:
    return b",".join(payloads)


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def keys_now() -> int:
    """Keys in the store while no rank is in a round."""
    dist.barrier()
    count = int(default_store().num_keys())
    dist.barrier()
    return count


def keys_return_to(count: int) -> bool:
    """Whether the store gets back to ``count`` keys; the last reader of a round may be a moment behind."""
    deadline = time.monotonic() + 5
    while default_store().num_keys() != count and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(default_store().num_keys() == count)


def told(action: Any) -> tuple[Any, ...]:
    """What a rank is told: the verdict, or the error and all its fields."""
    try:
        return (action(),)
    except CheckpointError as error:
        return type(error).__name__, error.message, error.__dict__


# -- one verdict for all ---------------------------------------------------------------------------------------------


def fifty_rounds(rank: int, world: int) -> dict[str, Any]:
    coordinator = Coordinator.for_group(None, timeout=20)
    before = keys_now()
    judged_in = []

    def judge(payloads: list[bytes]) -> bytes:
        judged_in.append(threading.current_thread() is threading.main_thread())
        return joined(payloads)

    verdicts = [coordinator.decide(f"t/{i}", b"%d.%d" % (rank, i), judge, phase="vote", step=i) for i in range(50)]
    large = coordinator.decide("large", bytes([rank]) * (20 * MIB + rank), b"".join, phase="vote", step=1)
    dist.barrier()
    clean = keys_return_to(before)
    coordinator.close()
    coordinator.close()
    with pytest.raises(EngineClosedError):
        coordinator.decide("later", b"", joined, phase="vote", step=1)
    expected = b"".join(bytes([r]) * (20 * MIB + r) for r in range(world))
    return {"verdicts": verdicts, "large": large == expected, "clean": clean, "judged": judged_in}


def test_every_rank_gets_the_verdict_and_no_key_is_left() -> None:
    results = run_ranks(3, fifty_rounds)
    for rank, found in enumerate(results):
        assert found["verdicts"] == [b"0.%d,1.%d,2.%d" % (i, i, i) for i in range(50)]
        assert found["large"], "20 MiB did not arrive whole"
        assert found["clean"], "keys of finished rounds are left in the store"
        assert found["judged"] == ([True] * 50 if rank == 0 else [])


def late_verdict(rank: int, world: int) -> tuple[float, bytes]:
    coordinator = Coordinator.for_group(None, timeout=2.0)

    def judge(payloads: list[bytes]) -> bytes:
        time.sleep(2.5)  # longer than the others' patience for a rank that says nothing
        return repr(time.monotonic()).encode()

    verdict = coordinator.decide("slow", b"", judge, phase="commit", step=1)
    return time.monotonic(), verdict


def test_no_rank_returns_before_rank_zero_has_committed() -> None:
    """B041: and none gives up while rank 0 commits."""
    for returned, verdict in run_ranks(2, late_verdict):
        assert returned >= float(verdict)


def in_the_background(rank: int, world: int) -> tuple[int, list[bytes]]:
    verdicts: list[bytes] = []
    first, second = (Coordinator.for_group(None, timeout=30) for _ in range(2))
    background = first.for_thread()

    def rounds() -> None:
        for i in range(30):
            verdicts.append(background.decide(f"commit/{i}", b"%d" % rank, joined, phase="commit", step=i))
            time.sleep(0.01 * rank)

    thread = threading.Thread(target=rounds)
    thread.start()
    wrong = 0
    for i in range(300):
        value = torch.tensor([float(rank + i)])
        dist.all_reduce(value)
        wrong += value.item() != 1 + 2 * i
        if i % 10 == 0:  # the same tags as in the background, and the same ones twice, on two engines
            for name, coordinator in ((b"a", first), (b"b", second)):
                verdict = coordinator.decide(f"begin/{i}", name + b"%d" % rank, joined, phase="plan", step=i)
                wrong += verdict != name + b"0," + name + b"1"
    thread.join()
    return wrong, verdicts


def test_background_rounds_engines_and_collectives_do_not_mix() -> None:
    """B008, B022, B035: rounds in threads, while the main threads use collectives and two more engines."""
    assert run_ranks(2, in_the_background) == [(0, [b"0,1"] * 30)] * 2


def some_of_the_ranks(rank: int, world: int) -> tuple[Any, ...]:
    groups = [dist.new_group([1, 2]), dist.new_group([0, 3])]
    if rank in (1, 2):
        time.sleep(0.3 * (rank == 2))
        coordinator = Coordinator.for_group(groups[0], timeout=20)
        verdicts = {coordinator.decide(f"t/{i}", b"%d" % rank, joined, phase="vote", step=i) for i in range(20)}
        return coordinator.rank, coordinator.world_size, verdicts
    with pytest.raises(ConfigError, match=f"rank {rank} is not in the process group") as caught:
        Coordinator.for_group(groups[0], timeout=20)
    total = torch.ones(1)
    for _ in range(20):
        dist.all_reduce(total, group=groups[1])
    return total.item(), caught.value.rank


def test_a_subgroup_agrees_while_other_ranks_do_something_else() -> None:
    """B109: ranks are those of the group, the first one coordinates, nobody outside is waited for."""
    results = run_ranks(4, some_of_the_ranks)
    assert results == [(2.0**20, 0), (0, 2, {b"1,2"}), (1, 2, {b"1,2"}), (2.0**20, 3)]


# -- one error for all -----------------------------------------------------------------------------------------------


def failures(rank: int, world: int) -> list[tuple[Any, ...]]:
    coordinator = Coordinator.for_group(None, timeout=20)
    before = keys_now()
    found = []

    def full(payloads: list[bytes]) -> bytes:
        raise StorageError("no space", path="/x", phase="write", errno=errno.ENOSPC, hint="free some")

    def wrong(payloads: list[bytes]) -> bytes:
        raise ValueError("not so")

    def reported(payloads: list[bytes]) -> bytes:
        raise unpack_error(payloads[1])

    def work() -> None:
        raise ZeroDivisionError("x1")

    try:
        work()
    except ZeroDivisionError as error:
        mine = pack_error(error, rank=rank, step=7, phase="write", path="/shard")
    for number, judge in enumerate((full, wrong, reported)):
        found.append(told(lambda n=number, j=judge: coordinator.decide(f"{n}", mine, j, phase="commit", step=7)))
    found.append(told(lambda: coordinator.decide("after", b"%d" % rank, joined, phase="commit", step=8)))
    found.append((keys_return_to(before),))
    return found


def test_an_error_is_the_same_on_every_rank() -> None:
    """B004, B016: type, fields and traceback text; the next round works, and failed rounds leave no keys."""
    results = run_ranks(2, failures)
    assert results[0] == results[1]
    (kind, message, fields), unknown, remote, after, clean = results[0]
    assert (kind, message) == ("StorageError", "no space")
    assert fields["errno"] == errno.ENOSPC and fields["path"] == "/x" and fields["phase"] == "write"
    assert fields["step"] == 7 and fields["rank"] == 0 and fields["hint"] == "free some"
    assert "in full" in fields["remote_traceback"]
    assert unknown[:2] == ("CheckpointError", "rank 0 failed in phase commit: ValueError: not so")
    assert remote[:2] == ("CheckpointError", "rank 1 failed in phase write: ZeroDivisionError: x1")
    assert remote[2]["rank"] == 1 and remote[2]["path"] == "/shard" and "in work" in remote[2]["remote_traceback"]
    assert after == (b"0,1",) and clean == (True,)


def silences(rank: int, world: int) -> list[Any]:
    coordinator = Coordinator.for_group(None, timeout=1.0)
    before = keys_now()
    found: list[Any] = []
    # Who is late, and by how much; rank 1's patience ends first, and the late one comes when all is over.
    for late, delays in ((2, (0.4, 0.0, 2.0)), (0, (2.0, 0.4, 0.0))):
        judged: list[int] = []
        dist.barrier()
        begin = time.monotonic()
        time.sleep(delays[rank])

        def judge(payloads: list[bytes], judged: list[int] = judged) -> bytes:
            judged.append(1)
            return b""

        outcome = told(lambda n=late, j=judge: coordinator.decide(f"late/{n}", b"", j, phase="vote", step=3))
        found.append((outcome, time.monotonic() - begin < (4.5 if rank == late else 4.0), judged))
    after = coordinator.decide("after", b"%d" % rank, joined, phase="vote", step=4, timeout=20)
    return [*found, after, keys_return_to(before)]


def test_a_silent_rank_is_named_on_every_rank_by_the_deadline() -> None:
    """B004, B016, B035: also when it is rank 0, and also on the silent rank, once it wakes up."""
    results = run_ranks(3, silences)
    for position, late in ((0, 2), (1, 0)):
        outcomes = [found[position] for found in results]
        assert all(in_time for _, in_time, _ in outcomes), outcomes
        assert not any(judged for _, _, judged in outcomes), "a verdict was made for a round that others had given up"
        assert outcomes[0][0] == outcomes[1][0] == outcomes[2][0]
        kind, message, fields = outcomes[0][0]
        assert kind == "CommitTimeoutError" and fields["silent_ranks"] == (late,)
        assert f"rank {late} " in message and fields["phase"] == "vote" and fields["step"] == 3
    assert [found[2:] for found in results] == [[b"0,1,2", True]] * 3


def rank_one_dies(rank: int, world: int) -> tuple[Any, ...]:
    coordinator = Coordinator.for_group(None, timeout=30.0)
    coordinator.decide("start", b"", joined, phase="vote", step=1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(lambda: coordinator.decide("vote", b"", joined, phase="vote", step=2, timeout=1.0))


def test_a_dead_rank_is_named_on_the_others() -> None:
    """B004"""
    first, dead, last = run_ranks(3, rank_one_dies, dies=(1,))
    assert dead == Died(-signal.SIGKILL)
    assert first == last and first[0] == "CommitTimeoutError" and first[2]["silent_ranks"] == (1,)


def rank_zero_dies(rank: int, world: int) -> tuple[Any, ...]:
    coordinator = Coordinator.for_group(None, timeout=20)
    coordinator.decide("start", b"", joined, phase="vote", step=1)
    if rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    outcome = told(lambda: coordinator.decide("vote", b"", joined, phase="vote", step=2))
    return *outcome, time.monotonic() - begin


def test_a_dead_host_of_the_store_is_an_error_at_once() -> None:
    """B004"""
    kind, message, fields, seconds = run_ranks(2, rank_zero_dies, dies=(0,))[1]
    assert kind == "CheckpointError" and "rank 0's store is gone" in message and seconds < 10
    assert (fields["rank"], fields["step"], fields["phase"]) == (0, 2, "vote")


def frozen_host(rank: int, world: int) -> list[Any]:
    coordinator = Coordinator.for_group(None, timeout=30.0)
    pids = coordinator.decide("pids", b"%d" % os.getpid(), joined, phase="vote", step=1)
    if rank == 0:
        time.sleep(0.5)  # stopped in here
    else:
        host = int(pids.split(b",")[0])
        patience, store_client._STORE_PATIENCE = store_client._STORE_PATIENCE, 0.5
        os.kill(host, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            found = [
                told(lambda n=n: coordinator.decide(f"frozen/{n}", b"", joined, phase="vote", step=2, timeout=1.0))
                for n in "ab"
            ]
            seconds = time.monotonic() - begin
        finally:
            os.kill(host, signal.SIGCONT)
            store_client._STORE_PATIENCE = patience
    dist.barrier()
    time.sleep(0.2)
    after = coordinator.decide("after", b"%d" % rank, joined, phase="vote", step=3)
    return [after] if rank == 0 else [after, seconds, *found]


def test_a_frozen_host_of_the_store_cannot_hold_a_rank() -> None:
    """B004: the deadline holds though a request to the store does not come back; afterwards all is well again."""
    first, (after, seconds, *found) = run_ranks(2, frozen_host)
    assert first == [b"0,1"] and after == b"0,1"
    assert seconds < 10
    for kind, message, fields in found:
        assert kind == "CommitTimeoutError" and fields["silent_ranks"] == (0,) and "does not answer" in message
        assert (fields["step"], fields["phase"]) == (2, "vote")


def leaves_at_once(rank: int, world: int) -> bytes:
    if rank == 1:
        store_client._FIRST_PAUSE = 1.0  # looks rarely: the verdict is there long before it is read
    coordinator = Coordinator.for_group(None, timeout=20)
    if rank == 0:
        time.sleep(0.3)
    verdict = coordinator.decide("last", b"%d" % rank, joined, phase="commit", step=1)
    coordinator.close()
    if rank == 0:
        os._exit(0)
    return verdict


def test_the_host_of_the_store_stays_until_the_last_verdict_is_read() -> None:
    """B041: otherwise a committed save would be reported as failed by the others."""
    assert run_ranks(2, leaves_at_once, dies=(0,)) == [Died(0), b"0,1"]


# -- manners ---------------------------------------------------------------------------------------------------------


def waits_in_the_background(rank: int, world: int) -> tuple[float, float, bool]:
    shared = Coordinator.for_group(None, timeout=20)
    own = shared.for_thread()
    if rank == 1:
        time.sleep(2)
    waits = [
        threading.Thread(target=coordinator.decide, args=(tag, b"", joined), kwargs={"phase": "vote", "step": 1})
        for tag, coordinator in (("shared", shared), ("own", own))
    ]
    for wait in waits:
        wait.start()
    seconds = []
    begin = time.monotonic()
    overlapped = False
    while time.monotonic() - begin < 1.5:
        overlapped = overlapped or all(wait.is_alive() for wait in waits)
        started = time.monotonic()
        default_store().set(f"trainer/{rank}", "1")
        default_store().get(f"trainer/{rank}")
        seconds.append(time.monotonic() - started)
        time.sleep(0.005)
    for wait in waits:
        wait.join()
    return statistics.median(seconds), max(seconds), overlapped


def test_a_waiting_thread_does_not_hold_up_the_trainer_s_use_of_the_store() -> None:
    median, worst, overlapped = run_ranks(2, waits_in_the_background)[0]
    assert overlapped, "nothing was waiting"
    # A blocking wait holds it up for two seconds; other jobs on the machine for a few ms.
    assert median < 0.05 and worst < 0.5, f"median {median:.4f} s, worst {worst:.4f} s"


def one_rank_of_gloo(rank: int, world: int) -> tuple[bytes, int, bool]:
    before = default_store().num_keys()
    coordinator = Coordinator.for_group(None, timeout=5)
    verdict = coordinator.decide("a", b"x", joined, phase="vote", step=1)
    return verdict, coordinator.world_size, default_store().num_keys() == before


def test_a_group_of_one_rank_needs_nobody() -> None:
    assert run_ranks(1, one_rank_of_gloo) == [(b"x", 1, True)]


def test_a_round_without_torch_distributed_is_cheap(capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = Coordinator.for_group(None, timeout=5)
    assert (coordinator.rank, coordinator.world_size) == (0, 1)
    seconds = []
    for i in range(300):
        begin = time.perf_counter()
        assert coordinator.decide(f"t/{i}", b"x" * 100, joined, phase="vote", step=i) == b"x" * 100
        seconds.append(time.perf_counter() - begin)
    with capsys.disabled():
        print(f"\none rank: {statistics.median(seconds) * 1e6:.0f} us a round")
    assert statistics.median(seconds) < 0.005
    large = b"z" * (20 * MIB)
    assert coordinator.for_thread().decide("large", large, joined, phase="vote", step=1) == large
    assert coordinator._client._store.num_keys() == 0
    with pytest.raises(StorageError, match="full"):
        coordinator.decide("f", b"", lambda _: (_ for _ in ()).throw(StorageError("full")), phase="vote", step=1)
    assert coordinator._client._store.num_keys() == 0
    coordinator.close()


def test_a_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(ConfigError, match="not initialised"):
        Coordinator.for_group(object(), timeout=5)  # type: ignore[arg-type]
