"""Megatron-core of several versions, none of them installed, on a machine without a GPU.

:func:`folder` finds the unpacked wheel of a version, or fetches it: the wheels are for Python 3.12, but what saving needs of
them is pure Python, which runs on 3.11 as well. :func:`use` makes this process import it. One process can use one version.

The cache is ``~/.cache/ckpt-engine-tests``, or ``$CKPT_ENGINE_TEST_CACHE``; ``make test`` fills it, too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

_PACKAGE = "megatron-core"
_FETCH_SECONDS = 100


def folder(version: str, given: str | None = None) -> str:
    """The folder to put in front of ``sys.path`` for this version; empty if it is the one installed here.

    Args:
        version: such as ``0.16.0``.
        given: where to look for unpacked wheels (``megatron-core-<version>``) before anywhere else.

    Raises:
        LookupError: it isn't there, and the package registry doesn't give it.
    """
    name = f"{_PACKAGE}-{version}"
    if given and os.path.isdir(os.path.join(given, name)):
        return os.path.join(os.path.abspath(given), name)
    try:
        if importlib.metadata.version(_PACKAGE) == version:
            return ""
    except importlib.metadata.PackageNotFoundError:
        pass
    cache = Path(os.environ.get("CKPT_ENGINE_TEST_CACHE") or Path.home() / ".cache" / "ckpt-engine-tests")
    if not (cache / name).is_dir():
        _fetch(version, cache / name)
    return str(cache / name)


def _fetch(version: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--python-version", "3.12", "--only-binary=:all:", "--dest", scratch, f"{_PACKAGE}=={version}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS)
            reason = f"{done.stdout}\n{done.stderr}".strip()[-400:]
        except subprocess.TimeoutExpired:
            reason = f"pip took more than {_FETCH_SECONDS} s"
        wheels = list(Path(scratch).glob("*.whl"))
        if not wheels:
            raise LookupError(f"{_PACKAGE} {version} is neither in {target.parent} nor to be had with pip: {reason}")
        fresh = Path(scratch) / "fresh"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(fresh)
        try:
            os.rename(fresh, target)  # whole or not there: another run may be looking for it
        except OSError:
            if not target.is_dir():
                raise
            shutil.rmtree(fresh, ignore_errors=True)


# -- what it needs where there is no GPU -----------------------------------------------------------------------------


def use(where: str) -> None:
    """Makes this process import Megatron from ``where``, and able to save CPU tensors over gloo. No package is edited.

    Its save path synchronises with the GPU and puts the small tensors of its collectives there, unconditionally; 0.18 and
    later import triton just as unconditionally.
    """
    import torch

    if where:
        sys.path.insert(0, where)
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    if importlib.util.find_spec("triton") is None:
        # torch looks for triton once and remembers: with the stand-in found it would go on to use it.
        import torch._inductor.runtime.hints
        import torch._inductor.runtime.triton_compat
        import torch.utils._triton

        torch.utils._triton.has_triton_package()
        triton, language = _Decorators("triton"), _Decorators("triton.language")
        vars(triton).update(__version__="0.0.0", language=language)
        sys.modules["triton"], sys.modules["triton.language"] = triton, language


class _Decorators(types.ModuleType):
    """A module in which every name is a decorator that changes nothing."""

    __path__: list[str] = []  # noqa: RUF012 - the import system wants a list here

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def decorator(*args: Any, **_: Any) -> Any:
            return args[0] if args and callable(args[0]) else decorator

        return decorator
