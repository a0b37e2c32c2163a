"""The Ray example, run for real: actors that save as SkyRL does; one dies during a save; a new pair repeats the lost steps.

Every process that Ray has started for it has to be gone at the end, whatever came of the run.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

from tests import megatron_wheels

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(240)

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

#: In the environment of the example, and so of all that it starts.
_MARK = "CKPT_ENGINE_TEST_RAY"


def run_example(mark: str, *arguments: str, megatron: str = "") -> tuple[int, str]:
    """Exit status and output of the example."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_ENGINE", "RAY_"))}
    paths = [str(REPOSITORY), *([megatron] if megatron else [])]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "skyrl_style_ray.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        stdin=subprocess.DEVNULL,
        env={
            **clean,
            "PYTHONPATH": os.pathsep.join(paths),
            "RAY_AUTH_MODE": "disabled",  # it would keep a token in the home directory
            "RAY_USAGE_STATS_ENABLED": "0",
            _MARK: mark,
        },
    )
    return done.returncode, done.stdout


def marked(mark: str) -> list[psutil.Process]:
    """The processes with this mark that are alive."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def mark() -> Iterator[str]:
    """Marks what the example starts. What is left of it afterwards is ended."""
    mark = uuid.uuid4().hex
    yield mark
    for process in marked(mark):
        process.kill()


@pytest.mark.slow
@pytest.mark.crash
def test_a_killed_actor_costs_the_steps_since_the_last_checkpoint_and_no_more(
    mark: str, tmp_path: pathlib.Path
) -> None:
    """B058: saves in Ray actors, off the main thread, finalised by a helper thread. B032: what was cut off isn't loaded."""
    from ckpt_engine.restore.verify import verify_checkpoint

    megatron = megatron_wheels.unpacked("megatron-core", megatron_wheels.versions()[-1])
    status, output = run_example(mark, "--save-dir", str(tmp_path), megatron=megatron)
    assert status == 0, output
    assert "checkpoints by threads of the trainer" in output and "on a thread of Ray's" in output
    assert output.count("child processes: 0\n") == 2
    assert "step 9 is not complete" in output and "resumed from step 6" in output
    assert "the weights are those of an undisturbed training" in output
    assert {path.name: verify_checkpoint(path).ok for path in tmp_path.iterdir()} == {
        "global_step_3": True,
        "global_step_6": True,
        "global_step_9": False,
        "global_step_12": True,
    }
    deadline = time.monotonic() + 15
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [process.name() for process in left] == []


def test_without_megatron_the_example_says_what_to_install(mark: str) -> None:
    if subprocess.run([sys.executable, "-c", "import megatron.core"], capture_output=True, timeout=60).returncode == 0:
        pytest.skip("megatron-core is installed here")
    status, output = run_example(mark)
    assert status == 1 and 'pip install "ckpt-engine[megatron]"' in output and "Traceback" not in output


def test_without_ray_the_example_says_what_to_install(mark: str, tmp_path: pathlib.Path) -> None:
    """A module of that name that can't be imported stands in for a machine without Ray."""
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('No module named ray', name='ray')\n")
    status, output = run_example(mark, megatron=str(tmp_path))
    assert status == 1 and 'pip install "ckpt-engine[ray]"' in output and "Traceback" not in output
