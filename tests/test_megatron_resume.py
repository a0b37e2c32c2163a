"""Promises about resuming under Megatron-LM: ``train_state.pt`` counts, its tracker is never torn, whenever it is imported.

The real ``save_checkpoint`` and ``load_checkpoint`` run, unmodified, on two ranks; all scenarios of a version in one pair of
processes, since most of the time goes into importing Megatron (:mod:`tests.megatron_resume`). The tests look at what came out.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.integrations.megatron import tracker
from tests import megatron_wheels
from tests.megatron_resume import (
    FLAGS,
    LEGACY,
    LEGACY_FLOPS,
    OTHER,
    OTHER_FLOPS,
    TRACKER,
    crashing,
    everything,
    odd_import,
)
from tests.ranks import Died, run_ranks

pytestmark = pytest.mark.timeout(240)

VERSIONS = ("0.17.1", "0.18.2", "0.19.2") if os.environ.get("CKPT_ENGINE_MEGATRON") == "all" else ("0.19.2",)

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=VERSIONS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What both ranks found in one version."""
    folder = megatron_wheels.unpacked("megatron-core", request.param)
    return run_ranks(2, everything, folder, str(tmp_path_factory.mktemp("resume")), timeout=220.0)


def each(ranks: Ranks, name: str) -> list[Any]:
    """What every rank has to have found: the same."""
    assert len(ranks) == 2
    assert _comparable(ranks[0][name]) == _comparable(ranks[1][name])
    return [rank[name] for rank in ranks]


def _comparable(outcome: Any) -> Any:
    if isinstance(outcome, dict):
        return {key: _comparable(value) for key, value in outcome.items() if key != "seconds"}
    return outcome


def resumed(ranks: Ranks, name: str) -> list[Any]:
    """The same for a load that has to work."""
    found = each(ranks, name)
    assert "raised" not in found[0], found[0]["raised"]
    return found


def counters(of: dict[str, int], flops: float, step: int = 5) -> dict[str, Any]:
    """``args`` after a load."""
    return {"iteration": step, "num_floating_point_operations_so_far": flops, **of}


def test_a_sidecar_wins_over_the_fields_of_the_checkpoint(ranks: Ranks) -> None:
    """B103: on every rank, in ``args`` and in what is returned; rank 0 alone reads it."""
    for found in resumed(ranks, "other"):
        assert found["returned"] == (5, OTHER_FLOPS)
        assert found["args"] == counters(OTHER, OTHER_FLOPS)
        assert found["weights"] == [5.0]


def test_flags_are_mirrored_where_args_has_them_and_the_sidecar_knows_them(ranks: Ranks) -> None:
    assert resumed(ranks, "other")[0]["flags"] == {"do_train": True, "do_test": False}
    assert resumed(ranks, "no flags")[0]["flags"] == {"do_train": True}


def test_without_a_sidecar_the_fields_of_the_checkpoint_count(ranks: Ranks) -> None:
    """As stock has it, which leaves ``iteration`` and the FLOPs in ``args`` to its caller."""
    for found in resumed(ranks, "legacy"):
        assert found["returned"] == (5, LEGACY_FLOPS)
        assert found["args"] == {**counters(LEGACY, -1), "iteration": -1}


def test_our_own_sidecar_resumes(ranks: Ranks) -> None:
    assert resumed(ranks, "committed")[0]["returned"] == (5, LEGACY_FLOPS)
    assert ranks[0]["committed"]["args"] == counters(LEGACY, LEGACY_FLOPS)


def test_our_own_sidecar_has_the_schema_of_bridge(ranks: Ranks) -> None:
    """B103: which asks each of its keys for ``.item()``."""
    whole = ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    dtypes = {**dict.fromkeys(whole, torch.int64), **dict.fromkeys(FLAGS, torch.bool)}
    dtypes["floating_point_operations_so_far"] = torch.float64
    assert each(ranks, "keys")[0] == {key: (dtype, ()) for key, dtype in dtypes.items()}


def test_a_sidecar_of_bridge_resumes(ranks: Ranks) -> None:
    """B103: with int32 counters, as of Bridge 0.3, and in a checkpoint without ``args``, as all of Bridge's are."""
    assert resumed(ranks, "int32")[0]["args"] == counters(OTHER, OTHER_FLOPS)
    assert each(ranks, "argless wrote") == [False, False]
    assert resumed(ranks, "argless")[0]["returned"] == (5, OTHER_FLOPS)
    assert ranks[0]["argless"]["args"] == counters(OTHER, OTHER_FLOPS)
    assert each(ranks, "argless samples") == [[48], [48]]


def test_finetuning_is_stocks(ranks: Ranks) -> None:
    """Starts at 0 and leaves the counters of ``args`` alone, whatever the sidecar says or is."""
    for name in ("finetune", "torn, finetune"):
        for found in resumed(ranks, name):
            assert found["returned"] == (0, LEGACY_FLOPS)
            assert found["args"] == dict.fromkeys(counters(LEGACY, 0), -1)
            assert found["weights"] == [5.0]


def test_an_overridden_iteration_wins_over_the_sidecar(ranks: Ranks) -> None:
    """Where the version has that option."""
    found = resumed(ranks, "overridden")[0]
    if found["returned"][0] == 5:
        pytest.skip("no --override-ckpt-iteration in this version")
    assert found["returned"] == (3, OTHER_FLOPS)
    assert found["args"]["consumed_train_samples"] == 24 and found["args"]["skipped_train_samples"] == 0
    assert found["args"]["consumed_valid_samples"] == OTHER["consumed_valid_samples"]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("torn", "CorruptionError", "not a train state"),
        ("key missing", "CorruptionError", "do_valid"),
        ("not the committed one", "CorruptionError", "isn't the one that was committed"),
        ("wrong step", "CorruptionError", "of step 4, expected 5"),
        ("a directory", "StorageError", "can't be read"),
    ],
)
def test_a_sidecar_that_can_not_be_trusted_is_the_same_error_on_every_rank(
    ranks: Ranks, name: str, error: str, words: str
) -> None:
    """B103: neither used nor skipped, and nobody waits for anybody."""
    for found in each(ranks, name):
        assert found["raised"].startswith(f"{error}: ")
        assert words in found["raised"] and "train_state.pt" in found["raised"] and "--ckpt-step" in found["raised"]
        assert found["rank"] == 0 and found["seconds"] < 30


@pytest.mark.parametrize(
    "name", ["latest_train_state.pt", "iter_0000005/train_state.pt", "iter_0000005/ckpt_engine/commit.json"]
)
def test_what_is_not_needed_may_be_missing(ranks: Ranks, name: str) -> None:
    """B103: one after the other is removed."""
    for found in resumed(ranks, f"without {name}"):
        assert found["returned"] == (5, LEGACY_FLOPS) and found["weights"] == [5.0]
        assert {key: found["args"][key] for key in LEGACY} == LEGACY


@pytest.mark.parametrize("name", [".metadata", "common.pt", "iter_0000005"])
def test_what_is_needed_and_missing_is_named(ranks: Ranks, name: str) -> None:
    """B103."""
    if name == "common.pt" and f"without {name}" not in ranks[0]:
        pytest.skip("this version has it in the shards")
    for found in each(ranks, f"without {name}"):
        assert "iter_0000005" in found["raised"]


def test_a_missing_tracker_is_named_with_the_step_that_it_hides(ranks: Ranks) -> None:
    """B103: stock starts from scratch, which it says, but not that there is something to resume from."""
    (first, heard), (second, silent) = (rank["without tracker"] for rank in ranks)
    assert first["returned"] == second["returned"] == (0, 0)
    assert [line for line in heard if TRACKER in line and "step 5" in line] and not silent


def test_a_renamed_checkpoint_resumes_at_its_step(ranks: Ranks) -> None:
    """As under stock: the sidecar and the checkpoint agree."""
    assert resumed(ranks, "renamed")[0]["returned"] == (5, OTHER_FLOPS)


def test_installing_long_before_the_import_is_as_good(ranks: Ranks) -> None:
    """All the other tests have it that way."""
    assert each(ranks, "late") == [True, True]


def test_uninstall_restores_megatron_lm(ranks: Ranks) -> None:
    """In two calls; a new install and a reload change it again."""
    for found in each(ranks, "uninstalled"):
        assert all(found["stock"]), found["stock"]
        assert found["loads"]["returned"] == (5, LEGACY_FLOPS)  # its sidecar is not one: nobody looked
        assert all(found["again"]), found["again"]
        assert found["end"] == [False, False]


def test_the_tracker_is_replaced_in_one_durable_step(ranks: Ranks) -> None:
    """B103: the temporary file is synced, takes the name, and the directory is synced; nobody opens the tracker to write."""
    events = ranks[0]["tracker"]
    (at,) = [n for n, event in enumerate(events) if event.startswith("rename ") and event.endswith(TRACKER)]
    temporary, target = re.fullmatch(r"rename (\S+) to (\S+)", events[at]).groups()  # type: ignore[union-attr]
    assert events[at - 1] == f"sync {temporary}"
    assert events[at + 1] == f"sync {os.path.dirname(target)}"
    assert not [event for event in events if event.startswith("open ") and not event.endswith(" r")]


@pytest.mark.crash
@pytest.mark.parametrize(
    ("asynchronous", "changed", "text"),
    [(False, True, "5"), (True, True, "5"), (False, False, "")],
    ids=["sync", "async", "control"],
)
def test_a_crash_while_the_tracker_is_written_leaves_the_old_one(
    asynchronous: bool, changed: bool, text: str, tmp_path: Path
) -> None:
    """B103. The control is stock's tracker, which is empty then."""
    folder = megatron_wheels.unpacked("megatron-core", VERSIONS[-1])
    outcome = run_ranks(1, crashing, folder, str(tmp_path), asynchronous, changed, timeout=100.0, dies={0})
    assert outcome == [Died(-signal.SIGKILL)]
    assert (tmp_path / "run" / "iter_0000006" / "ckpt_engine" / "commit.json").exists()  # it died after that
    assert (tmp_path / "run" / TRACKER).read_text() == text


@pytest.mark.parametrize("local", [True, False])
def test_multi_storage_client_is_asked_where_a_path_leads(
    local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that looks local may be mapped to object storage: the tracker has to go there, not onto the local disk."""
    package = types.SimpleNamespace(
        resolve_storage_client=lambda path: (types.SimpleNamespace(is_default_profile=lambda: local), path)
    )
    feature = types.SimpleNamespace(is_enabled=lambda: True, import_package=lambda: package)
    module = types.SimpleNamespace(MultiStorageClientFeature=feature)
    monkeypatch.setitem(sys.modules, "megatron.core.msc_utils", module)
    opened = tracker.opener(lambda *_: "stock")(str(tmp_path / TRACKER), "w")
    assert isinstance(opened, tracker.Replacement) if local else opened == "stock"


def test_only_a_tracker_that_is_written_is_replaced(tmp_path: Path) -> None:
    """And only when it is closed, without an error; its link, if it is one, stays."""
    open_ = tracker.opener(open)
    real, path = tmp_path / "real", tmp_path / TRACKER
    real.write_text("5")
    path.symlink_to(real)
    with open_(tmp_path / "other", "w") as other, open_(path) as read:
        assert not isinstance(other, tracker.Replacement) and read.read() == "5"
    with open_(path, "w") as file:
        file.write("6")
        file.flush()
        assert path.read_text() == "5"
    assert path.read_text() == "6" and path.is_symlink()
    with pytest.raises(ValueError, match="on purpose"), open_(path, "w") as file:
        file.write("7")
        raise ValueError("on purpose")
    assert path.read_text() == "6"
    assert sorted(os.listdir(tmp_path)) == [TRACKER, "other", "real"]


def test_an_odd_module_stays_as_it_is(tmp_path: Path) -> None:
    """Its import works; what isn't as expected is named."""
    source = "def _load_base_checkpoint(everything): pass\ndef get_checkpoint_tracker_filename(path): return path + '/latest'\n"
    (found,) = run_ranks(1, odd_import, str(tmp_path), source, init=False)
    assert found["names"] == found["after"] == ["_load_base_checkpoint", "get_checkpoint_tracker_filename"]
    assert len(found["heard"]) == 2
    assert "expected load_dir, args, rank0 too" in found["heard"][0] and TRACKER in found["heard"][1]


def test_an_import_that_fails_fails_as_ever(tmp_path: Path) -> None:
    (found,) = run_ranks(1, odd_import, str(tmp_path), "1 / 0\n", init=False)
    assert found == {"failed": True, "heard": []}
