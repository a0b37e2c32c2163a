"""Megatron-core of several versions for the tests: wheels from the package registry, unpacked into a cache, never installed.

The wheels are for Python 3.12, but what the tests need of them is pure Python, which runs on 3.11 as well. A version is
a folder to put in front of ``sys.path`` of a process of its own (:mod:`tests.megatron_shims` says what else that process
needs). The cache is ``~/.cache/ckpt-engine-tests``, or ``$CKPT_ENGINE_TEST_CACHE``.

``CKPT_ENGINE_MEGATRON`` says which versions are tested: ``all``, or a list such as ``0.16.0,0.19.2``; by default the oldest
process-based and the newest thread-based one. Without a registry the tests are skipped, with pip's words for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ALL = ("0.14.0", "0.15.3", "0.16.0", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
DEFAULT = ("0.16.0", "0.19.2")

_FETCH_SECONDS = 100


def versions() -> tuple[str, ...]:
    """The versions to test."""
    wanted = os.environ.get("CKPT_ENGINE_MEGATRON", "")
    if wanted == "all":
        return ALL
    return tuple(part.strip() for part in wanted.split(",") if part.strip()) or DEFAULT


def unpacked(package: str, version: str, *options: str) -> str:
    """The folder with this version; fetched (with these options of pip) if the cache doesn't have it, or the test is skipped."""
    cache = Path(os.environ.get("CKPT_ENGINE_TEST_CACHE") or Path.home() / ".cache" / "ckpt-engine-tests")
    folder = cache / f"{package}-{version}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            fresh = Path(scratch) / "fresh"
            with zipfile.ZipFile(_fetched(f"{package}=={version}", scratch, options)) as wheel:
                wheel.extractall(fresh)
            try:
                os.rename(fresh, folder)  # whole or not there: another run may be looking for it
            except OSError:
                if not folder.is_dir():
                    raise
                shutil.rmtree(fresh, ignore_errors=True)
    return str(folder)


def _fetched(requirement: str, folder: str, options: Sequence[str]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--python-version", "3.12", "--only-binary=:all:", *options, "--dest", folder, requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS)
        reason = f"{done.stdout}\n{done.stderr}".strip()[-400:]
    except subprocess.TimeoutExpired:
        reason = f"pip took more than {_FETCH_SECONDS} s"
    wheels = list(Path(folder).glob("*.whl"))
    if not wheels:
        pytest.skip(f"{requirement} can't be fetched from the package registry: {reason}")
    return wheels[0]
