"""``ckpt-engine``: looks at checkpoints and at the places for them, from a shell.

A subcommand is a module here, listed in :data:`COMMANDS`, with two functions::

    def add_parser(commands: Commands) -> None     # makes its parser; sets the default ``run`` to:
    def run(arguments: argparse.Namespace) -> int  # does it; returns the exit status

Exit status of every subcommand: what its ``--help`` says (0 is success), 64 for a wrong call (arguments, a path that isn't
what it has to be), 70 for a failure while running. Python's own 1 and argparse's 2 are never used for errors, since
subcommands give them a meaning.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

from ckpt_engine.cli.output import plain
from ckpt_engine.errors import CheckpointError, ConfigError, NotCommittedError
from ckpt_engine.version import __version__

if TYPE_CHECKING:
    from typing import Any

    Commands = argparse._SubParsersAction[Any]

#: Modules of this package, in the order of ``--help``.
COMMANDS = ("plan",)

#: Exit statuses, as in sysexits.h, and a shell's for an interrupt and for a reader that has gone.
USAGE, SOFTWARE, INTERRUPTED, BROKEN_PIPE = 64, 70, 130, 141

_EXAMPLES = """\
examples:
  ckpt-engine plan /checkpoints --bytes 40G --ranks 8 --keep-last 3
  ckpt-engine plan --help
"""


class Command(Protocol):
    """A module of a subcommand."""

    def add_parser(self, commands: Commands) -> None: ...


class Parser(argparse.ArgumentParser):
    """With status 64 for a wrong call."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: error: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = Parser(
        prog="ckpt-engine",
        description="Looks at checkpoints and at the places for them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ckpt-engine {__version__}")
    parser.add_argument(
        "-v", "--verbose", action="count", default=0, help="log to stderr; twice: more, with tracebacks"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name in COMMANDS:
        cast("Command", importlib.import_module(f"ckpt_engine.cli.{name}")).add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status. Raises only ``SystemExit`` of ``--help`` and of wrong arguments."""
    arguments = make_parser().parse_args(argv)
    level = (logging.ERROR, logging.INFO, logging.DEBUG)[min(arguments.verbose, 2)]
    logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)s %(message)s")
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except (ConfigError, NotCommittedError) as error:
        return _failed(error, USAGE, arguments.verbose)
    except BrokenPipeError:
        # The reader (``| head``) has what it wanted. Without this the interpreter complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # an uncaught one would end with status 1, which means something else
        return _failed(error, SOFTWARE, arguments.verbose)


def _failed(error: Exception, status: int, verbose: int) -> int:
    if verbose >= 2 or not isinstance(error, CheckpointError):
        traceback.print_exception(type(error), error, error.__traceback__)
    else:
        plain(f"ckpt-engine: {error}", sys.stderr)
    return status
