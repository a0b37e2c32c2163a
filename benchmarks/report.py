"""From samples to medians, tables and goals. Pure: measures nothing, writes nothing.

Round 0 is the *first* save of a peer (memory not yet mapped, nothing planned); the others are *later* saves, and their
medians are what a training run sees. Ratios to ``raw`` are taken within each round, so that a disk whose speed drifts
over the run doesn't favour anyone.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

GIB = 1 << 30
MIB = 1 << 20

#: Memory beyond the staging budget that a save may need: manifests, stacks of threads, the interpreter's own slack.
RSS_SLACK_BYTES = 32 * MIB


@dataclasses.dataclass(frozen=True)
class Sample:
    """One save that was waited for, with nothing else going on.

    Attributes:
        round: 0 for the first save.
        stall, durable: seconds from the call until it returned, and until the bytes were on the device.
        cpu: CPU seconds of the whole process over the save.
        copy_cpu, copy_seconds: of one plain copy of the same bytes, taken in the same round.
        other_cpu: CPU seconds that the rest of the machine used meanwhile, the kernel's own threads included.
        extra_rss: peak of resident memory above what it was before the save, in bytes.
        cached: bytes of the written files that were in the page cache afterwards.
        written: size of the files.
        figures: what the peer says about itself.
    """

    round: int
    stall: float
    durable: float
    cpu: float
    copy_cpu: float
    copy_seconds: float
    other_cpu: float
    extra_rss: int
    cached: int
    written: int
    figures: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class BusySample:
    """One save with a compute loop on the calling thread until the bytes were durable.

    ``alone`` and ``alone_hiccup``: an average turn of the loop right before, and how much longer the longest one took.
    """

    stall: float
    durable: float
    slowdown: float
    hiccup: float
    alone: float
    alone_hiccup: float


@dataclasses.dataclass(frozen=True)
class Row:
    """Medians of a peer, for its first save or for the later ones. ``None``: not applicable or not measured."""

    peer: str
    run: str
    saves: int
    stall: float
    durable: float
    gbps: float
    x_raw: float | None
    cpu_per_gib: float
    copy_cpu_per_gib: float
    beyond_copy: float | None
    others: float
    extra_rss: float
    cache_percent: float
    slowdown: float | None = None
    hiccup: float | None = None
    busy_durable: float | None = None


@dataclasses.dataclass(frozen=True)
class Goal:
    """A goal of the project and what was measured. ``met`` is ``None`` where a peer that it needs wasn't run."""

    text: str
    measured: str
    met: bool | None


@dataclasses.dataclass
class CaseResult:
    """Everything measured for one case."""

    case: str
    bytes: int
    items: int
    budget: int | None
    samples: dict[str, list[Sample]]
    busy: dict[str, list[BusySample]]
    background: frozenset[str]
    failures: dict[str, str]
    load_before: float

    def rows(self) -> list[Row]:
        """Medians, in the order in which the peers were given."""
        rows = []
        for peer in self.samples:
            rows += [row for run in ("first", "later") if (row := self.row(peer, run)) is not None]
        return rows

    def row(self, peer: str, run: str) -> Row | None:
        """The medians of one peer, or ``None`` where it has no such save."""
        mine = [s for s in self.samples.get(peer, []) if (s.round == 0) == (run == "first")]
        if not mine:
            return None
        gib = self.bytes / GIB

        def median(of: Callable[[Sample], float]) -> float:
            return statistics.median(of(sample) for sample in mine)

        stages = peer in self.background
        busy = self.busy.get(peer, []) if run == "later" else []
        return Row(
            peer=peer,
            run=run,
            saves=len(mine),
            stall=median(lambda s: s.stall),
            durable=median(lambda s: s.durable),
            gbps=median(lambda s: self.bytes / s.durable / 1e9),
            x_raw=self.ratio("raw", peer, run),
            cpu_per_gib=median(lambda s: s.cpu / gib),
            copy_cpu_per_gib=median(lambda s: s.copy_cpu / gib),
            beyond_copy=median(lambda s: (s.cpu - s.copy_cpu) / gib) if stages else None,
            others=median(lambda s: s.other_cpu / s.durable),
            extra_rss=median(lambda s: s.extra_rss),
            cache_percent=median(lambda s: 100 * s.cached / self.bytes),
            slowdown=statistics.median(s.slowdown for s in busy) if busy else None,
            hiccup=max(s.hiccup for s in busy) if busy else None,
            busy_durable=statistics.median(s.durable for s in busy) if busy else None,
        )

    def ratio(self, base: str, peer: str, run: str = "later") -> float | None:
        """How many times as fast as ``base`` the peer was: the median over the rounds in which both saved."""
        bases = {s.round: s.durable for s in self.samples.get(base, [])}
        ratios = [
            bases[s.round] / s.durable
            for s in self.samples.get(peer, [])
            if s.round in bases and (s.round == 0) == (run == "first")
        ]
        return statistics.median(ratios) if ratios else None

    def engine_budget(self) -> int | None:
        """The staging budget that the engine says it had, else the one it was given."""
        for sample in self.samples.get("engine", []):
            if sample.figures.get("budget_bytes"):
                return int(sample.figures["budget_bytes"])
        return self.budget

    def goals(self) -> list[Goal]:
        """The goals that apply to this case."""
        later, engine = self.row("engine", "later"), self.samples.get("engine", [])
        goals = []
        if self.case == "gpt":
            goals.append(_at_least("durable speed of later saves, x raw", 0.85, self.ratio("raw", "engine")))
            goals.append(_at_least("durable speed of later saves, x dcp.save", 1.4, self.ratio("dcp", "engine")))
            beyond = later.beyond_copy if later else None
            goals.append(_at_most("CPU s/GiB beyond the staging copy, later saves", 0.30, beyond))
        if self.case == "small":
            slowest = max((s.durable for s in engine if s.round > 0), default=None)
            goals.append(_at_most("seconds until durable, slowest save from the second on", 1.0, slowest))
        budget = self.engine_budget()
        rss = max((s.extra_rss for s in engine), default=None)
        limit = None if budget is None else (budget + RSS_SLACK_BYTES) / MIB
        text = "peak extra memory of any save, MiB (budget + 32 MiB)"
        if limit is None or rss is None:
            goals.append(Goal(text, "not measured", None))
        else:
            goals.append(_at_most(text, limit, rss / MIB, digits=0))
        cached = max((100 * s.cached / self.bytes for s in engine), default=None)
        goals.append(_at_most("page cache of the written files after any save, % of the bytes", 5.0, cached))
        return goals


def _at_least(text: str, limit: float, value: float | None) -> Goal:
    if value is None:
        return Goal(f"{text} >= {limit:g}", "not measured", None)
    return Goal(f"{text} >= {limit:g}", f"{value:.2f}", value >= limit)


def _at_most(text: str, limit: float, value: float | None, digits: int = 2) -> Goal:
    if value is None:
        return Goal(f"{text} <= {limit:g}", "not measured", None)
    return Goal(f"{text} <= {limit:.{0 if digits == 0 else 2}f}", f"{value:.{digits}f}", value <= limit)


# -- text ------------------------------------------------------------------------------------------------------------

_COLUMNS: Sequence[tuple[str, str, Callable[[Row], str]]] = (
    ("peer", "", lambda r: r.peer),
    ("saves", "", lambda r: f"{r.run} {r.saves}" if r.run == "later" else r.run),
    ("stall", "s", lambda r: f"{r.stall:.3f}"),
    ("durable", "s", lambda r: f"{r.durable:.3f}"),
    ("speed", "GB/s", lambda r: f"{r.gbps:.2f}"),
    ("x raw", "", lambda r: _or_dash(r.x_raw, ".2f")),
    ("CPU", "s/GiB", lambda r: f"{r.cpu_per_gib:.2f}"),
    ("one copy", "s/GiB", lambda r: f"{r.copy_cpu_per_gib:.2f}"),
    ("beyond", "s/GiB", lambda r: _or_dash(r.beyond_copy, ".2f")),
    ("others", "cores", lambda r: f"{r.others:.1f}"),
    ("memory", "+MiB", lambda r: f"{r.extra_rss / MIB:.0f}"),
    ("cached", "%", lambda r: f"{r.cache_percent:.1f}"),
    ("slowdown", "x", lambda r: _or_dash(r.slowdown, ".2f")),
    ("hiccup", "ms", lambda r: _or_dash(None if r.hiccup is None else 1e3 * r.hiccup, ".1f")),
    ("durable", "busy s", lambda r: _or_dash(r.busy_durable, ".3f")),
)

LEGEND = """\
stall      seconds that the call kept the trainer                 CPU       of the whole process, background threads too
durable    seconds until the bytes were on the device             one copy  CPU of one memcpy of the same bytes
x raw      speed as a multiple of raw's in the same round         beyond    CPU minus one copy, for peers that stage
memory     peak of resident memory above that before the save     cached    page cache left by the files, of the bytes
others     cores that the rest of the machine kept busy meanwhile (its kernel threads too): the noise in the row
slowdown   of a compute loop on the calling thread while the save goes on in the background; hiccup: its worst turn;
           durable busy: seconds until durable next to that loop (all other columns: nothing else going on)"""


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def render(result: CaseResult) -> str:
    """The table of a case, what the engine says about its saves, and the goals."""
    budget = result.engine_budget()
    lines = [
        f"== {result.case}: {result.bytes / GIB:.2f} GiB in {result.items} tensors; "
        f"staging budget {'auto' if budget is None else f'{budget / MIB:.0f} MiB'}; "
        f"load average before {result.load_before:.2f}",
        "",
    ]
    rows = result.rows()
    cells = [[title for title, _, _ in _COLUMNS], [unit for _, unit, _ in _COLUMNS]]
    cells += [[text(row) for _, _, text in _COLUMNS] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
    for number, row in enumerate(cells):
        fields = [f"{cell:{'<' if at < 2 else '>'}{widths[at]}}" for at, cell in enumerate(row)]
        lines.append("  ".join(fields).rstrip())
        if number == 1:
            lines.append("  ".join("-" * width for width in widths))
    lines += [f"{peer} FAILED: {message}" for peer, message in result.failures.items()]
    lines += ["", *_figures(result)]
    for goal in result.goals():
        verdict = {True: "met", False: "MISSED", None: "-"}[goal.met]
        lines.append(f"{verdict:<7} {goal.text}: {goal.measured}")
    return "\n".join(lines)


def _figures(result: CaseResult) -> list[str]:
    lines = []
    for sample in result.samples.get("raw", [])[:1]:
        if not sample.figures.get("direct_io", True):
            lines.append("raw: this file system takes no O_DIRECT; its writes were buffered")
    noise = [sample for samples in result.busy.values() for sample in samples]
    if noise:
        alone, worst = statistics.median(s.alone for s in noise), max(s.alone_hiccup for s in noise)
        lines.append(f"compute loop alone: {1e3 * alone:.2f} ms a turn; worst turn {1e3 * worst:.1f} ms more")
    for sample in result.samples.get("engine", []):
        told = []
        for key, value in sample.figures.items():
            if isinstance(value, float):
                told.append(f"{key.removesuffix('_seconds')} {value:.3f}")
            elif key.endswith("_bytes"):
                told.append(f"{key.removesuffix('_bytes')} {value / MIB:.0f} MiB")
            else:
                told.append(f"{key} {value}")
        lines.append(f"engine's own figures, round {sample.round}: " + ", ".join(told))
    return [*lines, ""] if lines else lines
