"""Promises of ``ckpt_engine.megatron.install()``, on two gloo ranks and every version of megatron-core that is tested.

The acts are in :mod:`tests.megatron_acts` and run once per version; the tests here look at what came of them. "Whole" means:
stock's ``dist_checkpointing.load`` reads it back bit for bit, and our verification finds nothing wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import TrainState
from tests import megatron_wheels
from tests.megatron_acts import play
from tests.megatron_ranks import BUDGET
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=megatron_wheels.versions())
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What both ranks found in each act."""
    folder = megatron_wheels.unpacked("megatron-core", request.param)
    root: Path = tmp_path_factory.mktemp("megatron")
    return run_ranks(2, play, folder, str(root), timeout=240.0)


def each(ranks: Ranks, act: str) -> list[Any]:
    """The results of an act that raised nowhere."""
    results = [rank[act] for rank in ranks]
    for result in results:
        assert not (isinstance(result, str) and "Traceback" in result), result
    return results


# -- what is saved -------------------------------------------------------------------------------------------------------


def test_a_synchronous_save_is_whole(ranks: Ranks) -> None:
    for result in each(ranks, "sync"):
        assert result["problems"] == []
        assert {"__0_0.distcp", "__0_1.distcp", "__1_0.distcp", ".metadata", "metadata.json"} <= set(result["files"])


def test_a_separation_hint_gives_files_of_their_own(ranks: Ranks) -> None:
    for result in each(ranks, "separated"):
        assert result["problems"] == []
        assert any(name.startswith("torch__0_") for name in result["files"])


def test_a_fully_parallel_save_is_whole_also_for_the_fully_parallel_loader(ranks: Ranks) -> None:
    assert each(ranks, "fully_parallel") == [[], []]


@pytest.mark.parametrize("kind", ["temporal", "persistent"])
def test_changes_after_schedule_never_show(ranks: Ranks, kind: str) -> None:
    """B001: each of three asynchronous saves has the values of the time when it was scheduled."""
    assert each(ranks, kind) == [[[0], [1], [2]]] * 2


def test_a_state_larger_than_the_budget_streams_through_it(ranks: Ranks) -> None:
    """B010: the whole shard would have to fit into host memory twice."""
    for result in each(ranks, "larger_than_the_budget"):
        assert result["problems"] == []
        assert 0 < result["peak"] <= BUDGET and result["mapped"] <= BUDGET
        assert result["ranks"] == 2  # found over the Store: these ranks have no launcher


def test_a_request_staged_or_cleared_by_its_owner_is_whole(ranks: Ranks) -> None:
    """SkyRL calls preload_fn itself; AReaL empties the lists of the request after it has scheduled it."""
    assert each(ranks, "staged_by_the_caller") == [[], []]


def test_saving_into_the_same_directory_again_is_whole(ranks: Ranks) -> None:
    assert each(ranks, "same_directory_again") == [[], []]


def test_megatrons_integrity_manifest_holds_without_a_second_read(ranks: Ranks) -> None:
    """Stock reads every file again, on rank 0; here the sums are taken while writing."""
    results = each(ranks, "integrity")
    if results[0] == "this version has no integrity manifest":
        pytest.skip(results[0])
    assert results == [[], []]


def test_a_cached_structure_is_whole_every_time(ranks: Ranks) -> None:
    assert each(ranks, "cached_structure") == [[], []]


def test_the_train_state_is_that_of_the_schedule_and_comes_before_the_tracker(ranks: Ranks) -> None:
    """B011 is the fault: counters of another step. The caller's finalize function stands for the tracker."""
    wanted = TrainState(
        step=12,
        consumed_train_samples=480,
        skipped_train_samples=3,
        floating_point_operations_so_far=2.0**70,
        do_train=True,
    )
    for result in each(ranks, "train_state"):
        assert result == {"seen": [True], "states": [wanted, wanted], "ok": ()}


# -- several saves, and their order -----------------------------------------------------------------------------------------


def test_two_saves_in_flight_keep_their_results_apart(ranks: Ranks) -> None:
    """Stock gives the second one's results to the first, and neither loads."""
    for result in each(ranks, "two_in_flight"):
        assert result == {"indexes": [0, 1], "problems": []}


def test_ranks_that_end_at_different_times_finalise_together(ranks: Ranks) -> None:
    """B035: one rank is done at its first poll, the other a second later."""
    found = each(ranks, "polls")
    assert found[0] == found[1]
    assert [index for poll in found[0] for index in poll] == [0]


def test_a_synchronous_save_leaves_a_pending_one_alone(ranks: Ranks) -> None:
    """B028: both are whole."""
    assert each(ranks, "sync_after_async") == [{"finalized": [0], "problems": []}] * 2


def test_an_aborted_save_leaves_nothing_to_the_next(ranks: Ranks) -> None:
    """B017: written, then aborted before it was finalised."""
    results = each(ranks, "abort")
    if results[0] == "this version knows no abort":
        pytest.skip(results[0])
    assert results == [{"problems": [], "foreign keys": [], "abandoned": []}] * 2


# -- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_failing_write_raises_on_every_rank_and_publishes_nothing(ranks: Ranks, mode: str) -> None:
    """B004: both ranks get stock's exception, which names rank 1 and carries its traceback; the next save is whole."""
    for result in each(ranks, "failing_write"):
        error = result[mode]
        assert error.startswith("CheckpointException") and "(RANK 1)" in error
        assert "ValueError: x1" in error and "in broken" in error
        assert result[f"{mode} published"] == []
        assert result[f"{mode} again"] == []


def test_a_failing_copy_raises_on_every_rank_and_publishes_nothing(ranks: Ranks) -> None:
    """B049: staging fails in a thread of rank 0."""
    for result in each(ranks, "failing_copy"):
        assert result["error"].startswith("CheckpointException") and "(RANK 0)" in result["error"]
        assert "RuntimeError: copy1" in result["error"]
        assert result["published"] == []


def test_a_rank_without_staging_memory_fails_the_save_on_every_rank(ranks: Ranks) -> None:
    for result in each(ranks, "no_memory"):
        assert result["error"].startswith("CheckpointException") and "(RANK 1)" in result["error"]
        assert "MemoryBudgetError: nothing left" in result["error"]
        assert result["problems"] == []


def test_a_failure_of_rank_0_while_finalising_raises_on_every_rank(ranks: Ranks) -> None:
    """No space for .metadata, or for the commit record: stock leaves the other ranks in a collective."""
    for result in each(ranks, "failing_finish"):
        assert result.pop("again") == "fine"
        assert len(result) == 4
        for error in result.values():
            assert error.startswith("CheckpointException") and "(RANK 0)" in error and "No space left" in error
            assert not error.endswith("but committed")


# -- one process ---------------------------------------------------------------------------------------------------------


def test_no_process_is_started(ranks: Ranks) -> None:
    """B040, B044, B058: fork, spawn and subprocesses were made to fail in these ranks, and nobody forked in native code."""
    assert [rank["forks"] for rank in ranks] == [[], []]


def test_requests_of_others_go_the_stock_way(ranks: Ranks) -> None:
    """Stock's way ends in the process that these ranks forbid: the proof that the queue still is stock's for them."""
    for result in each(ranks, "not_ours"):
        assert "the test forbids processes" in result


def test_saves_work_from_a_thread_that_is_not_the_main_one(ranks: Ranks) -> None:
    """B058, B044: as an actor's method, without signals, next to busy threads."""
    assert each(ranks, "in_a_thread") == [[[[0], [1], [2]]]] * 2


def test_thousands_of_tensors_need_few_descriptors_and_no_port(ranks: Ranks) -> None:
    """B071."""
    for result in each(ranks, "many_tensors"):
        assert result["ports"] == 0
        assert result["published"] == [[".metadata", "commit.json", "metadata.json"]] * 3


# -- install and uninstall -----------------------------------------------------------------------------------------------


def test_importing_the_package_imports_no_megatron(ranks: Ranks) -> None:
    assert [rank["imported_with_ckpt_engine"] for rank in ranks] == [[], []]


def test_a_missing_seam_is_named_and_leaves_stock_as_it_was(ranks: Ranks) -> None:
    for result in each(ranks, "refused"):
        assert result["error"].startswith("ConfigError") and "async_save: takes (self, something_else)" in result["error"]
        assert result["unchanged"]


def test_functions_imported_by_name_are_changed_and_restored(ranks: Ranks) -> None:
    assert [rank["by_name"] for rank in ranks] == [[True, False]] * 2


def test_uninstall_restores_every_seam(ranks: Ranks) -> None:
    """After two installs and two uninstalls."""
    assert [rank["restored"] for rank in ranks] == [True, True]


def test_a_save_on_its_way_survives_uninstall(ranks: Ranks) -> None:
    """It is finalised as it began, and loads with stock's loader."""
    for result in each(ranks, "uninstalled"):
        assert result == {"same": True, "published": [".metadata", "commit.json", "metadata.json"]}
