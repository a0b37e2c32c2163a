"""Promises of ``ThreadedSaveStrategy`` and ``ThreadAsyncCallsQueue``, which change nothing of Megatron, on two gloo ranks.

The acts are in :mod:`tests.megatron_objects` and run once per version. "Whole" is as in :mod:`tests.test_megatron_saves`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine import TrainState
from tests import megatron_wheels
from tests.megatron_objects import play
from tests.ranks import run_ranks
from tests.test_megatron_saves import Ranks, each

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=megatron_wheels.versions())
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What both ranks found in each act."""
    folder = megatron_wheels.unpacked("megatron-core", request.param)
    root: Path = tmp_path_factory.mktemp("megatron")
    return run_ranks(2, play, folder, str(root), timeout=240.0)


def test_nothing_is_changed_and_no_process_is_started(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["unchanged"] is True
        assert rank["forks"] == []


def test_a_synchronous_save_is_whole(ranks: Ranks) -> None:
    for result in each(ranks, "sync"):
        assert result["problems"] == []
        assert {"__0_0.distcp", "__0_1.distcp", "__1_0.distcp", ".metadata", "metadata.json"} <= set(result["files"])


def test_arguments_are_those_of_stocks_strategy(ranks: Ranks) -> None:
    assert each(ranks, "positional") == [["torch_dist", 1, 3]] * 2


def test_changes_after_schedule_never_show(ranks: Ranks) -> None:
    """B001."""
    assert each(ranks, "async") == [[[0], [1], [2]]] * 2


def test_it_composes_with_the_fully_parallel_wrapper(ranks: Ranks) -> None:
    assert each(ranks, "fully_parallel") == [[], []]


def test_its_requests_survive_a_queue_that_forks(ranks: Ranks) -> None:
    """The forked process finds nothing to do; the save is whole all the same."""
    assert each(ranks, "before") == [[[0], []]] * 2


def test_its_requests_survive_pickling(ranks: Ranks) -> None:
    for sent, files in each(ranks, "in_another_process"):
        assert sent is None
        assert files == [".metadata", "commit.json", "metadata.json"]


def test_the_train_state_is_that_of_the_call_and_fits_the_directory(ranks: Ranks) -> None:
    """B011: counters that go on while the save is on its way. One of another step is refused."""
    for result in each(ranks, "train_state"):
        assert result["state"] == TrainState(step=25, consumed_train_samples=100)
        assert result["wrong"].startswith("ConfigError train_state.step is 28")


def test_a_failing_write_raises_on_every_rank_and_leaves_nothing(ranks: Ranks) -> None:
    """B004: and the queue can be used again."""
    for result in each(ranks, "failing_write"):
        assert result["error"].startswith("CheckpointException") and "No space left" in result["error"]
        assert result["left"] == [[], []]
        assert result["indexes"] == [1]
        assert result["again"] == []


def test_a_checkpoint_that_is_saved_again_stays_whole_until_the_next_commits(ranks: Ranks) -> None:
    """B098: also when that fails; and no file of the old one is left afterwards."""
    results = each(ranks, "saved_over")
    if isinstance(results[0], str):
        pytest.skip(results[0])
    for result in results:
        assert result["problems"] == [[], [], []]
        assert "x2" in result["error"]
        assert len(result["files"]) == 2


def test_a_structure_that_changes_is_saved_as_it_is(ranks: Ranks) -> None:
    """B023: although cached_metadata was asked for."""
    assert each(ranks, "changing_structure") == [[], []]


def test_flattened_tensors_of_older_versions_are_whole(ranks: Ranks) -> None:
    """Also when they are loaded with another sharding, for which stock's loader needs more than the stock metadata has."""
    results = each(ranks, "flattened")
    if isinstance(results[0], str):
        pytest.skip(results[0])
    assert results == [[True, True]] * 2


def test_shards_that_dont_make_up_a_tensor_are_refused_before_the_first_byte(ranks: Ranks) -> None:
    """B112: one line per key, with boxes and ranks, the same on both ranks."""
    wanted = {
        "missing": "'w': 16 of 32 elements of (4, 8) are on no rank; there are [0:1, 0:8] of rank 0",
        "twice": "'w': [0:3, 0:8] of rank 0 and [1:4, 0:8] of rank 1 overlap",
        "beyond": "'w': rank 1 holds [3:5, 0:8], beyond the edge of (4, 8)",
        "object": "'o/shard_0_1' is written by ranks [0, 1]",
        "leaf": "'n' is a int, expected a ShardedTensor or ShardedObject",
    }
    results = each(ranks, "bad_shards")
    if isinstance(results[0], str):
        pytest.skip(results[0])
    for result in results:
        for name, text in wanted.items():
            assert result[name].startswith("StateError"), result[name]
            assert text in result[name]
            assert not result[name].endswith("but wrote")
            # And so does the rehearsal at step 0, which needs no directory.
            assert name == "leaf" or result[f"{name} checked"].split(" [")[0] == result[name].split(" [")[0]
        assert result["fine"] == "no error"


def test_what_cant_be_pickled_is_named_on_every_rank_before_the_first_byte(ranks: Ranks) -> None:
    """B085: finalize functions may hold whatever they like."""
    for result in each(ranks, "unpicklable"):
        assert result["error"].startswith("StateError") and "lock/shard_1_2" in result["error"]
        assert result["called"] == [False]
        assert result["files"] == []


def test_a_request_that_is_dropped_says_so(ranks: Ranks) -> None:
    """B046: silence with no checkpoint is the fault."""
    for result in each(ranks, "never_scheduled"):
        assert len(result) == 1


def test_finalising_on_one_rank_only_ends_and_names_the_other(ranks: Ranks) -> None:
    """B022: by the deadline, on that rank; the other hears of it when it comes; the next save works."""
    results = each(ranks, "alone")
    assert "CommitTimeoutError" in results[0]["errors"][0] and "rank 1" in results[0]["errors"][0]
    assert "CommitTimeoutError" in results[1]["errors"][1]
    for result in results:
        assert result["again"] == []


def test_other_requests_run_in_a_thread_of_the_queue(ranks: Ranks) -> None:
    for result in each(ranks, "somebody_elses"):
        assert result["seen"] == [(1, 2, 3), "final", "empty"]
        assert result["indexes"] == result["done"] == [0, 1]
        assert "ZeroDivisionError" in result["error"]
        assert result["left"] == 0


def test_a_directory_that_appears_late_fails_nobody(ranks: Ranks) -> None:
    """B061."""
    assert each(ranks, "directory_race") == [[".metadata", "commit.json", "metadata.json"]] * 2


def test_a_save_that_isnt_finalised_isnt_published(ranks: Ranks) -> None:
    """B025, B065, B070: all bytes are durable, and nobody takes it for a checkpoint; the log says "staged", and once "committed"."""
    for result in each(ranks, "pending"):
        assert result["pending"] == [[], False, [], 1]
        assert (result["staged"], result["committed"]) == (1, 0)


def test_saves_go_on_while_the_process_gains_threads_and_tensors_change_sizes(ranks: Ranks) -> None:
    """B082."""
    assert each(ranks, "growing") == [[], []]
