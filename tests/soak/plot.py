"""Memory over time, one row for each campaign, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.soak.cgroups import Unavailable
from tests.soak.sampling import Sampler, Tells
from tests.soak.verdict import Outcome

MIB = 1 << 20


def draw(runs: Sequence[tuple[Outcome, Sampler, Tells]], path: Path) -> None:
    """
    Raises:
        Unavailable: matplotlib isn't installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise Unavailable("no plot: matplotlib isn't installed") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(runs), 1, figsize=(12, 4.6 * len(runs)), squeeze=False, layout="constrained")
    for (outcome, sampler, tells), (axes,) in zip(runs, rows, strict=True):
        _row(axes, outcome, sampler, tells)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _row(axes: Any, outcome: Outcome, sampler: Sampler, tells: Tells) -> None:
    samples = [sample for sample in sampler.samples if sample.trainer]
    if not samples:
        return
    begin = samples[0].at
    seconds = [sample.at - begin for sample in samples]

    def curve(name: str, label: str, color: str, **style: Any) -> None:
        values = [getattr(sample, name) / MIB for sample in samples]
        if any(values):
            axes.plot(seconds, values, label=label, color=color, linewidth=1.0, **style)

    curve("address_space" if outcome.campaign == "rlimit" else "working_set", _used(outcome), "tab:blue")
    curve("charged", "group with file cache", "tab:gray", alpha=0.5)
    curve("trainer", "trainer, RSS with shared libraries", "tab:orange")
    curve("neighbour", "neighbour, RSS", "tab:green")
    mapped = [(line["at"] - begin, line["mapped"] / MIB) for line in tells.all("mapped")]
    axes.plot(
        *zip(*mapped, strict=True), label="staging pool, mapped", color="tab:purple", linewidth=1.0
    ) if mapped else None
    rests = [(line["at"] - begin, line["rest"] / MIB) for line in tells.all("rest")]
    if rests:
        axes.plot(
            *zip(*rests, strict=True), ".", label="trainer between saves, without pool", color="black", markersize=2
        )
    axes.axhline(
        outcome.limit / MIB,
        color="tab:red",
        linewidth=1.2,
        label=f"{outcome.limit_name}, {outcome.limit / MIB:.0f} MiB",
    )
    verdict = "kept every promise" if not outcome.problems else "BROKEN: " + "; ".join(outcome.problems)[:90]
    axes.set_title(
        f"{outcome.campaign}: {outcome.saves} saves of up to {outcome.state / MIB:.0f} MiB, budget {outcome.budget / MIB:.0f} MiB; "
        f"{outcome.deaths.out_of_memory} OOM events, {outcome.forks} forks, drift {outcome.drift:+.2f} %; {verdict}",
        fontsize=10,
    )
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)
    axes.legend(loc="center right", fontsize=8)


def _used(outcome: Outcome) -> str:
    return "trainer, address space" if outcome.campaign == "rlimit" else "group without file cache"
