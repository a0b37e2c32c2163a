"""Command-line flags and environment variables of the Megatron adapter.

====================================  ==================================  ========================================
flag                                  environment                         meaning
====================================  ==================================  ========================================
``--ckpt-engine {threads,stock}``     ``CKPT_ENGINE``                     who writes; stock unless set
``--ckpt-engine-writers N``           ``CKPT_ENGINE_WRITERS``             writer threads
``--ckpt-engine-staging-budget SIZE`` ``CKPT_ENGINE_STAGING_BUDGET``      ``auto``, bytes, or ``512M``, ``8G``
``--ckpt-engine-extent-bytes SIZE``   ``CKPT_ENGINE_EXTENT_BYTES``        one write
``--ckpt-engine-direct-io MODE``      ``CKPT_ENGINE_DIRECT_IO``           ``auto``, ``on``, ``off``
``--ckpt-engine-checksum MODE``       ``CKPT_ENGINE_CHECKSUM``            ``on``, ``off``
``--ckpt-engine-retries N``           ``CKPT_ENGINE_RETRIES``             after transient errors
``--ckpt-engine-commit-timeout S``    ``CKPT_ENGINE_COMMIT_TIMEOUT``      seconds without progress
====================================  ==================================  ========================================

A flag wins over the environment, which wins over the defaults of :class:`ckpt_engine.EngineConfig`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size, expected bytes or something like 512M or 8G")
    return int(match[1]) * _UNITS[match[2].upper()]


def _budget(text: str) -> int | str:
    return "auto" if text.strip().lower() == "auto" else _size(text)


def _switch(text: str) -> bool:
    try:
        return {"on": True, "off": False}[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{text!r}, expected on or off") from None


def _switch_or_auto(text: str) -> bool | str:
    return "auto" if text.strip().lower() == "auto" else _switch(text)


#: Field of EngineConfig: (parser of its text, what the help says).
_OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "writers": (int, "threads that checksum and write"),
    "staging_budget": (_budget, "host memory that the engine may hold on this rank: auto, bytes, or 512M, 8G"),
    "extent_bytes": (_size, "size of one write"),
    "direct_io": (_switch_or_auto, "O_DIRECT: auto, on, off"),
    "checksum": (_switch, "CRC-32 of every item: on, off"),
    "retries": (int, "times that a write is tried again after a transient error"),
    "commit_timeout": (float, "seconds to wait for storage that takes no bytes, and for other ranks"),
}

_MODES = ("threads", "stock")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags; returns the parser, so that it can be Megatron's ``extra_args_provider``."""
    group = parser.add_argument_group("ckpt_engine", "checkpoints written by threads of the trainer")
    group.add_argument(
        "--ckpt-engine",
        choices=_MODES,
        default=None,
        help="who writes checkpoints; CKPT_ENGINE in the environment, or stock",
    )
    for name, (parse, help_text) in _OPTIONS.items():
        group.add_argument(f"--ckpt-engine-{name.replace('_', '-')}", type=parse, default=None, help=help_text)
    return parser


def wanted(args: Any = None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the flag, or else the environment, asks for threads.

    Raises:
        ConfigError: ``CKPT_ENGINE`` has a value that means nothing.
    """
    mode = getattr(args, "ckpt_engine", None) or environ.get("CKPT_ENGINE", "").strip().lower() or "stock"
    if mode not in _MODES:
        raise ConfigError(f"CKPT_ENGINE is {mode!r}, expected one of {', '.join(_MODES)}", phase="config")
    return bool(mode == "threads")


def config_from_args(args: Any = None, environ: Mapping[str, str] = os.environ) -> EngineConfig:
    """The settings in parsed arguments and the environment.

    Raises:
        ConfigError: one of them is unusable; the message names it.
    """
    found: dict[str, Any] = {}
    for name, (parse, _) in _OPTIONS.items():
        value = getattr(args, f"ckpt_engine_{name}", None)
        variable = f"CKPT_ENGINE_{name.upper()}"
        if value is None and environ.get(variable, "").strip():
            try:
                value = parse(environ[variable])
            except ValueError as error:
                raise ConfigError(f"{variable} is {environ[variable]!r}: {error}", phase="config") from error
        if value is not None:
            found[name] = value
    return EngineConfig(**found)
