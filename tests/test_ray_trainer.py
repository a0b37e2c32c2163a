"""``examples/ray_trainer.py``, run for real. Every process that it started has to be gone at the end."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import uuid

import psutil
import pytest

pytest.importorskip("ray")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

_MARK = "CKPT_ENGINE_TEST_RAY"


def run_example(mark: str, *arguments: str, path: str = "", home: str = "") -> tuple[int, str]:
    """Exit status and output. ``mark`` is in the environment of all that it starts."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_ENGINE", "RAY_"))}
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "ray_trainer.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        stdin=subprocess.DEVNULL,
        env={
            **clean,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *([path] if path else [])]),
            "RAY_USAGE_STATS_ENABLED": "0",
            **({"HOME": home, "TMPDIR": home} if home else {}),
            _MARK: mark,
        },
    )
    return done.returncode, done.stdout


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(200)
def test_the_example_resumes_with_equal_losses_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    mark, home = uuid.uuid4().hex, tempfile.mkdtemp(prefix="h-")  # short: Ray's sockets lie below it
    try:
        arguments = ["--steps", "16", "--commit-timeout", "3", "--save-dir", str(tmp_path)]
        status, output = run_example(mark, *arguments, home=home)
        assert status == 0, output
        assert "rank 0: CommitTimeoutError: no word from rank 1" in output
        assert "number for number" in output
        deadline = time.monotonic() + 15
        while (left := marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert [process.name() for process in left] == []
        assert [name for name in os.listdir(home) if "torchinductor" not in name] == []  # it is TMPDIR, too
    finally:
        shutil.rmtree(home, ignore_errors=True)
        for process in marked(mark):
            process.kill()


def test_without_ray_the_example_says_what_to_install(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('No module named ray', name='ray')\n")
    status, output = run_example(uuid.uuid4().hex, path=str(tmp_path))
    assert status == 1 and 'pip install "ckpt-engine[ray]"' in output and "Traceback" not in output
