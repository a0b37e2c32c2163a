"""``ckpt-engine plan``: what a save will take in a directory, before there is anything to save.

The answer of :mod:`ckpt_engine.preflight.estimate`, with an exit status that a job script can go by.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ckpt_engine.cli.output import byte_count, positive, show_json, show_rows
from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import ConfigError
from ckpt_engine.preflight.estimate import RankShapes, estimate, shapes_like, shapes_of_size
from ckpt_engine.staging.guard import local_rank_count

if TYPE_CHECKING:
    from ckpt_engine.cli.main import Commands

#: Exit status for each verdict.
STATUS = {"fits": 0, "fits by streaming": 1, "does not fit": 2}

_DESCRIPTION = """\
Says what a save will take in DIR: files, staging memory, disk (with retention), limits of this
process, and how long it will take, by a trial of about a second that writes at most 256 MiB
to DIR and removes them again.
"""

_EPILOG = """\
exit status:
  0   fits: save() returns as soon as the state is copied
  1   fits by streaming: the state is larger than the staging budget, save() waits for the storage to take the difference
  2   does not fit: the rows "problem" say why, and what is missing
  64  wrong arguments, or a path that isn't what it has to be
  70  failed

sizes: K, M, G, T (or KiB ...) are powers of 1024; KB, MB, GB, TB are powers of 1000

examples:
  ckpt-engine plan /checkpoints --bytes 40G
  ckpt-engine plan /checkpoints --bytes 1.2T --tensors 4000 --ranks 64 --local-ranks 8 --keep-last 3
  ckpt-engine plan /new/place --like /checkpoints/iter_0000100
  ckpt-engine plan /checkpoints --like /megatron/run7 --ranks 16 --staging-budget 2G --json
"""


def add_parser(commands: Commands) -> None:
    """Adds ``plan``."""
    parser = commands.add_parser(
        "plan",
        help="what a save of a given size costs in a directory",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("directory", metavar="DIR", help="where checkpoints will go; needn't exist yet")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--bytes", type=byte_count, metavar="SIZE", help="size of one checkpoint, all ranks together")
    what.add_argument(
        "--like",
        metavar="PATH",
        help="take tensors and ranks from a checkpoint (of this engine, DCP or Megatron), or from the newest one in PATH; reads "
        "its .metadata only and runs no code from it",
    )
    parser.add_argument(
        "--tensors", type=positive, metavar="N", help="with --bytes: tensors that each rank writes (default 1000)"
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="ranks that save together (default 1; with --like: as saved, or else every tensor is split over N)",
    )
    parser.add_argument(
        "--local-ranks",
        type=positive,
        metavar="N",
        help="how many of them share this machine (default LOCAL_WORLD_SIZE, or else 1)",
    )
    parser.add_argument(
        "--keep-last", type=positive, metavar="N", help="checkpoints that retention keeps (default all)"
    )
    parser.add_argument("--keep-every", type=positive, metavar="N", help="steps that are kept for ever: multiples of N")
    parser.add_argument(
        "--staging-budget", type=_budget, default="auto", metavar="SIZE", help='host memory per rank (default "auto")'
    )
    parser.add_argument(
        "--writers", type=positive, default=2, metavar="N", help="writer threads and shard files per rank (default 2)"
    )
    parser.add_argument("--no-probe", action="store_true", help="write nothing and measure nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _budget(text: str) -> int | str:
    return "auto" if text == "auto" else byte_count(text)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; returns :data:`STATUS` of its verdict."""
    config = EngineConfig(
        writers=arguments.writers,
        staging_budget=arguments.staging_budget,
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
    )
    shapes = _shapes(arguments)
    local = arguments.local_ranks or min(local_rank_count(os.environ), len(shapes))
    if local > len(shapes):
        raise ConfigError(
            f"--local-ranks is {local}, expected at most the number of ranks, {len(shapes)}", phase="config"
        )
    report = estimate(arguments.directory, shapes, config, local_ranks=local, probe=not arguments.no_probe)
    if arguments.json:
        show_json(report.as_dict())
    else:
        show_rows(report.title, report.rows())
    return STATUS[report.verdict]


def _shapes(arguments: argparse.Namespace) -> list[RankShapes]:
    if arguments.like is None:
        return shapes_of_size(arguments.bytes, arguments.tensors or 1000, arguments.ranks or 1)
    if arguments.tensors is not None:
        raise ConfigError("--tensors goes with --bytes: with --like the checkpoint tells", phase="config")
    return shapes_like(arguments.like, arguments.ranks)
