"""The campaign under Ray: an actor whose limit is the threshold of Ray's memory monitor, not the kernel's."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.soak.campaign import MIB, Plan, drive, neighbour, say, scratch, started, told, wait_for
from tests.soak.cgroups import MemoryGroup, Unavailable, memory_group
from tests.soak.in_ray import Settings
from tests.soak.sampling import Sampler, Tells
from tests.soak.trainer import Order
from tests.soak.verdict import Outcome, judge

#: Ray's own processes, torch and the state have to fit below the threshold, which has to be known before they are there;
#: what they leave is filled by a neighbour that holds still.
_BESIDE_STATE = 2048 * MIB

#: Share of the group's limit that Ray kills above: low, so that the kernel has nothing to do with it.
THRESHOLD = 0.6

#: What the engine keeps away from the threshold, as a share of the whole (``RAY_MARGIN``).
MARGIN = 0.02


def ray(plan: Plan, out: Path) -> tuple[Outcome, Sampler, Tells]:
    """In an actor, next to a neighbour that grows and shrinks, with Ray's monitor at model + budget + 10 %.

    Raises:
        Unavailable: no Ray, no group, or no mount namespace.
    """
    with memory_group() as group, scratch(out) as directory:
        tells = Tells(out / "ray-told.jsonl")
        order = Order(str(out / "ray-told.jsonl"), "", plan.state_bytes, str(directory))
        with in_ray(group, order, out / "ray.log") as (driver, threshold):
            wait_for(tells, "ready", driver, out / "ray.log")
            actor = int(next(tells.all("ready"))["pid"])
            # What Ray itself takes is no part of the model: its 10 % would be most of the room.
            room = plan.room(plan.state_bytes)
            breath = room - plan.budget_bytes // 4 - 4 * plan.extent_bytes
            with neighbour(group, breath, plan.breath_seconds, directory) as beside:
                model = group.usage().working_set
                margin = int(threshold / THRESHOLD * MARGIN)
                fill = threshold - margin - room - model
                if fill < 0:
                    raise Unavailable(f"Ray and the model take {-fill} bytes more than the threshold was made for")
                with neighbour(group, fill, 1.0, directory, "hold") as ballast:
                    say(ballast)
                    until(lambda: group.usage().working_set >= model + 0.95 * fill)
                    model = group.usage().working_set
                    with Sampler(actor, beside.pid, group) as sampler:
                        say(beside)
                        ended = drive(driver, tells, told(order, plan), plan)
                    deaths, charged = group.deaths(), group.peak_charged()
        outcome = judge(
            "ray",
            tells,
            sampler,
            limit=threshold,
            limit_name="Ray's threshold",
            model=model,
            state=plan.state_bytes,
            saves=plan.saves,
            deaths=deaths,
            peak_charged=charged,
            monitor_kills=sum(1 for _ in tells.all("monitor")),
            ended=ended,
        )
        return outcome, sampler, tells


@contextlib.contextmanager
def in_ray(group: MemoryGroup, order: Order, log: Path, peer: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The driver of a Ray in the group, and the bytes that Ray kills above. All of that Ray is gone at the end.

    Raises:
        Unavailable: no Ray, or no mount namespace.
    """
    if importlib.util.find_spec("ray") is None:
        raise Unavailable("Ray isn't installed")
    if os.geteuid() != 0:
        raise Unavailable("a mount namespace, in which Ray sees the group as its container, takes root")
    total = int((order.state_bytes + _BESIDE_STATE) / THRESHOLD)
    group.limit(total)
    settings = Settings(dataclasses.asdict(order), str(group.directory), group.mount, THRESHOLD, peer)
    try:
        with started("tests.soak.in_ray", json.dumps(dataclasses.asdict(settings)), log=log) as driver:
            yield driver, int(total * THRESHOLD)
    finally:
        _empty(group)


def _empty(group: MemoryGroup) -> None:
    """Ends whoever is still in the group: Ray's processes are in sessions of their own, and all were started by the driver."""
    deadline = time.monotonic() + 10
    while (members := group.members()) and time.monotonic() < deadline:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("what was waited for didn't happen")
        time.sleep(0.02)


__all__ = ["in_ray", "ray"]
