"""The example trainer, run for real: a killed and resumed training repeats an uninterrupted one bit for bit."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

#: Small enough for two cores: half a second of training, a few MB of state.
TINY = ["--width", "64", "--layers", "1", "--batch", "2", "--context", "32", "--text-bytes", "200000"]


def train(*arguments: str, expect_success: bool = True) -> str:
    """Runs train_text.py in a child of its own and returns what it printed."""
    result = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "train_text.py"), *TINY, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
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


def check_killed_run_repeats_reference(tmp_path: pathlib.Path, *how: str) -> None:
    reference, killed = tmp_path / "reference.jsonl", tmp_path / "killed.jsonl"
    checkpoints = ["--save-dir", str(tmp_path / "checkpoints"), "--save-every", "2"]
    train(*how, "--steps", "8", "--save-dir", str(tmp_path / "none"), "--save-every", "0", "--log", str(reference))
    train(
        *(*how, *checkpoints, "--steps", "8", "--crash-at-step", "6", "--log", str(killed)), expect_success=False
    )
    train(*how, *checkpoints, "--steps", "8", "--log", str(killed))

    first, second = starts(killed)
    # The kill follows the save call of step 6: that save may have made it to its commit, or only an earlier one.
    assert first == 0
    assert second in (2, 4, 6)
    expected = losses(reference)
    assert sorted(expected) == list(range(1, 9))
    assert all(len(values) == 1 for values in expected.values())
    assert losses(killed) == expected


@pytest.mark.timeout(120)
@pytest.mark.crash
@pytest.mark.parametrize("engine", ["threads", "torch"])
def test_killed_training_repeats_the_uninterrupted_one_bit_for_bit(tmp_path: pathlib.Path, engine: str) -> None:
    check_killed_run_repeats_reference(tmp_path, "--ckpt-engine", engine)


@pytest.mark.timeout(120)
@pytest.mark.crash
@pytest.mark.slow
def test_killed_fsdp2_training_on_two_ranks_repeats_the_uninterrupted_one(tmp_path: pathlib.Path) -> None:
    check_killed_run_repeats_reference(tmp_path, "--ckpt-engine", "threads", "--nproc", "2", "--parallel", "fsdp2")


@pytest.mark.timeout(60)
def test_a_crash_step_without_a_save_is_refused(tmp_path: pathlib.Path) -> None:
    output = train(
        *("--save-dir", str(tmp_path), "--save-every", "4", "--crash-at-step", "5"), expect_success=False
    )
    assert "nothing is saved at that step" in output
