"""Promises to frameworks that save with Megatron: their calls, unmodified, end in whole checkpoints and in no process.

The acts are in :mod:`tests.megatron_frameworks` and run once per version of megatron-core. "Whole" means: stock's
``dist_checkpointing.load`` reads back bit for bit what the state was when the save was scheduled, although its tensors were
overwritten and freed right afterwards, and our verification finds nothing wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import megatron_wheels
from tests.megatron_framework_tools import ENDS
from tests.megatron_frameworks import log_of, play
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(200)

Ranks = list[dict[str, Any]]

#: With NVRx installed, as NeMo-RL and Megatron-Bridge have it, its classes are the ones that Megatron hands out.
WITH_NVRX = "0.19.2+nvrx0.7.0"


@pytest.fixture(scope="module", params=[*megatron_wheels.versions(), WITH_NVRX])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What both ranks found in each act, and under "log" what the engine said to the end of their processes."""
    version, _, nvrx = request.param.partition("+nvrx")
    folder = megatron_wheels.unpacked("megatron-core", version)
    options = ("--platform", "manylinux_2_39_x86_64")
    other = megatron_wheels.unpacked("nvidia-resiliency-ext", nvrx, *options) if nvrx else None
    root: Path = tmp_path_factory.mktemp("frameworks")
    found: Ranks = run_ranks(2, play, folder, other, str(root), timeout=150.0)
    for rank, results in enumerate(found):
        results["log"] = Path(log_of(str(root), rank)).read_text()
    return found


def each(ranks: Ranks, act: str) -> list[Any]:
    """The results of an act that raised nowhere."""
    results = [rank[act] for rank in ranks]
    for result in results:
        assert not (isinstance(result, str) and "Traceback" in result), result
    return results


# -- SkyRL ---------------------------------------------------------------------------------------------------------------


def test_skyrls_asynchronous_saves_are_whole_finalised_from_a_helper_thread(ranks: Ranks) -> None:
    """B058. ``strategies.base.async_calls`` can be set on every version; the request lets itself be staged by the caller."""
    assert each(ranks, "skyrl_async") == [{"problems": [], "finalised": [[], [0], [1]]}] * 2


def test_a_rank_with_nothing_to_write_takes_part(ranks: Ranks) -> None:
    assert each(ranks, "skyrl_nothing_to_write") == [[], []]


def test_skyrls_queue_is_closed_and_made_anew_after_each_save(ranks: Ranks) -> None:
    """B028: an asynchronous save is in the queue when a synchronous one closes it."""
    assert each(ranks, "skyrl_sync") == [[], []]


def test_shard_files_tell_their_rank_to_skyrls_cloud_load(ranks: Ranks) -> None:
    """Each rank fetches the files with its number, and no folder is fetched: the rest is a stock checkpoint."""
    for result in each(ranks, "skyrl_cloud"):
        assert result["differ"] == []
        assert result["written"] and set(result["written"]) <= set(result["fetched"])


# -- AReaL ---------------------------------------------------------------------------------------------------------------


def test_areal_finds_the_payload_clears_it_and_gets_a_whole_checkpoint(ranks: Ranks) -> None:
    for result in each(ranks, "areal"):
        assert result["problems"] == []
        assert result["publications"] == [ENDS, ENDS], "published before it was complete"


def test_ranks_of_areal_reap_the_same_saves_at_the_same_polls(ranks: Ranks) -> None:
    """B035: otherwise one of them waits in a collective that the other has skipped."""
    first, second = each(ranks, "areal")
    assert first["polls"] == second["polls"] and first["depths"] == second["depths"]
    assert [index for poll in first["polls"] for index in poll] == [0, 1]
    assert first["depths"][0] == 1 and first["polls"][-1] == []


# -- verl ----------------------------------------------------------------------------------------------------------------


def test_six_requests_of_verl_in_flight_are_six_whole_checkpoints(ranks: Ranks) -> None:
    """Stock mixes the results of requests up that are in flight together. All three are there when the last one is tracked."""
    assert each(ranks, "verl") == [{"problems": [], "tracked": [[ENDS] * 3] * 2}] * 2


def test_verls_own_queue_finalises_in_some_later_step(ranks: Ranks) -> None:
    assert each(ranks, "verl_own_queue") == [{"problems": [], "finalised": [0], "kept": True}] * 2


def test_a_request_that_nobody_schedules_is_written_or_complained_about(ranks: Ranks) -> None:
    """B046: no files and no word is the fault. Neither is the next save disturbed."""
    for rank, result in zip(ranks, each(ranks, "verl_dropped"), strict=True):
        assert result["problems"] == []
        if result["dropped"] != ENDS:
            assert "verl_dropped/dropped" in rank["log"], "no checkpoint, and not a word about it"


# -- NeMo-RL, slime, ms-swift, Bridge ------------------------------------------------------------------------------------


def test_a_checkpoint_that_nemo_rl_renames_is_whole_at_its_new_place(ranks: Ranks) -> None:
    """Sync through its replacement of ``save``, async finalised by a thread; nothing appears under the old name later on."""
    assert each(ranks, "nemo_rl") == [{"problems": [], "left": ["step_3", "step_4"]}] * 2


def test_slimes_writer_class_and_strategies_made_anew_change_nothing(ranks: Ranks) -> None:
    assert each(ranks, "slime") == [{"problems": [], "finalised": [[], [0], [1], [2]]}] * 2


def test_what_ms_swift_tracks_too_early_is_not_taken_for_complete(ranks: Ranks) -> None:
    """Looked at after each schedule and after each finalisation: the tracker runs ahead, we don't."""
    for result in each(ranks, "ms_swift"):
        assert result["problems"] == []
        assert result["tracked"] == [1, 1, 2, 2]
        assert result["verified"] == [False, True, False, True]
        assert result["committed"] == [None, 1, 1, 2]


def test_bridges_persistent_worker_is_a_queue_without_a_worker(ranks: Ranks) -> None:
    for result in each(ranks, "bridge"):
        assert result["problems"] == [] and result["done"] == [2, 4, 6]
        assert result["finalised"] == [0, 1, 2]


def test_a_request_that_its_caller_executes_is_whole(ranks: Ranks) -> None:
    assert each(ranks, "executed_by_the_caller") == [[], []]


# -- around them ---------------------------------------------------------------------------------------------------------


def test_plain_paths_are_ours_also_where_multi_storage_client_is_installed(ranks: Ranks) -> None:
    """Megatron up to 0.17 uses that package for every path as soon as it is there."""
    results = each(ranks, "msc_installed")
    if results[0] == "multi-storage-client is not installed":
        pytest.skip(results[0])
    whole = {"problems": [], "published": ENDS}
    assert results == [{"sync": whole, "async": whole}] * 2


def test_no_framework_starts_a_process(ranks: Ranks) -> None:
    """B040, B044, B058: every way to start one was made to fail, and nobody forked in native code."""
    assert [rank["forks"] for rank in ranks] == [[], []]
