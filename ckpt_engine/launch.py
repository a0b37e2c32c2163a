"""Runs an unchanged training script with the engine installed into Megatron.

    torchrun ... -m ckpt_engine.launch pretrain_gpt.py --ckpt-engine threads --ckpt-engine-writers 4 <the script's arguments>
    torchrun ... -m ckpt_engine.launch -m package.train --ckpt-engine threads ...

Takes its own flags (:mod:`ckpt_engine.integrations.megatron.flags`) out of the arguments; the script sees the rest.
``CKPT_ENGINE`` in the environment does the same as the flag. With ``stock``, or nothing, the script just runs.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from ckpt_engine.integrations.megatron import flags, install

_USAGE = (
    "usage: python -m ckpt_engine.launch {SCRIPT | -m MODULE} [--ckpt-engine threads ...] [arguments of the script]"
)


def main(arguments: Sequence[str]) -> None:
    """Installs what the flags say, and runs the script as ``__main__`` in this process."""
    rest = list(arguments)
    as_module = rest[:1] == ["-m"]
    if as_module:
        del rest[0]
    if not rest or rest[0].startswith("-"):
        raise SystemExit(_USAGE)
    target = rest.pop(0)
    # No abbreviations: "--ckpt" is the script's.
    parser = flags.add_arguments(argparse.ArgumentParser(prog="ckpt_engine.launch", add_help=False, allow_abbrev=False))
    own, rest = parser.parse_known_args(rest)
    if flags.wanted(own):
        install(flags.config_from_args(own))
    sys.argv = [target, *rest]
    if as_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(target))
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
