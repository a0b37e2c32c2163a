"""Trains a megatron-core GPT, tensor parallel over two ranks, and saves it with Megatron's own distributed checkpointing.

    python examples/megatron_gpt.py --save-dir /tmp/run --ckpt-engine threads --async-save
    python examples/megatron_gpt.py --save-dir /tmp/run --ckpt-engine stock --steps 60     # goes on, with Megatron's savers
    python examples/megatron_gpt.py --save-dir /tmp/demo --demo        # kill in the middle of a save, resume, compare

Nothing but ``add_arguments`` and ``install_from_args`` is about ckpt_engine: the saves, the queue that async saves go
through and the load are what a Megatron user has anyway. It needs megatron-core 0.16 or later: ``pip install megatron-core``
on Python 3.12 and later; elsewhere unzip its wheel into a folder and put that on PYTHONPATH. Without a GPU it runs on the
CPU over gloo (:mod:`megatron_on_cpu`); on CUDA it is untested.

The text is the one of ``train_text.py``, and as there every step follows from the state before it: a run that was killed
and resumed has the losses of one that was not, bit for bit. That includes dropout, whose random state Megatron keeps per
tensor parallel rank, and which is in the checkpoint.

With ``--log FILE`` rank 0 appends one JSON object a line: ``{"start": 0, …}``, ``{"step": 7, "loss": 2.5, "stall": null}``
(``stall``: seconds that the save call took), and ``{"saved": 5, "seconds": …}`` once Megatron has finalised a save.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import inspect
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import megatron_on_cpu
import psutil
import torch
import torch.distributed as dist
from megatron_model import Training
from savers import step_path, sync_directory
from textmodel import Batches, load_text

import ckpt_engine.megatron

#: Names the newest complete checkpoint, as in Megatron-LM.
TRACKER = "latest_checkpointed_iteration.txt"

#: The last file of a complete checkpoint: the engine's, and Megatron's own.
PROOFS = ("ckpt_engine/commit.json", "metadata.json")

NO_MEGATRON = (
    "megatron-core can't be imported ({error}): pip install megatron-core (Python >= 3.12), "
    "or unzip its wheel into a folder and put that on PYTHONPATH"
)

#: Longest that one training of the demo may take.
DEADLINE_SECONDS = 300.0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--save-dir", required=True, help="directory of the checkpoints")
    add("--steps", type=int, default=30, help="step at which training ends")
    add("--save-every", type=int, default=5, help="steps between saves; 0: never")
    add("--async-save", action="store_true", help="save through Megatron's AsyncCallsQueue while training goes on")
    add("--fully-parallel-save", action="store_true", help="data parallel ranks share the writing")
    add("--tensor-parallel", type=int, default=2, help="ranks that share each layer")
    add("--nproc", type=int, default=None, help="ranks on this machine (default: as many as --tensor-parallel)")
    add("--layers", type=int, default=2)
    add("--hidden", type=int, default=64, help="width of the model, a multiple of 16 times --tensor-parallel")
    add("--sequence", type=int, default=64, help="bytes in a window of text")
    add("--batch", type=int, default=4, help="windows per step and data parallel rank")
    add("--dropout", type=float, default=0.1)
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--text-bytes", type=int, default=1 << 20, help="bytes of text to read at most")
    add("--log", default=None, help="file that rank 0 appends JSON lines to")
    add("--kill-at", type=int, default=0, metavar="STEP", help="SIGKILL all ranks in the middle of that step's save")
    add("--demo", action="store_true", help="train undisturbed, killed and resumed below --save-dir, and compare")
    ckpt_engine.megatron.add_arguments(parser)
    options = parser.parse_args(argv)
    options.nproc = options.nproc or options.tensor_parallel
    for name in ("steps", "tensor_parallel", "layers", "hidden", "sequence", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.nproc % options.tensor_parallel or options.hidden % (16 * options.tensor_parallel):
        parser.error(f"--nproc {options.nproc} and --hidden {options.hidden} must divide by --tensor-parallel")
    kill = options.kill_at
    if options.save_every < 0:
        parser.error("--save-every must not be negative")
    if kill and (options.save_every < 1 or kill % options.save_every):
        parser.error(f"--kill-at {kill}: nothing is saved at that step (--save-every {options.save_every})")
    return options


def launcher(options: argparse.Namespace, argv: list[str]) -> list[str]:
    """The command that is torchrun with ``--nproc`` workers of this script."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    # Without the "--" torchrun would take our --log and --nproc for abbreviations of its own options.
    return [*torchrun, f"--nproc-per-node={options.nproc}", "--", os.path.abspath(__file__), *argv]


class Checkpoints:
    """Saves through ``dist_checkpointing`` as Megatron-LM does, and the tracker file.

    A kill leaves the tracker at the newest checkpoint that was complete: it is replaced by a rename, after that.
    """

    def __init__(self, options: argparse.Namespace, training: Training, done: Callable[[int, float], None]) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        self._directory = options.save_dir
        self._training = training
        self._done = done
        self._queue = AsyncCallsQueue() if options.async_save else None
        self._strategy: Any = TorchDistSaveShardedStrategy("torch_dist", 1)
        if options.fully_parallel_save:
            self._strategy = FullyParallelSaveStrategyWrapper(self._strategy, training.data_group)

    def restore(self) -> int:
        """Loads what the tracker names; returns the step, 0 if there is none."""
        found = [newest(pathlib.Path(self._directory)) if dist.get_rank() == 0 else 0]
        dist.broadcast_object_list(found)
        return self._training.load(step_path(self._directory, found[0])) if found[0] else 0

    def save(self, step: int, *, kill: bool) -> None:
        """Returns when training may change the weights again."""
        from megatron.core import dist_checkpointing

        # Stock's queue takes more than one save at a time, but may then swap their results.
        self.wait()
        if kill:
            kill_in_the_middle()
        started = time.perf_counter()
        path = step_path(self._directory, step)
        if dist.get_rank() == 0:
            os.makedirs(path, exist_ok=True)
        dist.barrier()
        state = {"iteration": step, **self._training.sharded_state()}
        how: dict[str, Any] = {"async_sharded_save": self._queue is not None}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            how["async_strategy"] = "mcore"  # from 0.17 on; NVRx's would be its own package
        request = dist_checkpointing.save(state, path, self._strategy, **how)

        def complete() -> None:
            if dist.get_rank() == 0:
                write_tracker(self._directory, step)
                self._done(step, time.perf_counter() - started)

        if self._queue is None:
            complete()
        else:
            request.add_finalize_fn(complete)
            self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """After each step: finalises a save that all ranks have written. Collective, does not wait for the writing."""
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=False)

    def wait(self) -> None:
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        self.wait()
        if self._queue is not None:
            self._queue.close()


def newest(directory: pathlib.Path) -> int:
    """The step that the tracker names, 0 if there is no tracker."""
    try:
        step = int((directory / TRACKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0
    path = step_path(str(directory), step)
    if not any(os.path.exists(os.path.join(path, proof)) for proof in PROOFS):
        raise SystemExit(f"{directory / TRACKER} names step {step}, but {path} is not a complete checkpoint")
    return step


def write_tracker(directory: str, step: int) -> None:
    path = os.path.join(directory, TRACKER)
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(str(step))
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
    sync_directory(directory)


def kill_in_the_middle() -> None:
    """From now on the first half of a write of any rank, or else its first fsync, is the end of all ranks. Collective."""
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    # Found now, while all of them live: a pid that is looked up later may have become somebody else's.
    ranks = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    ranks = [process for process in ranks if process.ppid() == os.getppid()]
    system: Any = os
    real = os.pwrite

    def kill(*_: Any) -> None:
        for rank in ranks:
            try:
                # Stock's forked writers, which get here, too. One that outlives its trainer would go on with the save.
                family = [rank, *rank.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for process in family:
                if process.pid != os.getpid():
                    try:
                        process.kill()
                    except psutil.NoSuchProcess:
                        pass
        os.kill(os.getpid(), signal.SIGKILL)

    def pwrite(fd: int, data: Any, offset: int) -> None:
        half = len(data) // 2 & ~4095  # whole blocks, as O_DIRECT wants them
        real(fd, memoryview(data)[:half], offset)
        kill()

    system.pwrite, system.fsync = pwrite, kill


def train(options: argparse.Namespace, device: torch.device) -> None:
    rank = dist.get_rank()
    log = open(options.log, "a", encoding="utf-8") if options.log and rank == 0 else None

    def record(text: str | None, **fields: Any) -> None:
        if log is not None:
            log.write(json.dumps(fields) + "\n")
            log.flush()
        if text is not None and rank == 0:
            print(text, flush=True)

    def saved(step: int, seconds: float) -> None:
        record(f"  step {step} complete after {seconds:.3f} s", saved=step, seconds=seconds)

    training = Training(options, device)
    batches = Batches(
        load_text(options.text_bytes),
        batch=options.batch,
        context=options.sequence,
        seed=options.seed,
        rank=training.data_rank,
    )
    os.makedirs(options.save_dir, exist_ok=True)
    checkpoints = Checkpoints(options, training, saved)
    step = checkpoints.restore()
    record(f"resumed at step {step}" if step else "from the start", start=step, world_size=dist.get_world_size())
    while step < options.steps:
        step += 1
        tokens, targets = (part.to(device) for part in batches.at(step))
        loss = training.step(tokens, targets)
        stall = None
        if options.save_every and step % options.save_every == 0:
            started = time.perf_counter()
            checkpoints.save(step, kill=step == options.kill_at)
            stall = time.perf_counter() - started
        note = "" if stall is None else f"  saving, training stood still for {stall * 1e3:.1f} ms"
        spoken = stall is not None or step % 10 == 0 or step == options.steps
        record(f"step {step:5d}  loss {loss:.4f}{note}" if spoken else None, step=step, loss=loss, stall=stall)
        checkpoints.poll()
    checkpoints.close()


# -- the demo ------------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, argv: list[str], folder: pathlib.Path, name: str, *more: str) -> int:
    """One training in processes of its own; torchrun's exit status."""
    log = ["--log", str(folder / f"{name}.jsonl")]
    with open(folder / f"{name}.txt", "a", encoding="utf-8") as output:
        process = subprocess.Popen(
            launcher(options, [*argv, *log, *more]), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(timeout=DEADLINE_SECONDS)
        except BaseException:
            process.terminate()  # torchrun ends its workers, and itself
            process.wait(timeout=60)
            raise


def demo(options: argparse.Namespace, argv: list[str]) -> int:
    """Three trainings; 0 if the losses of the killed and resumed one are those of the undisturbed one."""
    from demo import compare, excerpt, records

    folder = pathlib.Path(options.save_dir)
    marker = folder / ".demo"
    if folder.exists() and not marker.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty and not from this demo; name another place with --save-dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.touch()
    every = options.save_every or 5
    kill_at = options.kill_at or max(2, options.steps // every // 2) * every
    engine = options.ckpt_engine or "threads"
    checkpoints = folder / "checkpoints"
    argv = [text for text in argv if text != "--demo"]
    argv += ["--ckpt-engine", engine, "--save-dir", str(checkpoints)]

    print(f"1. Undisturbed: {options.steps} steps, nothing is saved", flush=True)
    status = run(options, argv, folder, "undisturbed", "--kill-at", "0", "--save-every", "0")
    if status == 0:
        how = f"{engine}, {'asynchronous' if options.async_save else 'synchronous'}"
        print(f"2. Saved every {every} steps ({how}), SIGKILL in the middle of the save of step {kill_at}", flush=True)
        killed = run(options, argv, folder, "killed", "--kill-at", str(kill_at), "--save-every", str(every))
        left = pathlib.Path(step_path(str(checkpoints), kill_at))
        names = sorted(path.name for path in left.rglob("*") if path.is_file())
        whole = any((left / proof).exists() for proof in PROOFS)
        before = newest(checkpoints)
        print(f"   left behind in {left.name}: {', '.join(names) or 'nothing'}")
        print(f"3. Resumed from step {before}", flush=True)
        status = run(options, argv, folder, "resumed", "--kill-at", "0", "--save-every", str(every))
    if status != 0:
        print(f"   a training ended with status {status}; its output is in {folder}")
        return 1
    reference, first, second = (records(folder / f"{name}.jsonl") for name in ("undisturbed", "killed", "resumed"))
    print(excerpt(reference, first + second, before))
    problems = compare(reference, first + second, options.steps)
    if killed == 0 or whole:
        problems.append(f"the save of step {kill_at} was not caught half-way")
    if second[0]["start"] != before or not 0 < before < kill_at:
        problems.append(f"resumed at step {second[0]['start']}, the tracker said {before}, killed at {kill_at}")
    stalls = sorted(line["stall"] for line in second if line.get("stall") is not None)
    if stalls:
        print(f"   training stood still for {stalls[len(stalls) // 2] * 1e3:.1f} ms a save (median)")
    print(f"   {sum('step' in line for line in first + second)} losses compared, {len(problems)} problems")
    for problem in problems[:10]:
        print(f"   {problem}")
    print("The losses DIFFER, see above." if problems else "The losses are equal, bit for bit.")
    return 1 if problems else 0


def main(argv: list[str]) -> int:
    options = parse_arguments(argv)
    try:
        if importlib.util.find_spec("megatron.core") is None:
            raise ImportError("there is a package megatron without it")
        if options.demo:
            return demo(options, argv)
        if "LOCAL_RANK" not in os.environ:
            sys.stdout.flush()
            os.execv(sys.executable, launcher(options, argv))
        megatron_on_cpu.prepare()
    except ImportError as error:
        raise SystemExit(NO_MEGATRON.format(error=error)) from None
    ckpt_engine.megatron.install_from_args(options)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=120))
    try:
        train(options, device)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
