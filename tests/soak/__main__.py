"""The command: runs the campaigns, prints what they showed, writes ``soak.json`` and ``soak.png``.

Exit status 0: every promise was kept by every campaign that could run; 1: some promise was broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.soak import campaign, ray_campaign
from tests.soak.cgroups import Unavailable
from tests.soak.peers import NAMES, peers, table
from tests.soak.plot import draw
from tests.soak.trainer import MIB

CAMPAIGNS = ("cgroup", "rlimit", "ray", "peers")

#: Saves of each campaign: the full run (about ten minutes on two cores), and the one of two minutes at most.
_FULL = {"cgroup": 1000, "rlimit": 300, "ray": 200, "peers": 5}
_SHORT = {"cgroup": 100, "rlimit": 50, "ray": 30, "peers": 2}

#: Peers of the short run: starting the others takes longer than what they show.
_SHORT_PEERS = ("engine", "dcp_async", "megatron_async")


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    command.add_argument("--short", action="store_true", help="at most two minutes instead of about ten")
    command.add_argument(
        "--campaign", action="append", choices=CAMPAIGNS, help="only this one (may be given more than once)"
    )
    command.add_argument("--saves", type=int, help="number of saves instead of the campaign's own")
    command.add_argument("--state-mib", type=int, default=192, help="full size of the state (default: %(default)s)")
    command.add_argument("--budget-mib", type=int, default=64, help="staging budget (default: %(default)s)")
    command.add_argument(
        "--out", type=Path, default=Path("build/soak"), help="directory for results (default: %(default)s)"
    )
    return command


def main(words: list[str] | None = None) -> int:
    options = parser().parse_args(words)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    counts = _SHORT if options.short else _FULL
    runs: list[Any] = []
    compared: list[Any] = []
    skipped: dict[str, str] = {}
    begin = time.monotonic()
    for name in options.campaign or CAMPAIGNS:
        plan = campaign.Plan(
            saves=options.saves or counts[name],
            state_bytes=options.state_mib * MIB,
            budget=options.budget_mib * MIB,
            restore_every=5 if options.short else 20,
        )
        print(f"{name}: {plan.saves} saves ...", flush=True)
        try:
            if name == "peers":
                compared = peers(plan, out, _SHORT_PEERS if options.short else tuple(NAMES))
                print("\n".join(table(compared)), flush=True)
            else:
                runs.append(_campaign(name)(plan, out))
                print(runs[-1][0].line(), flush=True)
        except Unavailable as reason:
            skipped[name] = str(reason)
            print(f"{name}: skipped: {reason}", flush=True)
    result = {
        "campaigns": [
            {**dataclasses.asdict(outcome), "samples": sampler.figures(), "told": tells.lines}
            for outcome, sampler, tells in runs
        ],
        "peers": [dataclasses.asdict(one) for one in compared],
        "skipped": skipped,
        "seconds": time.monotonic() - begin,
    }
    (out / "soak.json").write_text(json.dumps(result))
    if runs:
        try:
            draw(runs, out / "soak.png")
            print(f"{out / 'soak.png'}: memory over time; {out / 'soak.json'}: all figures", flush=True)
        except Unavailable as reason:
            print(reason)
    print(f"{time.monotonic() - begin:.0f} s in all")
    broken = [outcome.campaign for outcome, _, _ in runs if outcome.problems]
    if broken:
        print(f"promises broken by: {', '.join(broken)}")
    return 1 if broken else 0


def _campaign(name: str) -> Callable[[campaign.Plan, Path], Any]:
    return {"cgroup": campaign.cgroup, "rlimit": campaign.rlimit, "ray": ray_campaign.ray}[name]


if __name__ == "__main__":
    sys.exit(main())
