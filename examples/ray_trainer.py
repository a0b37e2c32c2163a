"""Ray actors train a small language model together; one is killed during a save, restarted by Ray, and nothing is lost.

    pip install "ckpt-engine[ray]"
    python examples/ray_trainer.py
    python examples/ray_trainer.py --nproc 3 --steps 40 --save-every 5

Each actor is a rank (DDP over gloo). What a Ray trainer finds itself in is all there: methods run on threads of Ray's, never
on the main one, so no signal handler can be installed; ``OMP_NUM_THREADS`` is 1; variables come through ``runtime_env``; and
the memory monitor watches. Then, with a save on its way, one actor is killed:

* the checkpoint before stays the latest;
* the others get a ``CommitTimeoutError`` that names the silent rank, by the deadline, and live on;
* Ray starts the actor again, all make a new group, resume from the newest committed checkpoint, and have to end with the
  losses of a training that nobody has disturbed, equal as numbers.

Exit status 0 if all of that came true, 1 if not.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import random
import secrets
import shutil
import sys
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from demo import committed_steps, draw, step_of, table
from textmodel import Batches, load_text
from train_text import build

from ckpt_engine import CheckpointEngine, CheckpointError, CommitTimeoutError, EngineConfig, RngState, TrainState

#: Longest that one call of an actor may take.
PATIENCE_SECONDS = 180.0

#: Kills until one hits a save that is half written.
ATTEMPTS = 4

#: What the last rank's error may come later than the deadline, on a busy machine.
SLACK_SECONDS = 5.0


@dataclasses.dataclass
class Outcome:
    """How one call of ``Trainer.train`` went on one rank."""

    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    stalls: list[float] = dataclasses.field(default_factory=list)
    error: str = ""
    silent_ranks: tuple[int, ...] = ()
    waited: float = 0.0


class Trainer:
    """One rank, as a Ray actor."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.options = rank, options
        self.engine: CheckpointEngine | None = None
        torch.use_deterministic_algorithms(True)

    def start(self, attempt: str, save_dir: str | None) -> int:
        """Joins a new group, builds everything anew, and resumes if there is something to resume from. Returns the step."""
        from ckpt_engine.integrations.ray import join_group

        self.stop()
        options = self.options
        join_group(self.rank, options.nproc, attempt, timeout=PATIENCE_SECONDS / 2)
        torch.manual_seed(options.seed)  # the same weights on every rank, then a random stream of its own for each
        model, self.training = build(options, 1)
        # DDP regroups gradients after its first step, which is another one after a resume; among three ranks that changes the
        # order of sums, and so their last bits. With this option it doesn't.
        self.called = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        random.seed(options.seed * 1009 + self.rank)
        torch.manual_seed(options.seed * 1009 + self.rank)
        text = load_text(1 << 20)
        self.batches = Batches(text, batch=options.batch, context=options.context, seed=options.seed, rank=self.rank)
        self.state = {
            "model": self.training.model,
            "optim": self.training.optimizer,
            "sched": self.training.schedule,
            "rng": RngState(),
        }
        self.step = 0
        if save_dir is None:
            return 0
        self.engine = CheckpointEngine(save_dir, EngineConfig(commit_timeout=options.commit_timeout))
        restored = self.engine.restore(self.state)
        self.step = restored.step if restored else 0
        return self.step

    def train(self, until: int) -> Outcome:
        """Trains and saves. If another rank goes away, tells what became of the save that was on its way."""
        outcome = Outcome()
        try:
            while self.step < until:
                self.step += 1
                outcome.losses[self.step] = self.train_one_step()
                if self.engine is not None and self.step % self.options.save_every == 0:
                    started = time.perf_counter()
                    self.engine.save(self.state, step=self.step, train_state=TrainState(step=self.step))
                    outcome.stalls.append(time.perf_counter() - started)
            if self.engine is not None:
                self.engine.wait(timeout=PATIENCE_SECONDS)
        except CheckpointError as error:
            self.report(outcome, error)
        except RuntimeError as error:  # gloo: the connection to a rank is gone
            outcome.error = f"RuntimeError: {str(error).splitlines()[0]}"
            started = time.perf_counter()
            try:
                if self.engine is not None:
                    self.engine.wait(timeout=PATIENCE_SECONDS)
            except CheckpointError as lost:
                self.report(outcome, lost)
            outcome.waited = time.perf_counter() - started
        return outcome

    @staticmethod
    def report(outcome: Outcome, error: CheckpointError) -> None:
        outcome.error = f"{type(error).__name__}: {error.message}"
        if isinstance(error, CommitTimeoutError):
            outcome.silent_ranks = error.silent_ranks

    def train_one_step(self) -> float:
        tokens, targets = self.batches.at(self.step)
        loss = self.called(tokens, targets)
        self.training.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.training.optimizer.step()
        self.training.schedule.step()
        return loss.item()  # of this rank's own text

    def stop(self) -> None:
        """Leaves engine and group; whatever was wrong with them has been said."""
        if self.engine is not None:
            try:
                self.engine.close(timeout=PATIENCE_SECONDS)
            except CheckpointError:
                pass
        self.engine = self.called = self.training = self.state = None  # type: ignore[assignment]
        if dist.is_initialized():
            dist.destroy_process_group()

    def around(self) -> dict[str, str]:
        """Where this rank finds itself."""
        import psutil

        from ckpt_engine.integrations.ray import memory_monitor

        main = threading.current_thread() is threading.main_thread()
        budget = "" if self.engine is None else self.engine.memory().explain().partition(";")[0]
        return {
            "thread": "the main thread" if main else "a thread of Ray's",
            "omp": os.environ.get("OMP_NUM_THREADS", "unset"),
            "children": str(len(psutil.Process().children(recursive=True))),
            "monitor": str(memory_monitor()),
            "budget": budget,
        }

    def pid(self) -> int:
        return os.getpid()


# -- in the driver -----------------------------------------------------------------------------------------------------


class Team:
    """All ranks, seen from the driver."""

    def __init__(self, ray: Any, options: argparse.Namespace, paths: list[str]) -> None:
        self.ray = ray
        actor = ray.remote(
            num_cpus=1,
            max_concurrency=2,  # with more than one thread, methods leave the main one to Ray
            max_restarts=ATTEMPTS,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}},
        )(Trainer)
        self.ranks = [actor.remote(rank, options) for rank in range(options.nproc)]

    def call(self, method: str, *args: Any) -> list[Any]:
        result: list[Any] = self.ray.get(self.begin(method, *args), timeout=PATIENCE_SECONDS)
        return result

    def begin(self, method: str, *args: Any) -> list[Any]:
        return [getattr(rank, method).remote(*args) for rank in self.ranks]

    def wait_for_restart(self) -> None:
        """While an actor is being restarted, its calls fail."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self.call("pid")
                return
            except self.ray.exceptions.RayActorError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


@dataclasses.dataclass(frozen=True)
class Kill:
    """A save that lost a rank."""

    step: int
    latest: int
    outcomes: list[Outcome]
    seconds: float


def kill_during_save(team: Team, directory: pathlib.Path, options: argparse.Namespace, commits: int) -> Kill | None:
    """Trains on, lets some saves commit, and kills the last rank while the next is written. None if that came too late."""
    first = max(committed_steps(directory), default=0)
    running = team.begin("train", options.steps)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        committed = committed_steps(directory)
        unfinished = [step_of(path) for path in directory.glob("iter_*.tmp-*")]
        new = [step for step in unfinished if step not in committed]
        if new and sum(step > first for step in committed) >= commits:
            break
        if team.ray.wait(running, timeout=0)[0] or time.monotonic() > deadline:
            team.ray.get(running, timeout=PATIENCE_SECONDS)
            return None  # trained to the end, and no save was seen half-way
        time.sleep(0.0005)
    killed = time.monotonic()
    team.ray.kill(team.ranks[-1], no_restart=False)
    outcomes: list[Outcome] = team.ray.get(running[:-1], timeout=PATIENCE_SECONDS)
    seconds = time.monotonic() - killed
    try:
        team.ray.get(running[-1], timeout=PATIENCE_SECONDS)
    except team.ray.exceptions.RayActorError:
        pass
    latest = max(committed_steps(directory))
    return Kill(new[0], latest, outcomes, seconds) if new[0] > latest else None


def run(ray: Any, options: argparse.Namespace, directory: pathlib.Path, paths: list[str]) -> bool:
    team = Team(ray, options, paths)
    problems: list[str] = []

    def need(good: bool, problem: str) -> None:
        if not good:
            problems.append(problem)

    print(f"1. Reference: {options.nproc} actors train {options.steps} steps without a checkpoint", flush=True)
    team.call("start", "reference", None)
    reference: list[dict[int, float]] = [outcome.losses for outcome in team.call("train", options.steps)]
    curve = [reference[0][step] for step in sorted(reference[0])]
    print(f"   loss {curve[0]:.3f} → {curve[-1]:.3f}  {draw(curve)}", flush=True)

    print(f"2. The same, saved every {options.save_every} steps; one actor is killed during a save", flush=True)
    kill = None
    for attempt in range(1, ATTEMPTS + 1):
        team.call("start", f"attempt {attempt}", str(directory))
        kill = kill_during_save(team, directory, options, commits=2 if attempt == 1 else 1)
        if kill is not None:
            break
        print("   that save was over before the actor died; once more, from the last commit", flush=True)
        team.wait_for_restart()
    if kill is None:
        print(f"   no save was caught half-way in {ATTEMPTS} attempts: make the model larger (--width, --layers)")
        return False
    lost = options.nproc - 1
    print(f"   rank {lost} killed while step {kill.step} was written; {kill.latest} is still the latest checkpoint")
    for rank, outcome in enumerate(kill.outcomes):
        print(f"   rank {rank}: {outcome.error}", flush=True)
        need(outcome.silent_ranks == (lost,), f"rank {rank} was not told that rank {lost} is silent")
    # A deadline for the votes; on the others' side they are in when their own bytes are written.
    need(kill.seconds < options.commit_timeout + SLACK_SECONDS, f"the error took {kill.seconds:.1f} s")

    print("3. Ray restarts the actor; all resume from the newest committed checkpoint", flush=True)
    survivors = team.ray.get([rank.pid.remote() for rank in team.ranks[:-1]], timeout=PATIENCE_SECONDS)
    team.wait_for_restart()
    resumed = team.call("start", "after the kill", str(directory))
    need(set(resumed) == {kill.latest}, f"resumed from {resumed}, expected {kill.latest}")
    last = team.call("train", options.steps)
    need(not any(outcome.error for outcome in last), f"after the restart: {[outcome.error for outcome in last]}")
    need(team.call("pid")[:-1] == survivors, "a survivor's process was replaced")
    around = team.call("around")[0]
    need(around["children"] == "0", f"{around['children']} child processes")
    need(around["thread"] != "the main thread", "methods ran on the main thread")
    team.call("stop")
    seen = [
        (rank, *loss) for run in (kill.outcomes, last) for rank, one in enumerate(run) for loss in one.losses.items()
    ]
    problems += [
        f"rank {rank}, step {step}: loss {loss!r}, undisturbed {reference[rank].get(step)!r}"
        for rank, step, loss in seen
        if loss != reference[rank].get(step)
    ]
    repeated = sorted(set(kill.outcomes[0].losses) & set(last[0].losses))
    missing = set(reference[0]) - set(last[0].losses) - set(range(kill.latest + 1))
    need(not missing, f"steps {sorted(missing)} were never run")
    stalls = sorted(stall for outcome in (*kill.outcomes, *last) for stall in outcome.stalls)
    print()
    print(
        table(
            [
                ("steps", f"{options.steps}, lost in the save of {kill.step}, resumed from {kill.latest}"),
                ("steps done twice", f"{repeated or 'none'}"),
                ("told of the loss", f"after {kill.seconds:.1f} s (--commit-timeout {options.commit_timeout:g})"),
                ("losses compared", f"{len(seen)}, of all ranks"),
                (
                    "training stands still",
                    f"{stalls[len(stalls) // 2] * 1e3:.0f} ms a save (median)" if stalls else "-",
                ),
                ("save() runs on", f"{around['thread']}, OMP_NUM_THREADS={around['omp']}"),
                ("child processes", around["children"]),
                ("checkpoints", f"{committed_steps(directory)}"),
                ("Ray", around["monitor"].partition(" (settings")[0]),
                ("engine", around["budget"]),
            ]
        )
    )
    print()
    for problem in problems[:10]:
        print(f"   {problem}")
    print("NOT GOOD" if problems else "good: the losses are those of an undisturbed training, number for number")
    return not problems


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nproc", type=int, default=2, help="actors")
    add("--steps", type=int, default=20)
    add("--save-every", type=int, default=4, help="steps between saves")
    add("--commit-timeout", type=float, default=6.0, help="seconds that a save waits for a rank")
    add("--save-dir", default=None, help="where checkpoints go; a temporary folder otherwise")
    add("--width", type=int, default=384, help="width of the model, a multiple of 64")
    add("--layers", type=int, default=4)
    add("--batch", type=int, default=2, help="windows of text per rank and step")
    add("--context", type=int, default=32, help="bytes in a window")
    add("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.nproc < 2:
        parser.error("--nproc must be at least 2: one is killed, and somebody has to notice")
    if options.save_every < 1 or options.steps < 4 * options.save_every:
        parser.error("--steps has to be at least four times --save-every: two saves, one that fails, and some more")
    return argparse.Namespace(**vars(options), dropout=0.1, lr=1e-3)  # what build() asks for


def main(argv: list[str]) -> int:
    options = parse_arguments(argv)
    try:
        import ray
    except ImportError:
        print('Ray is not installed. Cure: pip install "ckpt-engine[ray]"', file=sys.stderr)
        return 1
    scratch = pathlib.Path(
        tempfile.mkdtemp(prefix="ckpt-")
    )  # short: Ray puts sockets below it, and their paths have a limit
    directory = pathlib.Path(options.save_dir or scratch / "checkpoints").absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if committed_steps(directory):
        raise SystemExit(f"{directory} has checkpoints already; name another folder with --save-dir")
    paths = [
        os.path.abspath(entry or ".") for entry in sys.path
    ]  # this folder's modules, and the package if not installed
    # Ray would make a key for this cluster and leave it in the home directory.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
    try:
        ray.init(
            address="local",
            num_cpus=options.nproc,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 << 20,
            _temp_dir=str(scratch / "ray"),
        )
        good = run(ray, options, directory, paths)
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
