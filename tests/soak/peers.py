"""Stock savers where the engine's campaigns run: the same state, the same rule for the limit. What becomes of them is recorded."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.soak.campaign import MIB, Plan, drive, neighbour, say, scratch, started, told, wait_for
from tests.soak.cgroups import Unavailable, memory_group
from tests.soak.ray_campaign import MARGIN, THRESHOLD, in_ray, until
from tests.soak.sampling import Sampler, Tells
from tests.soak.trainer import Order

#: A stock saver whose process was killed under it may wait for ever.
_SECONDS = 60.0

MEGATRON = "0.19.2"

NAMES = {
    "engine": "ckpt_engine, async",
    "torch": "torch.save",
    "dcp": "torch dcp.save",
    "dcp_async": "torch dcp.async_save",
    "megatron": f"megatron-core {MEGATRON}, sync",
    "megatron_async": f"megatron-core {MEGATRON}, async",
    "engine in Ray": "ckpt_engine, async, Ray actor",
    "dcp_async in Ray": "torch dcp.async_save, Ray actor",
}


@dataclasses.dataclass(frozen=True)
class PeerOutcome:
    """One peer. Sizes in bytes, times in seconds.

    Attributes:
        fate: what became of it, in words.
        peak: the highest working set that was seen, children included; ``extra``: that above the model.
        stall, durable: medians of the saves that ended, or 0.
    """

    peer: str
    fate: str
    limit: int
    model: int
    peak: int
    extra: int
    saves: int
    wanted: int
    kills: int
    stall: float
    durable: float


def peers(plan: Plan, out: Path, names: tuple[str, ...] = tuple(NAMES)) -> list[PeerOutcome]:
    """All of them, one after the other.

    Raises:
        Unavailable: no memory group can be made.
    """
    found = []
    for name in names:
        try:
            found.append(_under_ray(name, plan, out) if name.endswith(" in Ray") else _in_group(name, plan, out))
        except Unavailable as reason:
            if not name.endswith(" in Ray"):
                raise
            found.append(_absent(name, plan, str(reason)))
        except (LookupError, RuntimeError) as error:
            found.append(_absent(name, plan, str(error).strip().splitlines()[-1][:120]))
    return found


def table(outcomes: list[PeerOutcome]) -> Iterator[str]:
    """Lines of a table for people."""
    yield f"{'peer':<34} {'limit':>9} {'model':>9} {'peak':>9} {'above':>8} {'saves':>6} {'kills':>5} {'stall':>7}  what became of it"
    for one in outcomes:
        sizes = [f"{size / MIB:.0f} MiB" for size in (one.limit, one.model, one.peak, one.extra)]
        stall = f"{one.stall:.2f} s" if one.stall else "-"
        yield (
            f"{NAMES[one.peer]:<34} {sizes[0]:>9} {sizes[1]:>9} {sizes[2]:>9} {sizes[3]:>8} "
            f"{one.saves:>3}/{one.wanted:<2} {one.kills:>5} {stall:>7}  {one.fate}"
        )


def _in_group(name: str, plan: Plan, out: Path) -> PeerOutcome:
    folder = ""
    if name.startswith("megatron"):
        from benchmarks import megatron_versions

        folder = megatron_versions.folder(MEGATRON)
    log = out / f"peer-{name}.log"
    with memory_group() as group, scratch(out) as directory:
        tells = _tells(out, name)
        order = _order(out, name, plan, directory, str(group.directory))
        words = (json.dumps(dataclasses.asdict(order)), name, folder)
        with started("tests.soak.peer", *words, log=log, function="run") as process:
            wait_for(tells, "ready", process, log)
            model = group.usage().working_set
            group.limit(limit := model + plan.room(model))
            with Sampler(process.pid, None, group) as sampler:
                ended = drive(process, tells, told(order, plan), dataclasses.replace(plan, deadline=_SECONDS))
            deaths = group.deaths()
    return _outcome(name, plan, tells, sampler, limit, model, ended, deaths.killed, "the kernel")


def _under_ray(name: str, plan: Plan, out: Path) -> PeerOutcome:
    peer = name.removesuffix(" in Ray")
    log = out / f"peer-{peer}-ray.log"
    with memory_group() as group, scratch(out) as directory:
        tells = _tells(out, name)
        order = _order(out, name, plan, directory, "")
        with in_ray(group, order, log, peer) as (driver, threshold):
            wait_for(tells, "ready", driver, log)
            actor = int(next(tells.all("ready"))["pid"])
            model = group.usage().working_set
            fill = threshold - int(threshold / THRESHOLD * MARGIN) - plan.room(plan.state_bytes) - model
            if fill < 0:
                raise Unavailable(f"Ray and the model take {-fill} bytes more than the threshold was made for")
            with neighbour(group, fill, 1.0, directory, "hold") as ballast:
                say(ballast)
                until(lambda: group.usage().working_set >= model + 0.95 * fill)
                model = group.usage().working_set
                with Sampler(actor, None, group) as sampler:
                    ended = drive(driver, tells, told(order, plan), dataclasses.replace(plan, deadline=_SECONDS))
            deaths = group.deaths()
    monitor = sum(1 for _ in tells.all("monitor"))
    if monitor:
        ended = "killed by Ray's memory monitor"
    return _outcome(name, plan, tells, sampler, threshold, model, ended, monitor + deaths.killed, "Ray")


def _outcome(
    name: str, plan: Plan, tells: Tells, sampler: Sampler, limit: int, model: int, ended: str, kills: int, by: str
) -> PeerOutcome:
    saved = list(tells.all("saved"))
    if not ended:
        fate = "survived"
    elif kills and "kill" not in ended:
        fate = f"{by} killed a process of it; {ended}"
    else:
        fate = ended
    peak = sampler.peak("working_set")
    return PeerOutcome(
        peer=name,
        fate=fate,
        limit=limit,
        model=model,
        peak=peak,
        extra=max(peak - model, 0),
        saves=len(saved),
        wanted=plan.saves,
        kills=kills,
        stall=statistics.median([float(line["stall"]) for line in saved]) if saved else 0.0,
        durable=statistics.median([float(line["durable"]) for line in saved]) if saved else 0.0,
    )


def _absent(name: str, plan: Plan, reason: str) -> PeerOutcome:
    return PeerOutcome(name, f"not run: {reason}", 0, 0, 0, 0, 0, plan.saves, 0, 0.0, 0.0)


def _tells(out: Path, name: str) -> Tells:
    return Tells(out / f"peer-{name.replace(' ', '-')}-told.jsonl")


def _order(out: Path, name: str, plan: Plan, directory: Path, group: str) -> Order:
    return Order(
        tells=str(out / f"peer-{name.replace(' ', '-')}-told.jsonl"),
        group=group,
        state_bytes=plan.state_bytes,
        directory=str(directory),
        budget=plan.budget,
        extent_bytes=plan.extent_bytes,
        saves=plan.saves,
    )
