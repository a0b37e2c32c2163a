"""Promise: a real megatron-core GPT, tensor parallel, killed in the middle of a save, repeats the run that was left alone.

``examples/megatron_gpt.py`` is run as a user runs it, with the wheel of a version on PYTHONPATH. The undisturbed run of its
demo is also what the other tests compare with: Megatron's own savers and loader have to give the same losses, bit for bit,
and each side has to go on from what the other has written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import megatron_wheels

pytestmark = [pytest.mark.timeout(400), pytest.mark.crash]

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = REPOSITORY / "examples" / "megatron_gpt.py"

ALL = os.environ.get("CKPT_ENGINE_MEGATRON") == "all"
VERSIONS = ("0.16.0", "0.17.1", "0.19.2") if ALL else ("0.19.2",)

#: Half a second of training; saves at 4, 8 and 12, the second of which is the one that is killed.
TINY = ["--steps", "12", "--save-every", "4", "--text-bytes", "200000"]

_PATIENCE = 360.0


@dataclasses.dataclass(frozen=True)
class Demo:
    """What ``--demo`` has left: logs of the three trainings and the checkpoints of the second and third."""

    megatron: str
    folder: Path
    status: int
    output: str

    def losses(self, *names: str) -> dict[int, set[float]]:
        return losses(*(self.folder / f"{name}.jsonl" for name in names))


def records(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def losses(*logs: Path) -> dict[int, set[float]]:
    """Every loss that was logged for each step; a step that ran twice has to show the same number twice."""
    found: dict[int, set[float]] = {}
    for log in logs:
        for record in records(log):
            if "step" in record:
                found.setdefault(record["step"], set()).add(record["loss"])
    return found


def environment(megatron: str, **more: str) -> dict[str, str]:
    """Of a process that imports this package and that Megatron, and isn't told otherwise what saves."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_ENGINE")}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), megatron]), "OMP_NUM_THREADS": "1", **more}


@contextlib.contextmanager
def started(arguments: list[str], output: Path, **how: str) -> Iterator[subprocess.Popen[bytes]]:
    """The example in a process of its own, which is gone afterwards with all that it has started."""
    with open(output, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(**how),
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait(timeout=30)


def train(demo: Demo, folder: Path, port: int, name: str, *arguments: str) -> Path:
    """Two ranks, as torchrun would start them, on the checkpoints in ``folder``; returns the log."""
    log, outputs = folder / f"{name}.jsonl", [folder / f"{name}-{rank}.txt" for rank in (0, 1)]
    command = [*TINY, "--save-dir", str(folder / "checkpoints"), "--log", str(log), *arguments]
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(
                    command,
                    outputs[rank],
                    megatron=demo.megatron,
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE="2",
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                    GLOO_SOCKET_IFNAME="lo",
                )
            )
            for rank in (0, 1)
        ]
        end = time.monotonic() + _PATIENCE
        statuses = [process.wait(timeout=max(1.0, end - time.monotonic())) for process in ranks]
    assert statuses == [0, 0], "\n".join(file.read_text()[-3000:] for file in outputs)
    return log


def left_running(folder: Path) -> list[str]:
    """Processes with this folder in their command line, once they had time to end."""
    end = time.monotonic() + 10.0
    while True:
        lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        found = [line for line in lines if str(folder) in line]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


@pytest.fixture(scope="module", params=VERSIONS)
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Undisturbed, killed and resumed, with asynchronous saves on threads."""
    megatron = megatron_wheels.unpacked("megatron-core", request.param)
    root = tmp_path_factory.mktemp("demo")
    folder, output = root / "run", root / "output.txt"
    arguments = ["--demo", "--async-save", "--ckpt-engine-staging-budget", "64M", *TINY, "--save-dir", str(folder)]
    with started(arguments, output, megatron=megatron) as process:
        status = process.wait(timeout=_PATIENCE)
    return Demo(megatron, folder, status, output.read_text())


def test_a_killed_tensor_parallel_gpt_repeats_the_undisturbed_one_bit_for_bit(demo: Demo) -> None:
    """SIGKILL comes after half of a write of the save of step 8."""
    from ckpt_engine.restore.verify import verify_checkpoint

    assert demo.status == 0 and "bit for bit" in demo.output, demo.output
    undisturbed = demo.losses("undisturbed")
    assert sorted(undisturbed) == list(range(1, 13))
    assert all(len(values) == 1 for values in undisturbed.values())
    assert max(undisturbed[12]) < min(undisturbed[1])  # it learns
    assert demo.losses("killed", "resumed") == undisturbed
    killed, resumed = records(demo.folder / "killed.jsonl"), records(demo.folder / "resumed.jsonl")
    assert [record["start"] for record in [*killed, *resumed] if "start" in record] == [0, 4]
    assert [record["saved"] for record in killed if "saved" in record] == [4]
    assert [record["saved"] for record in resumed if "saved" in record] == [8, 12]
    for step in (4, 8, 12):  # 4 is what it was resumed from, 8 the one that had been killed
        report = verify_checkpoint(demo.folder / "checkpoints" / f"iter_{step:07d}")
        assert report.ok and report.step == step, report.problems
    assert (demo.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert not left_running(demo.folder)


@pytest.mark.parametrize("how", [[], ["--async-save"]] if ALL else [[]], ids=lambda how: "async" if how else "sync")
def test_stock_and_threads_go_on_from_each_other_with_the_same_losses(
    demo: Demo, how: list[str], tmp_path: Path, free_port: int
) -> None:
    """Stock loads what threads have written, trains and saves; threads load what stock has written, and go on."""
    from ckpt_engine.restore.verify import verify_checkpoint

    undisturbed = demo.losses("undisturbed")
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(demo.folder / "checkpoints" / "iter_0000004", checkpoints / "iter_0000004")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    log = train(demo, tmp_path, free_port, "stock", *how, "--ckpt-engine", "stock", "--steps", "8")
    assert records(log)[0]["start"] == 4
    assert losses(log) == {step: undisturbed[step] for step in range(5, 9)}
    assert (checkpoints / "iter_0000008" / "metadata.json").exists()
    assert not (checkpoints / "iter_0000008" / "ckpt_engine").exists()
    log = train(demo, tmp_path, free_port, "threads", "--ckpt-engine", "threads")
    assert records(log)[0]["start"] == 8
    assert losses(log) == {step: undisturbed[step] for step in range(9, 13)}
    report = verify_checkpoint(checkpoints / "iter_0000012")
    assert report.ok and report.step == 12, report.problems
    assert not left_running(tmp_path)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    return importlib.import_module("megatron_gpt")


def test_without_megatron_core_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, example: Any) -> None:
    def find_spec(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'megatron'")

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(SystemExit) as caught:
        example.main(["--save-dir", "unused"])
    assert "pip install megatron-core" in str(caught.value) and "\n" not in str(caught.value)


def test_a_tracker_that_names_an_incomplete_checkpoint_is_refused(tmp_path: Path, example: Any) -> None:
    assert example.newest(tmp_path) == 0
    (tmp_path / "iter_0000004").mkdir()
    example.write_tracker(str(tmp_path), 4)
    with pytest.raises(SystemExit, match="not a complete checkpoint"):
        example.newest(tmp_path)
    (tmp_path / "iter_0000004" / "metadata.json").touch()
    assert example.newest(tmp_path) == 4


def test_a_kill_at_a_step_at_which_nothing_is_saved_is_refused(
    capsys: pytest.CaptureFixture[str], example: Any
) -> None:
    with pytest.raises(SystemExit):
        example.parse_arguments(["--save-dir", "unused", "--save-every", "4", "--kill-at", "5"])
    assert "nothing is saved at that step" in capsys.readouterr().err


def test_a_machine_with_cuda_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, example: Any) -> None:
    import torch

    names = ("current_device", "synchronize", "manual_seed", "get_rng_state", "set_rng_state")
    before = [getattr(torch.cuda, name) for name in names]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    importlib.import_module("megatron_on_cpu").prepare()
    assert [getattr(torch.cuda, name) for name in names] == before
    assert "TORCHDYNAMO_DISABLE" not in os.environ and "megatron.core" not in sys.modules
