"""The example trainer, run for real: a killed and resumed training repeats an uninterrupted one bit for bit."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

#: Small enough for two cores: a second of training, a few MB of state.
TINY = ["--width", "64", "--layers", "1", "--batch", "2", "--context", "32", "--text-bytes", "200000", "--steps", "8"]


def train(*arguments: str | pathlib.Path, expect_success: bool = True) -> str:
    """Runs train_text.py in a process of its own and returns what it printed."""
    result = subprocess.run(
        [sys.executable, REPOSITORY / "examples" / "train_text.py", *TINY, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},  # the package of this checkout, installed or not
    )
    output = result.stdout + result.stderr
    assert (result.returncode == 0) == expect_success, f"status {result.returncode}\n{output}"
    return output


def losses(log: pathlib.Path) -> dict[int, set[float]]:
    """Every loss that was logged for each step; a step that ran twice has to show the same number twice."""
    found: dict[int, set[float]] = {}
    for line in log.read_text().splitlines():
        record = json.loads(line)
        if "step" in record:
            found.setdefault(record["step"], set()).add(record["loss"])
    return found


def starts(log: pathlib.Path) -> list[int]:
    return [record["start"] for record in map(json.loads, log.read_text().splitlines()) if "start" in record]


def reference_losses(folder: pathlib.Path, *how: str) -> dict[int, set[float]]:
    """Losses of a training that is left alone and saves nothing."""
    log = folder / "reference.jsonl"
    train(*how, "--save-dir", folder / "none", "--save-every", "0", "--log", log)
    found = losses(log)
    assert sorted(found) == list(range(1, 9))
    assert all(len(values) == 1 for values in found.values())
    return found


def killed_and_resumed_losses(folder: pathlib.Path, *how: str) -> dict[int, set[float]]:
    """Losses of the same training, killed while the save of step 6 is on its way, and resumed."""
    log = folder / "killed.jsonl"
    saving = [*how, "--save-dir", folder / "checkpoints", "--save-every", "2", "--log", log]
    train(*saving, "--crash-at-step", "6", expect_success=False)
    train(*saving)
    first, second = starts(log)
    # The kill follows the save call of step 6: that save may have made it to its commit, or only an earlier one.
    assert first == 0
    assert second in (2, 4, 6)
    return losses(log)


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[float]]:
    return reference_losses(tmp_path_factory.mktemp("left_alone"))


@pytest.mark.timeout(400)
@pytest.mark.crash
@pytest.mark.parametrize("engine", ["threads", "torch"])
def test_killed_training_repeats_the_uninterrupted_one_bit_for_bit(
    tmp_path: pathlib.Path, left_alone: dict[int, set[float]], engine: str
) -> None:
    assert killed_and_resumed_losses(tmp_path, "--ckpt-engine", engine) == left_alone


@pytest.mark.timeout(400)
@pytest.mark.crash
@pytest.mark.slow
def test_killed_fsdp2_training_on_two_ranks_repeats_the_uninterrupted_one(tmp_path: pathlib.Path) -> None:
    how = ["--ckpt-engine", "threads", "--nproc", "2", "--parallel", "fsdp2"]
    assert killed_and_resumed_losses(tmp_path, *how) == reference_losses(tmp_path, *how)


@pytest.mark.timeout(60)
def test_a_crash_step_at_which_nothing_is_saved_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    train_text = importlib.import_module("train_text")
    with pytest.raises(SystemExit):
        train_text.parse_arguments(["--save-dir", "unused", "--save-every", "4", "--crash-at-step", "5"])
    assert "nothing is saved at that step" in capsys.readouterr().err
