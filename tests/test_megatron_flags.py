"""Promises of the flags, the environment variables and the launcher. Only the test of ``megatron.auto`` needs a Megatron."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_engine import ConfigError, EngineConfig
from ckpt_engine.integrations.megatron import flags
from tests import megatron_wheels

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20


def parsed(*arguments: str) -> argparse.Namespace:
    return flags.add_arguments(argparse.ArgumentParser()).parse_args(arguments)


def test_without_flags_and_environment_stock_writes_with_defaults_ready() -> None:
    args = parsed()
    assert not flags.wanted(args, {})
    assert flags.config_from_args(args, {}) == EngineConfig()


def test_flags_become_settings() -> None:
    args = parsed(
        *("--ckpt-engine", "threads", "--ckpt-engine-writers", "4", "--ckpt-engine-staging-budget", "512M"),
        *("--ckpt-engine-direct-io", "off", "--ckpt-engine-checksum", "off", "--ckpt-engine-extent-bytes", "4MiB"),
        *("--ckpt-engine-retries", "0", "--ckpt-engine-commit-timeout", "30"),
    )
    assert flags.wanted(args, {"CKPT_ENGINE": "stock"})
    assert flags.config_from_args(args, {}) == EngineConfig(
        writers=4,
        staging_budget=512 * MIB,
        direct_io=False,
        checksum=False,
        extent_bytes=4 * MIB,
        retries=0,
        commit_timeout=30.0,
    )


def test_a_flag_wins_over_the_environment() -> None:
    environ = {"CKPT_ENGINE": "threads", "CKPT_ENGINE_WRITERS": "7", "CKPT_ENGINE_STAGING_BUDGET": "64M"}
    config = flags.config_from_args(parsed("--ckpt-engine-writers", "3"), environ)
    assert (config.writers, config.staging_budget) == (3, 64 * MIB)
    assert flags.wanted(None, environ) and not flags.wanted(parsed("--ckpt-engine", "stock"), environ)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"CKPT_ENGINE_STAGING_BUDGET": "much"}, "CKPT_ENGINE_STAGING_BUDGET"),
        ({"CKPT_ENGINE_WRITERS": "0"}, "writers"),
        ({"CKPT_ENGINE_DIRECT_IO": "maybe"}, "CKPT_ENGINE_DIRECT_IO"),
    ],
)
def test_an_unusable_variable_is_named(environ: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        flags.config_from_args(None, environ)


def test_an_unknown_mode_is_refused_not_ignored() -> None:
    """A job that meant "threads" must not train for a week on stock's saver because of a typo."""
    with pytest.raises(ConfigError, match="thread"):
        flags.wanted(None, {"CKPT_ENGINE": "thread"})


SCRIPT = """
import sys
print("name", __name__)
print("arguments", sys.argv[1:])
print("megatron", sorted(name for name in sys.modules if name.startswith("megatron")))
"""


def python(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parent.parent)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_ENGINE")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=folder,
        env={**clean, "PYTHONPATH": root, **environ},
    )


def launch(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "ckpt_engine.launch", *arguments, **environ)


def test_the_launcher_takes_its_own_flags_and_leaves_the_rest(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = launch(
        tmp_path, "train.py", "--ckpt", "a", "--ckpt-engine", "stock", "--lr=1", "--ckpt-engine-writers=3", "x"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["name __main__", "arguments ['--ckpt', 'a', '--lr=1', 'x']", "megatron []"]


def test_the_launcher_says_so_when_there_is_no_megatron(tmp_path: Path) -> None:
    """Threads were asked for: running on with stock's saver would be the silent kind of failure."""
    (tmp_path / "train.py").write_text(SCRIPT)
    if subprocess.run([sys.executable, "-c", "import megatron.core"], capture_output=True, timeout=50).returncode == 0:
        pytest.skip("megatron-core is installed here")
    done = launch(tmp_path, "train.py", CKPT_ENGINE="threads")
    assert done.returncode != 0 and "no Megatron to install into" in done.stderr and "name" not in done.stdout


AUTO = """
import sys
from tests import megatron_shims
megatron_shims.use(sys.argv[1])
import ckpt_engine.megatron.auto
from ckpt_engine.integrations.megatron import seams, session
imported = any(name.startswith("megatron") for name in sys.modules)
print(imported, "megatron-core" in seams.applied(), session.core().config.writers)
"""


@pytest.mark.timeout(170)  # the wheel may have to be fetched
@pytest.mark.parametrize(
    ("environ", "printed"),
    [({"CKPT_ENGINE": "threads"}, "True True 3"), ({}, f"False False {EngineConfig().writers}")],
    ids=["threads", "nothing"],
)
def test_importing_auto_installs_only_if_the_environment_says_so(
    tmp_path: Path, environ: dict[str, str], printed: str
) -> None:
    """With Megatron there in both cases, and a setting, which alone asks for nothing."""
    folder = megatron_wheels.unpacked("megatron-core", megatron_wheels.versions()[-1])
    done = python(tmp_path, "-c", AUTO, folder, CKPT_ENGINE_WRITERS="3", **environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == printed
