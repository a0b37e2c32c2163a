"""Kills a trainer in the middle of a save, resumes it, and compares every loss with a run that was left alone.

    python examples/demo.py                                    # what `make demo` runs
    python examples/demo.py --nproc 2 --parallel fsdp2

Three trainings of ``train_text.py`` with the same seed: one to the end without a checkpoint, one that saves every few
steps and gets SIGKILL while a save is being written, and its continuation. The losses have to be equal as numbers, not
just close. Exit status 0 if they are, 1 if they are not or if no save could be caught half-way.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
from device_speed import raw_write_speed

HERE = pathlib.Path(__file__).resolve().parent

#: Longest that one training may take before the demo gives up on it.
DEADLINE_SECONDS = 300.0

#: Trainings that may be killed until one dies with a save half written.
ATTEMPTS = 4


@dataclasses.dataclass(frozen=True)
class Corpse:
    """What a killed save left behind."""

    directory: str
    files: int
    bytes: int
    has_commit_record: bool


class Trainer:
    """One ``train_text.py`` in a child process, and the lines it has logged."""

    def __init__(self, folder: pathlib.Path, name: str, arguments: list[str]) -> None:
        self.log = folder / f"{name}.jsonl"
        self.output = folder / f"{name}.txt"
        with open(self.output, "a", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "train_text.py"), "--log", str(self.log), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self._deadline = time.monotonic() + DEADLINE_SECONDS
        self._family: list[psutil.Process] = []
        atexit.register(self.kill)  # an interrupted demo leaves no trainer behind

    def running(self) -> bool:
        if time.monotonic() > self._deadline:
            self.kill()
            raise SystemExit(f"no end after {DEADLINE_SECONDS:.0f} s; its output is in {self.output}")
        return self._process.poll() is None

    def look(self) -> None:
        """Finds the processes of the training. Slow (it reads all of /proc), so not to be left for the kill itself."""
        try:
            first = psutil.Process(self._process.pid)
            # Workers first: torchrun would end them in an orderly way if it saw the signal before them.
            self._family = [*first.children(recursive=True), first]
        except psutil.NoSuchProcess:
            self._family = []

    def kill(self) -> None:
        """SIGKILL to every process of the training. Nothing happens if it has ended."""
        if self._process.poll() is not None:
            return
        if not self._family:
            self.look()
        for process in self._family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self._process.wait(timeout=60)
        psutil.wait_procs(self._family, timeout=60)

    def finish(self) -> None:
        while self.running():
            time.sleep(0.05)
        if self._process.returncode != 0:
            tail = self.output.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
            raise SystemExit("\n".join([*tail, f"training ended with status {self._process.returncode}"]))


def records(log: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a log; the last one may be cut off by the kill."""
    found = []
    if log.exists():
        for line in log.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                pass
    return found


def kill_during_save(trainer: Trainer, directory: pathlib.Path, saves: int, *, in_call: bool) -> Corpse | None:
    """Lets ``saves`` saves commit, then kills in the middle of the next. None if that one was over already.

    ``in_call``: kill while ``save()`` runs; otherwise once it has returned and training goes on.
    """
    first = max(committed_steps(directory), default=0)
    armed = False
    while trainer.running():
        time.sleep(0.001)
        unfinished = sorted(directory.glob("iter_*.tmp-*"))
        if not armed:
            if not unfinished and sum(step > first for step in committed_steps(directory)) >= saves:
                trainer.look()
                armed = True
            continue
        if not unfinished:
            continue
        step = step_of(unfinished[-1])
        if in_call or any(record.get("step") == step for record in records(trainer.log)):
            trainer.kill()
            return autopsy(directory, step)
    return None


def autopsy(directory: pathlib.Path, step: int) -> Corpse | None:
    left = [path for path in directory.glob("iter_*.tmp-*") if step_of(path) == step]
    if not left or step in committed_steps(directory):
        return None
    files = [path for path in left[-1].rglob("*") if path.is_file()]
    return Corpse(
        left[-1].name,
        len(files),
        sum(path.stat().st_blocks * 512 for path in files),
        any(path.name == "commit.json" for path in files),
    )


def step_of(path: pathlib.Path) -> int:
    """The step in ``iter_0000100`` or ``iter_0000100.tmp-…``."""
    return int(path.name.partition(".")[0].removeprefix("iter_"))


def committed_steps(directory: pathlib.Path) -> list[int]:
    found = (record.parent.parent for record in directory.glob("iter_*/ckpt_engine/commit.json"))
    return sorted(step_of(path) for path in found if "." not in path.name)


def compare(reference: list[dict[str, Any]], other: list[dict[str, Any]], steps: int) -> list[str]:
    """Every step of the other run, before and after the kill, against the reference. Empty if all are equal."""
    expected = {record["step"]: record["loss"] for record in reference if "step" in record}
    seen = [(record["step"], record["loss"]) for record in other if "step" in record]
    problems = [
        f"step {step}: loss {loss!r}, the reference run has {expected.get(step)!r}"
        for step, loss in seen
        if loss != expected.get(step)
    ]
    missing = sorted(set(range(1, steps + 1)) - {step for step, _ in seen})
    return problems + [f"step {step} was never run" for step in missing]


def excerpt(reference: list[dict[str, Any]], other: list[dict[str, Any]], around: int) -> str:
    """The steps next to the one where training went on, as both runs logged them."""
    expected = {record["step"]: record["loss"] for record in reference if "step" in record}
    # The later run of a step that ran twice.
    seen = {record["step"]: record["loss"] for record in other if "step" in record}
    lines = [f"   {'step':>6}  {'left alone':>20}  {'killed and resumed':>20}"]
    for step in range(around - 1, around + 4):
        if step in expected:
            mark = "equal" if seen.get(step) == expected[step] else "DIFFERENT"
            origin = "  (after the restore)" if step == around + 1 else ""
            lines.append(f"   {step:>6}  {expected[step]!r:>20}  {seen.get(step)!r:>20}  {mark}{origin}")
    return "\n".join(lines)


def draw(losses: list[float], width: int = 60) -> str:
    """One line of bars: the loss curve."""
    bars = "▁▂▃▄▅▆▇█"
    low, high = min(losses), max(losses)
    picked = [losses[i * len(losses) // width] for i in range(width)] if len(losses) > width else losses
    return "".join(bars[round((loss - low) / ((high - low) or 1.0) * (len(bars) - 1))] for loss in picked)


def table(rows: list[tuple[str, str]]) -> str:
    wide = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{wide}}  {value}" for name, value in rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dir", type=pathlib.Path, default=HERE.parent / "demo-run", help="where to work; emptied first")
    add("--steps", type=int, default=40)
    add("--save-every", type=int, default=4)
    add("--nproc", type=int, default=1)
    add("--parallel", choices=["ddp", "fsdp2"], default="ddp")
    add("--width", type=int, default=512)
    add("--layers", type=int, default=6)
    add("--batch", type=int, default=2, help="windows of text per rank and step")
    add("--context", type=int, default=64)
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    folder: pathlib.Path = options.dir
    marker = folder / ".demo"
    if folder.exists() and not marker.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty and not from this demo; name another place with --dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.touch()
    checkpoints = folder / "checkpoints"
    shared = ["--steps", str(options.steps), "--nproc", str(options.nproc), "--parallel", options.parallel]
    shared += ["--width", str(options.width), "--layers", str(options.layers), "--batch", str(options.batch)]
    shared += ["--context", str(options.context)]
    saving = [*shared, "--save-dir", str(checkpoints), "--save-every", str(options.save_every), "--keep-last", "3"]
    saving += ["--ckpt-engine", "threads"]

    print(f"1. Reference: {options.steps} steps without a checkpoint", flush=True)
    started = time.monotonic()
    reference = Trainer(folder, "reference", [*shared, "--save-dir", str(folder / "unused"), "--save-every", "0"])
    reference.finish()
    plain = records(reference.log)
    losses = [record["loss"] for record in plain if "step" in record]
    print(f"   {time.monotonic() - started:.0f} s, loss {losses[0]:.3f} → {losses[-1]:.3f}  {draw(losses)}", flush=True)

    print(f"2. The same, saved every {options.save_every} steps, SIGKILL in the middle of a save", flush=True)
    corpse = None
    for attempt in range(1, ATTEMPTS + 1):
        trainer = Trainer(folder, "interrupted", saving)
        # On a very fast device a save may be over before the signal arrives: then inside the call is the better moment.
        corpse = kill_during_save(trainer, checkpoints, 2 if attempt == 1 else 1, in_call=attempt > 2)
        if corpse is not None:
            break
        print("   that save was over before the signal arrived; once more, from the last commit", flush=True)
    if corpse is None:
        print(f"   no save was caught half-way in {ATTEMPTS} trainings: make the state larger (--width, --layers)")
        return 1
    killed_at = max(record["step"] for record in records(trainer.log) if "step" in record)
    print(f"   killed at step {killed_at}; left behind: {corpse.directory}")
    record = "a commit record, but not its name yet" if corpse.has_commit_record else "no commit record"
    print(f"   {corpse.files} files, {corpse.bytes / 1e6:.0f} MB allocated, {record}", flush=True)

    committed = committed_steps(checkpoints)
    print(f"3. Committed steps: {committed}; resume from {committed[-1]} and train to {options.steps}", flush=True)
    trainer = Trainer(folder, "interrupted", saving)
    trainer.finish()
    interrupted = records(trainer.log)
    resumed_at = [record["start"] for record in interrupted if "start" in record][-1]
    if resumed_at != committed[-1]:
        print(f"   resumed at step {resumed_at}, expected {committed[-1]}")
        return 1
    if any(checkpoints.glob("iter_*.tmp-*")):
        print("   the half-written save is still there")
        return 1
    print(excerpt(plain, interrupted, resumed_at))
    problems = compare(plain, interrupted, options.steps)
    compared = sum("step" in record for record in interrupted)
    for problem in problems[:10]:
        print(f"   {problem}")
    print(f"   {compared} losses compared with the reference, {len(problems)} problems; the half save is gone")

    saves = [record for record in interrupted if "saved" in record]
    # The report of rank 0 counts the bytes of the whole checkpoint.
    speeds = [record["bytes"] / record["durable_seconds"] / 1e9 for record in saves]
    stalls = [record["stall"] * 1e3 for record in interrupted if record.get("stall") is not None]
    size = saves[-1]["bytes"]
    raw = raw_write_speed(folder, size)
    pool = max(record["pool_bytes"] for record in saves)
    print()
    print(
        table(
            [
                ("steps", f"{options.steps}, killed at {killed_at}, resumed at {resumed_at}"),
                ("saves", f"{len(saves)} of {size / 1e6:.0f} MB; now on disk: {committed_steps(checkpoints)}"),
                ("training stands still", f"{statistics.median(stalls):.1f} ms a save (median)"),
                ("durable, training on", f"{statistics.median(speeds):.2f} GB/s, from the call to the commit (median)"),
                ("the device, nothing else on", f"{raw.gb_per_second:.2f} GB/s, {raw.how}"),
                ("memory held by the pool", f"{pool / 1e6:.0f} MB per rank (most)"),
                ("files", f"{folder}"),
            ]
        )
    )
    print()
    print("The loss curves DIFFER." if problems else "The loss curves are equal, number for number.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
