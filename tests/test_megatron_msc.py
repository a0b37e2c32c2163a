"""Promises of Megatron saves into ``msc://`` directories (multi-storage-client), on two gloo ranks.

The acts are in :mod:`tests.megatron_msc` and run once per version, on a profile of type "file" and on an S3-compatible server.
"Whole" means: stock's loader reads it back through MSC bit for bit, and our verification finds nothing wrong with a copy of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import megatron_msc, megatron_wheels, s3_server
from tests.megatron_ranks import BUDGET, MIB
from tests.ranks import run_ranks
from tests.test_megatron_saves import Ranks, each

_LACKING = [name for name in ("multistorageclient", "boto3", "moto") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(_LACKING), reason=f"not installed: {', '.join(_LACKING)} (multi-storage-client, boto3, moto[server])"
    ),
]

PROFILES = ("disk", "s3")


@pytest.fixture(scope="module")
def store() -> Iterator[s3_server.Server]:
    with s3_server.running() as server:
        yield server


@pytest.fixture(scope="module", params=megatron_wheels.versions())
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, store: s3_server.Server) -> Any:
    """What both ranks found in each act, and what was left in the store."""
    folder = megatron_wheels.unpacked("megatron-core", request.param)
    root: Path = tmp_path_factory.mktemp("megatron")
    s3_server.empty(store.url)
    store.changes.clear()
    found = run_ranks(2, megatron_msc.play, folder, str(root), store.url, timeout=240.0)
    uploads = s3_server.client(store.url).list_multipart_uploads(Bucket=s3_server.BUCKET).get("Uploads", [])
    for rank in found:
        rank["pending uploads"] = [upload["Key"] for upload in uploads]
        rank["changes"] = list(store.changes)
    return found


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("act", ["objects_sync", "sync"])
def test_a_synchronous_save_is_whole(ranks: Ranks, act: str, profile: str) -> None:
    """With the engine installed, and with the strategy."""
    for result in each(ranks, f"{act} {profile}"):
        assert result["problems"] == []
        wanted = {
            "__0_0.distcp",
            "__0_1.distcp",
            "__1_0.distcp",
            ".metadata",
            "metadata.json",
            "ckpt_engine/commit.json",
        }
        assert wanted <= set(result["files"])
        assert not [name for name in result["files"] if ".tmp-" in name]


@pytest.mark.parametrize("act", ["sync", "async", "train_state"])
def test_the_commit_record_is_the_last_object_to_be_written(ranks: Ranks, act: str) -> None:
    """Whoever finds it finds all that it vouches for; only the copy of the counters for the whole run comes later."""
    folder = f"/{s3_server.BUCKET}/{act}/iter_0000004/"
    mine = [change for change in ranks[0]["changes"] if folder in change]
    assert mine[-1] == f"PUT {folder}ckpt_engine/commit.json"
    assert any(change.endswith("distcp") for change in mine) and f"PUT {folder}.metadata" in mine


@pytest.mark.parametrize("profile", PROFILES)
def test_megatrons_own_manifest_is_written_and_checks(ranks: Ranks, profile: str) -> None:
    results = each(ranks, f"integrity {profile}")
    if isinstance(results[0], str):
        pytest.skip(results[0])
    assert results == [[], []]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("act", ["objects_async", "async"])
def test_an_asynchronous_save_has_the_values_of_its_call(ranks: Ranks, act: str, profile: str) -> None:
    """B001."""
    assert each(ranks, f"{act} {profile}") == [[], []]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_url_that_went_through_pathlib_is_the_same_directory(ranks: Ranks, profile: str) -> None:
    assert each(ranks, f"mangled {profile}") == [[], []]


def test_a_path_that_is_mapped_to_a_profile_goes_there(ranks: Ranks) -> None:
    """Stock's loader looks for it in the store, since Megatron sends plain paths through MSC."""
    for result in each(ranks, "mapped"):
        assert result["problems"] == []
        assert "ckpt_engine/commit.json" in result["files"]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_counters_of_the_run_go_with_it(ranks: Ranks, profile: str) -> None:
    assert each(ranks, f"train_state {profile}") == [{"same": True, "samples": 64}] * 2


def test_a_shard_larger_than_the_budget_streams_through_it(ranks: Ranks) -> None:
    """B010: nobody holds a shard, neither the engine nor the client; that holds its parts, a fixed number of them."""
    bound = BUDGET + megatron_msc.HELD_BYTES + 16 * MIB
    assert bound < megatron_msc.LARGE_BYTES * 2 // 3
    for result in each(ranks, "larger_than_the_budget s3"):
        assert result["same"]
        assert 0 < result["peak"] <= BUDGET and result["mapped"] <= BUDGET
        assert result["grown"] < bound


@pytest.mark.parametrize("profile", PROFILES)
def test_a_checkpoint_that_is_saved_again_stays_until_the_next_commits(ranks: Ranks, profile: str) -> None:
    """B098: also when that fails; and no file of the old one is left afterwards."""
    for result in each(ranks, f"saved_over {profile}"):
        assert result["problems"] == [[], [], []]
        assert "x2" in result["error"]
        assert result["kept"]
        assert len(result["files"]) == 2


@pytest.mark.parametrize("profile", PROFILES)
def test_a_failing_upload_raises_on_every_rank_and_leaves_nothing(ranks: Ranks, profile: str) -> None:
    """B004: no object of the save, neither .metadata nor commit.json, and no part of an upload that nobody will end."""
    for result in each(ranks, f"refused {profile}"):
        for error in result["errors"].values():
            assert error.startswith("CheckpointException") and "(RANK 1)" in error, error
            assert ("Permission denied" if profile == "s3" else "No space left") in error
        assert result["left"] == []
        assert result["again"] == []
    assert ranks[0]["pending uploads"] == []


def test_no_process_is_started(ranks: Ranks) -> None:
    """B040, B058: fork, spawn and subprocesses were made to fail in these ranks."""
    assert [rank["forks"] for rank in ranks] == [[], []]
