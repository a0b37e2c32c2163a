"""Runs one campaign: starts the processes, sets the limit once the model is there, follows, ends what it has started."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tests.soak.cgroups import Deaths, MemoryGroup, memory_group
from tests.soak.sampling import Sampler, Tells, resident
from tests.soak.trainer import MIB, Order
from tests.soak.verdict import Outcome, judge

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
_STOP_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Size of a campaign.

    Attributes:
        head_room: bytes above the model that the limit leaves; by default the budget, and 10 % of model and budget.
        neighbour: bytes that the neighbour grows to; by default what still leaves the engine a third of its budget.
        breath_seconds: time that the neighbour takes to grow.
        deadline: seconds for all of it.
    """

    saves: int
    state_bytes: int = 192 * MIB
    budget: int | Literal["auto"] = 64 * MIB
    extent_bytes: int = 4 * MIB
    restore_every: int = 5
    head_room: int | None = None
    neighbour: int | None = None
    breath_seconds: float = 1.5
    deadline: float = 3600.0

    @property
    def budget_bytes(self) -> int:
        return self.budget if isinstance(self.budget, int) else 64 * MIB

    def room(self, model: int) -> int:
        """What the limit leaves above the model."""
        return self.head_room if self.head_room is not None else self.budget_bytes + (model + self.budget_bytes) // 10

    def neighbour_bytes(self, model: int) -> int:
        if self.neighbour is not None:
            return self.neighbour
        # What stays free of the room: a third of the budget, what the guard leaves alone, and what a save needs beside it.
        return max(self.room(model) - self.budget_bytes // 3 - 10 * self.extent_bytes, 8 * MIB)


def cgroup(plan: Plan, out: Path) -> tuple[Outcome, Sampler, Tells]:
    """In a memory group, next to a neighbour that grows, shrinks and reads.

    Raises:
        Unavailable: no group can be made.
    """
    with memory_group() as group, scratch(out) as directory:
        tells = Tells(out / "cgroup-told.jsonl")
        order = Order(str(out / "cgroup-told.jsonl"), str(group.directory), plan.state_bytes, str(directory))
        with started("tests.soak.trainer", json.dumps(dataclasses.asdict(order)), log=out / "cgroup.log") as trainer:
            wait_for(tells, "ready", trainer, out / "cgroup.log")
            before = group.usage().working_set
            with neighbour(group, plan.neighbour_bytes(before), plan.breath_seconds, directory) as beside:
                model = group.usage().working_set
                limit = model + plan.room(model)
                group.limit(limit)
                with Sampler(trainer.pid, beside.pid, group) as sampler:
                    say(beside)
                    ended = drive(trainer, tells, told(order, plan), plan)
                charged, deaths = group.peak_charged(), group.deaths()
        name = f"cgroup v{group.version} limit"
        outcome = judge(
            "cgroup",
            tells,
            sampler,
            limit=limit,
            limit_name=name,
            model=model,
            state=plan.state_bytes,
            saves=plan.saves,
            deaths=deaths,
            peak_charged=charged,
            monitor_kills=0,
            ended=ended,
        )
        return outcome, sampler, tells


def rlimit(plan: Plan, out: Path) -> tuple[Outcome, Sampler, Tells]:
    """Under ``RLIMIT_AS``. The limit is the process's own, so the trainer itself takes memory and gives it back."""
    with scratch(out) as directory:
        tells = Tells(out / "rlimit-told.jsonl")
        order = Order(str(out / "rlimit-told.jsonl"), "", plan.state_bytes, str(directory))
        with started("tests.soak.trainer", json.dumps(dataclasses.asdict(order)), log=out / "rlimit.log") as trainer:
            wait_for(tells, "ready", trainer, out / "rlimit.log")
            room = plan.room(resident(trainer.pid))
            now = dataclasses.replace(told(order, plan), address_space=room, breathe=plan.budget_bytes // 2)
            with Sampler(trainer.pid, None, None) as sampler:
                ended = drive(trainer, tells, now, plan)
        limits = tells.first("address_limit") or {}
        outcome = judge(
            "rlimit",
            tells,
            sampler,
            limit=int(limits.get("address_limit", 0)),
            limit_name="RLIMIT_AS",
            model=int(limits.get("address_used", 0)),
            state=plan.state_bytes,
            saves=plan.saves,
            deaths=Deaths(0, 0, 0),
            peak_charged=0,
            monitor_kills=0,
            ended=ended,
        )
        return outcome, sampler, tells


# -- parts that other campaigns use as well ----------------------------------------------------------------------------


def told(order: Order, plan: Plan) -> Order:
    """The second part of the order: what to do."""
    return dataclasses.replace(
        order,
        budget=plan.budget,
        extent_bytes=plan.extent_bytes,
        saves=plan.saves,
        restore_every=plan.restore_every,
    )


def drive(trainer: subprocess.Popen[str], tells: Tells, order: Order, plan: Plan) -> str:
    """Has the trainer do it. Returns how it ended, if not well."""
    say(trainer, json.dumps(dataclasses.asdict(order)))
    end = time.monotonic() + plan.deadline
    while trainer.poll() is None:
        if time.monotonic() > end:
            return f"not done in {plan.deadline:.0f} s"
        tells.follow()
        time.sleep(0.05)
    tells.follow()
    return how_it_ended(trainer.returncode)


def how_it_ended(status: int) -> str:
    if status < 0:
        return f"killed by signal {-status} ({signal.Signals(-status).name})"
    return f"ended with status {status}" if status else ""


@contextlib.contextmanager
def started(module: str, *args: str, log: Path, function: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own; at the end it is gone, and everything in its session.

    Args:
        function: of the module, to be called with the module imported rather than run as ``__main__``.
    """
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    program = ["-c", f"from {module} import {function}; {function}()"] if function else ["-m", module]
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, *program, *args],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            cwd=REPOSITORY,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process of :func:`started` and its session, in which is nobody else."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


@contextlib.contextmanager
def neighbour(
    group: MemoryGroup, size: int, seconds: float, directory: Path, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """It is in the group, and begins to grow when it is told to."""
    log = directory.parent / f"{directory.name}-neighbour.log"
    words = (str(group.directory), str(size), str(seconds), str(directory), *options)
    try:
        with started("tests.soak.neighbour", *words, log=log) as process:
            deadline = time.monotonic() + START_SECONDS
            while "up" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the neighbour didn't start: {log.read_text()[-400:]}")
                time.sleep(0.02)
            yield process
    finally:
        log.unlink(missing_ok=True)


def say(process: subprocess.Popen[str], text: str = "go") -> None:
    if process.stdin is None:
        raise RuntimeError("the process has no standard input")
    with contextlib.suppress(BrokenPipeError):  # it is dead; whoever waits for it will see
        process.stdin.write(text + "\n")
        process.stdin.flush()


def wait_for(tells: Tells, key: str, process: subprocess.Popen[str], log: Path) -> None:
    """Waits until the trainer has told ``key``.

    Raises:
        RuntimeError: it has ended, or takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    while tells.first(key) is None:
        tells.follow()
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no {key!r} from the trainer (status {process.poll()}): {log.read_text()[-2000:]}")
        time.sleep(0.02)


@contextlib.contextmanager
def scratch(out: Path) -> Iterator[Path]:
    """A directory for checkpoints next to the results, removed at the end."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="saves-", dir=out, ignore_cleanup_errors=True) as directory:
        yield Path(directory)
