"""What a campaign has to show, and whether it did."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from tests.soak.cgroups import Deaths
from tests.soak.sampling import Sampler, Tells

MIB = 1 << 20

#: The most that the resident memory may drift from the first save to the last, in percent of its level.
MOST_DRIFT = 1.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One campaign. Sizes in bytes.

    Attributes:
        limit: what the group or the address space may hold, and for Ray the threshold of its monitor.
        limit_name: what that is.
        model: what was in use before the engine was there; ``budget``: the most that the engine was granted.
        peak: the highest working set of the group that was seen (``rlimit``: address space of the trainer).
        peak_charged: the same with file cache, as the kernel keeps it; 0 for ``rlimit``.
        peak_mapped, least_mapped: of the staging pool.
        level: resident memory of the trainer between saves, without the pool; ``drift``: percent from the first to the last
            save by linear regression; ``spread``: the farthest from the level that it was after any save.
        forks, children: counted by the trainer; the most that were seen from outside.
        own_refused: maps of the trainer's own that the limit refused.
        base, after: resident memory, descriptors and threads without an engine, before and after.
        problems: promises that were broken; empty is good.
    """

    campaign: str
    limit: int
    limit_name: str
    model: int
    budget: int
    state: int
    extent: int
    seconds: float
    saves: int
    restored: int
    peak: int
    peak_charged: int
    peak_rss: int
    peak_pss: int
    peak_mapped: int
    least_mapped: int
    neighbour: int
    level: int
    drift: float
    spread: int
    deaths: Deaths
    monitor_kills: int
    forks: int
    children: int
    own_refused: int
    base: dict[str, int]
    after: dict[str, int]
    problems: tuple[str, ...]

    def line(self) -> str:
        """The outcome in a few lines."""

        def size(count: int) -> str:
            return f"{count / MIB:.1f} MiB"

        cached = f" (file cache included {size(self.peak_charged)})" if self.peak_charged else ""
        beside = f", neighbour up to {size(self.neighbour)}" if self.neighbour else ""
        killed = f"{self.monitor_kills} kills by Ray's monitor, " if self.campaign == "ray" else ""
        refused = f", own maps refused: {self.own_refused}" if self.campaign == "rlimit" else ""
        return (
            f"{self.campaign}: {self.saves} saves of up to {size(self.state)} in {self.seconds:.0f} s, {self.restored} "
            f"restores bit-exact\n"
            f"  {self.limit_name} {size(self.limit)}, of which {size(self.model)} before the first save; peak {size(self.peak)}"
            f"{cached}{beside}\n"
            f"  trainer: peak RSS {size(self.peak_rss)}, PSS {size(self.peak_pss)}; between saves {size(self.level)}, "
            f"drift {self.drift:+.3f} %, spread {size(self.spread)}; pool {size(self.least_mapped)} to "
            f"{size(self.peak_mapped)} of {size(self.budget)}, extents of {size(self.extent)}\n"
            f"  {self.deaths.out_of_memory} OOM events, {self.deaths.killed} kills, {killed}limit hit "
            f"{self.deaths.limit_hit} times, {self.forks} forks, {self.children} children seen{refused}\n"
            f"  back at the end: descriptors {self.base.get('descriptors')} -> {self.after.get('descriptors')}, threads "
            f"{self.base.get('threads')} -> {self.after.get('threads')}, RSS {size(self.base.get('rss', 0))} -> "
            f"{size(self.after.get('rss', 0))}\n"
            f"  {'kept every promise' if not self.problems else 'BROKEN: ' + '; '.join(self.problems)}"
        )


def judge(
    campaign: str,
    tells: Tells,
    sampler: Sampler,
    *,
    limit: int,
    limit_name: str,
    model: int,
    state: int,
    saves: int,
    deaths: Deaths,
    peak_charged: int,
    monitor_kills: int,
    ended: str,
) -> Outcome:
    """Makes the outcome from what was told and seen.

    Args:
        ended: how the trainer's process ended, if not well.
    """
    end: dict[str, Any] = tells.first("end") or {}
    error = tells.first("error")
    begin = max((at for at, line in enumerate(tells.lines) if "budget" in line and "ruled_by" in line), default=0)
    rests = [line for line in tells.lines[begin:] if "rest" in line]
    series = [(int(line["saved"]), int(line["rest"])) for line in rests]
    mapped = [int(line["mapped"]) for line in tells.lines[begin:] if "mapped" in line and line["in_use"]]
    level = int(statistics.median(rest for _, rest in series)) if series else 0
    spread = max((abs(rest - level) for _, rest in series), default=0)
    drift = 100 * regression(series) / level if level else 0.0
    extent = max((int(line["extent"]) for line in rests), default=0)
    last = max((number for number, _ in series), default=0)
    base, after = end.get("base", {}), end.get("after", {})
    peak_rss = sampler.peak("trainer")
    peak = sampler.peak("working_set") or sampler.peak("address_space")
    seen = max((sample.children for sample in sampler.samples), default=0)
    problems = []

    def need(ok: bool, problem: str) -> None:
        if not ok:
            problems.append(problem)

    need(not ended, ended)
    need(error is None, f"the trainer failed: {str((error or {}).get('error', '')).strip().splitlines()[-1:]}")
    need(bool(end) and end.get("saves") == saves, f"{last} of {saves} saves")
    need(
        deaths.out_of_memory == deaths.killed == 0,
        f"{deaths.out_of_memory} times out of memory, {deaths.killed} killed",
    )
    need(monitor_kills == 0, f"Ray's monitor killed {monitor_kills} times")
    need(end.get("forks", 0) == 0 and seen == 0 and end.get("children", 0) == 0, "processes were started")
    need(not limit_name.startswith("cgroup") or peak_charged <= limit, "the kernel counted more than the limit")
    need(abs(drift) < MOST_DRIFT, f"memory between saves drifts by {drift:+.2f} %")
    need(spread <= extent, f"after a save {spread} bytes off the level, more than one extent ({extent})")
    if end:
        need(after["rss"] - base["rss"] <= extent, f"RSS after close() is {after['rss'] - base['rss']} bytes higher")
        for what in ("descriptors", "threads"):
            need(after[what] <= base[what], f"{after[what]} {what} after close(), {base[what]} before")
    return Outcome(
        campaign=campaign,
        limit=limit,
        limit_name=limit_name,
        model=model,
        budget=max((int(line["budget"]) for line in tells.lines[begin:] if "budget" in line), default=0),
        state=state,
        extent=extent,
        seconds=tells.lines[-1]["at"] - tells.lines[begin]["at"] if tells.lines else 0.0,
        saves=int(end.get("saves", last)),
        restored=int(end.get("restored", sum("restored" in line for line in tells.lines[begin:]))),
        peak=peak,
        peak_charged=peak_charged,
        peak_rss=peak_rss,
        peak_pss=sampler.peak("pss"),
        peak_mapped=max(mapped, default=0),
        least_mapped=min(mapped, default=0),
        neighbour=sampler.peak("neighbour"),
        level=level,
        drift=drift,
        spread=spread,
        deaths=deaths,
        monitor_kills=monitor_kills,
        forks=int(end.get("forks", 0)),
        children=seen,
        own_refused=int(end.get("own_refused", 0)),
        base=base,
        after=after,
        problems=tuple(problems),
    )


def regression(series: Sequence[tuple[float, float]]) -> float:
    """What the line of least squares through the points rises by from the first to the last."""
    if len(series) < 2:
        return 0.0
    line = statistics.linear_regression([x for x, _ in series], [y for _, y in series])
    return line.slope * (series[-1][0] - series[0][0])
