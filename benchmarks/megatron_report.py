"""From samples of Megatron saves to medians, Markdown tables and goals. Pure: measures nothing, writes nothing.

Ratios are taken within each round, then their median: a machine whose speed drifts doesn't favour anyone.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from benchmarks.report import GIB, MIB, Goal

RAW = "raw O_DIRECT"


@dataclasses.dataclass(frozen=True)
class PeerName:
    """One way to save: the engine's or stock's, of one version. Without a version it is the raw writer."""

    version: str = ""
    engine: bool = False
    asynchronous: bool = False

    def __str__(self) -> str:
        if not self.version:
            return RAW
        if self.engine:
            return f"mcore {self.version} threads {'async' if self.asynchronous else 'sync'}"
        return f"mcore {self.version} stock {'async (temporal queue)' if self.asynchronous else 'sync'}"

    def stock(self, *, asynchronous: bool = False) -> PeerName:
        """The stock save of the same version."""
        return PeerName(self.version, False, asynchronous)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One save.

    Attributes:
        round: 0 for the first save of the processes.
        stall, durable: seconds until ``save`` (and scheduling) returned, and until it was finalised; of the slowest rank.
        cpu: CPU seconds of all ranks and of every process that they started.
        other_cpu: CPU seconds that the rest of the machine used meanwhile, the kernel's own threads included.
        processes: how many the ranks and their forks started.
        cached, written: bytes of the files in the page cache afterwards, and on the disk.
    """

    round: int
    stall: float
    durable: float
    cpu: float
    other_cpu: float
    processes: int
    cached: int
    written: int


@dataclasses.dataclass(frozen=True)
class Row:
    """Medians of a peer, for its first save or for the later ones. ``None``: not applicable or not measured."""

    peer: str
    run: str
    saves: int
    stall: float
    durable: float
    gbps: float
    x_stock: float | None
    x_raw: float | None
    cpu_per_gib: float
    cpu_of_stock: float | None
    processes: float
    memory: int | None
    cache_percent: float
    others: float


@dataclasses.dataclass
class CaseResult:
    """Everything measured for one case. ``memory``: peak of a save that came after the others, above that before any."""

    case: str
    bytes: int
    items: int
    ranks: int
    budget: int | None
    samples: dict[PeerName, list[Sample]]
    memory: dict[PeerName, int]
    failures: dict[PeerName, str]
    load_before: float

    def rows(self) -> list[Row]:
        """Medians, first saves before later ones, in the order in which the peers were given."""
        return [row for run in ("first", "later") for peer in self.samples if (row := self._row(peer, run)) is not None]

    def _row(self, peer: PeerName, run: str) -> Row | None:
        mine = [s for s in self.samples[peer] if (s.round == 0) == (run == "first")]
        if not mine:
            return None
        stock, gib = peer.stock() if peer.version else None, self.bytes / GIB

        def median(of: Callable[[Sample], float]) -> float:
            return statistics.median(of(sample) for sample in mine)

        return Row(
            peer=str(peer),
            run=run,
            saves=len(mine),
            stall=median(lambda s: s.stall),
            durable=median(lambda s: s.durable),
            gbps=median(lambda s: self.bytes / s.durable / 1e9),
            x_stock=self.speed(stock, peer, run),
            x_raw=self.speed(PeerName(), peer, run),
            cpu_per_gib=median(lambda s: s.cpu / gib),
            cpu_of_stock=self.cpu(stock, peer, run),
            processes=median(lambda s: s.processes),
            memory=self.memory.get(peer) if run == "later" else None,
            cache_percent=median(lambda s: 100 * s.cached / self.bytes),
            others=median(lambda s: s.other_cpu / s.durable),
        )

    def speed(self, base: PeerName | None, peer: PeerName, run: str = "later") -> float | None:
        """How many times as fast as ``base``, end to end."""
        return self._ratio(base, peer, run, lambda its, mine: its.durable / mine.durable)

    def cpu(self, base: PeerName | None, peer: PeerName, run: str = "later") -> float | None:
        """CPU as a part of what ``base`` takes."""
        return self._ratio(base, peer, run, lambda its, mine: mine.cpu / its.cpu if its.cpu else 1.0)

    def _ratio(
        self, base: PeerName | None, peer: PeerName, run: str, of: Callable[[Sample, Sample], float]
    ) -> float | None:
        bases = {s.round: s for s in self.samples.get(base, [])} if base else {}
        ratios = [
            of(bases[s.round], s)
            for s in self.samples.get(peer, [])
            if s.round in bases and (s.round == 0) == (run == "first")
        ]
        return statistics.median(ratios) if ratios else None

    def goals(self) -> list[Goal]:
        """The goals that apply to this case. Those of ``gpt`` are against 0.16, which forks a process per bucket."""
        goals = []
        mine = [peer for peer in self.samples if peer.engine]
        if self.case == "gpt":
            base = next((peer.stock() for peer in self.samples if peer.version.startswith("0.16.")), None)
            for peer in mine:
                goals.append(_goal(f"{peer}: speed, x stock sync of 0.16", ">=", 2.0, self.speed(base, peer)))
                goals.append(_goal(f"{peer}: CPU, part of stock sync's of 0.16", "<=", 1 / 3, self.cpu(base, peer)))
        else:
            for peer in mine:
                base = peer.stock(asynchronous=peer.asynchronous)
                kind = "async" if peer.asynchronous else "sync"
                text = f"{peer}: speed from the second save on, x stock {kind} of the same version"
                goals.append(_goal(text, ">=", 5.0, self.speed(base, peer)))
        return goals


def _goal(text: str, sign: str, limit: float, value: float | None) -> Goal:
    measured = "not measured" if value is None else f"{value:.2f}"
    met = None if value is None else (value >= limit if sign == ">=" else value <= limit)
    return Goal(f"{text} {sign} {limit:.3g}", measured, met)


# -- text ------------------------------------------------------------------------------------------------------------

_COLUMNS: Sequence[tuple[str, Callable[[Row], str]]] = (
    ("peer", lambda r: r.peer),
    ("saves", lambda r: f"{r.run} {r.saves}" if r.run == "later" else r.run),
    ("training waits", lambda r: f"{r.stall:.3f} s"),
    ("end to end", lambda r: f"{r.durable:.3f} s"),
    ("GB/s", lambda r: f"{r.gbps:.2f}"),
    ("× stock sync", lambda r: _or_dash(r.x_stock, ".2f")),
    ("× raw", lambda r: _or_dash(r.x_raw, ".2f")),
    ("CPU s/GiB", lambda r: f"{r.cpu_per_gib:.2f}"),
    ("CPU / stock sync", lambda r: _or_dash(r.cpu_of_stock, ".2f")),
    ("processes started", lambda r: f"{r.processes:g}"),
    ("memory +MiB", lambda r: _or_dash(None if r.memory is None else r.memory / MIB, ".0f")),
    ("page cache %", lambda r: f"{r.cache_percent:.1f}"),
    ("others, cores", lambda r: f"{r.others:.1f}"),
)

LEGEND = """\
- training waits: until `dist_checkpointing.save` (and scheduling, for async) returned; end to end: until it was finalised, with
  a trainer that does nothing but wait. Stock syncs its data files and `.metadata`, the engine all files and directories.
- × stock sync, CPU / stock sync: against the synchronous stock save of the same version, × raw: against the raw writer, in speed,
  within the same round.
- CPU and processes started: of all ranks with everything that they start (forks, managers).
- memory: peak of the proportional set size of all these processes in one more save, above that before the first save. The state
  itself, which all peers share, and the raw writer's buffers aren't in it. Nobody changes the state during a save here; where a
  trainer does, each page that it changes is copied for stock's forks, on top.
- others: cores that the rest of the machine kept busy meanwhile (its kernel threads too): the noise in the row.
- Stock's persistent queue is left out: its worker calls `torch.cuda.set_device` and can't run on a machine without a GPU."""


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def render(result: CaseResult) -> str:
    """The table of a case, then the goals."""
    lines = [
        f"## {result.case}: {result.bytes / GIB:.2f} GiB in {result.items} tensors on {result.ranks} rank(s)",
        "",
        f"Staging budget of the engine per rank: {'auto' if result.budget is None else f'{result.budget / MIB:.0f} MiB'}. "
        f"Load average before: {result.load_before:.2f}.",
        "",
    ]
    cells = [[title for title, _ in _COLUMNS]]
    cells += [[text(row) for _, text in _COLUMNS] for row in result.rows()]
    widths = [max(len(row[at]) for row in cells) for at in range(len(_COLUMNS))]
    for number, row in enumerate(cells):
        fields = [f"{cell:{'<' if at < 2 else '>'}{widths[at]}}" for at, cell in enumerate(row)]
        lines.append("| " + " | ".join(fields) + " |")
        if number == 0:
            rules = ["-" * width if at < 2 else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
            lines.append("| " + " | ".join(rules) + " |")
    lines.append("")
    lines += [f"- {peer} FAILED: {message}" for peer, message in result.failures.items()]
    for goal in result.goals():
        verdict = {True: "met", False: "MISSED", None: "-"}[goal.met]
        lines.append(f"- {verdict}: {goal.text}: {goal.measured}")
    return "\n".join(lines)
