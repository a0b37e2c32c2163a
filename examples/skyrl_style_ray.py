"""Two Ray actors train and save with Megatron as SkyRL does; one is killed during a save, and a new pair goes on.

    pip install "ckpt-engine[megatron,ray]"
    python examples/skyrl_style_ray.py                          # saves on threads of the actors
    python examples/skyrl_style_ray.py --ckpt-engine stock      # Megatron's own savers, for comparison

Each actor is a rank: a shard of a small model, its momentum and its random state. Saves run in actor methods, which are not
on the main thread of the actor's process: staged on the host, scheduled on the queue that SkyRL keeps in Megatron's module,
finalised by a helper thread while the training goes on. After the kill, the new pair takes the newest checkpoint that
verifies, and has to end with exactly the weights of a training that nobody has disturbed. Exit status 0 if it does.

It uses no GPU. Stock saves synchronously here, because its background process wants one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import importlib.util
import inspect
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time
from typing import Any

import megatron_on_cpu
import psutil
import torch

import ckpt_engine.megatron
from ckpt_engine.restore.verify import verify_checkpoint

#: The ranks; one Ray actor and one CPU each.
WORLD = 2

#: Longest that one call of an actor may take, the import of Megatron included.
PATIENCE_SECONDS = 120.0


class Model:
    """A shard of a model in training. Every step depends on the one before and on the random state."""

    def __init__(self, rank: int, rows: int) -> None:
        self.rank = rank
        self.generator = torch.Generator().manual_seed(1234 + rank)
        self.weight = torch.randn(rows, 256, generator=self.generator)
        self.momentum = torch.zeros_like(self.weight)

    def step(self) -> None:
        gradient = torch.tanh(self.weight) + torch.randn(self.weight.shape, generator=self.generator)
        self.momentum.mul_(0.9).add_(gradient)
        self.weight.sub_(self.momentum, alpha=0.01)  # in place: a save that reads too late reads these values

    def sharded_state(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

        mine = (0, self.rank, WORLD)
        return {
            "model": {"weight": ShardedTensor.from_rank_offsets("weight", self.weight, mine)},
            "optimizer": {"momentum": ShardedTensor.from_rank_offsets("momentum", self.momentum, mine)},
            "rng": ShardedObject("rng", self.generator.get_state(), (WORLD,), (self.rank,)),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.weight.copy_(state["model"]["weight"])
        self.momentum.copy_(state["optimizer"]["momentum"])
        self.generator.set_state(state["rng"])


class Trainer:
    """One rank, as a Ray actor."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        self.rank, self.arguments = rank, arguments
        self.model = Model(rank, arguments.rows)
        self.done = 0
        self.helper = concurrent.futures.ThreadPoolExecutor(1)
        self.finalising: concurrent.futures.Future[Any] | None = None

    def rendezvous(self, port: int) -> int:
        """Opens (``port`` 0) or joins the store of the process group; returns its port."""
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.store = dist.TCPStore("127.0.0.1", port, WORLD, port == 0, wait_for_workers=False)  # type: ignore[attr-defined]
        return int(self.store.port)

    def start(self) -> str:
        """Joins the process group and prepares Megatron; returns who writes the checkpoints."""
        import torch.distributed as dist

        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=WORLD)
        megatron_on_cpu.prepare()
        threads = ckpt_engine.megatron.install_from_args(self.arguments)
        self.asynchronous = threads
        importlib.import_module(
            "megatron.core.dist_checkpointing.strategies.fully_parallel"
        )  # not in the first save's time
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        megatrons_module().async_calls = AsyncCallsQueue(persistent=True)
        return "threads of the trainer" if threads else "Megatron's own savers"

    def train(self, steps: int) -> int:
        for _ in range(steps):
            self.model.step()
        self.done += steps
        return self.done

    def save(self, finalise: bool = True) -> str:
        """Saves the current step, and returns once nothing reads the model any more; a thread finalises, if it is to.

        Returns:
            On which thread this ran.
        """
        import torch.distributed as dist
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        self.wait()
        path = step_directory(self.arguments.save_dir, self.done)
        if self.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        options: dict[str, Any] = {}
        if self.asynchronous and "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            options["async_strategy"] = "mcore"
        request = dist_checkpointing.save(
            sharded_state_dict=self.model.sharded_state(),
            checkpoint_dir=str(path),
            sharded_strategy=FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist")),
            async_sharded_save=self.asynchronous,
            validate_access_integrity=True,
            **options,
        )
        module = megatrons_module()
        if request is None:
            dist.barrier()
            module.async_calls.close()
            module.async_calls = AsyncCallsQueue(persistent=True)
        else:
            module.async_calls.schedule_async_request(staged_on_the_host(request))
            if finalise:
                self.finalising = self.helper.submit(module.async_calls.maybe_finalize_async_calls, blocking=True)
        return "the main thread" if threading.current_thread() is threading.main_thread() else "a thread of Ray's"

    def wait(self) -> None:
        """Until the save before is complete on all ranks. Raises what went wrong with it."""
        if self.finalising is not None:
            self.finalising.result(PATIENCE_SECONDS)
            self.finalising = None

    def child_processes(self) -> int:
        return len(psutil.Process().children(recursive=True))

    def resume(self, path: str, step: int) -> None:
        from megatron.core import dist_checkpointing

        self.model.load(dist_checkpointing.load(self.model.sharded_state(), path))
        self.done = step

    def matches_an_undisturbed_run(self) -> bool:
        other = Model(self.rank, self.arguments.rows)
        for _ in range(self.done):
            other.step()
        return torch.equal(other.weight, self.model.weight) and torch.equal(other.momentum, self.model.momentum)


def staged_on_the_host(request: Any) -> Any:
    """The request with its tensors copied, so that the trainer may change or free them at once."""
    if request.preload_fn is None:  # this rank has nothing to write
        return request
    first, _, last = request.async_fn_args
    return request._replace(async_fn_args=(first, request.preload_fn(), last), preload_fn=None)


def megatrons_module() -> Any:
    """Where SkyRL keeps its queue; Megatron itself has this module up to 0.18."""
    try:
        from megatron.core.dist_checkpointing.strategies import base
    except ImportError:
        from megatron.core.dist_checkpointing import strategies as base
    return base


# -- in the driver -------------------------------------------------------------------------------------------------------


def step_directory(root: str, step: int) -> pathlib.Path:
    return pathlib.Path(root) / f"global_step_{step}"


def newest_that_verifies(root: str) -> tuple[int, pathlib.Path] | None:
    """Reads every byte of it: of a save that was cut off, none is good enough."""
    steps = sorted(
        (int(path.name.rpartition("_")[2]) for path in pathlib.Path(root).glob("global_step_*")), reverse=True
    )
    for step in steps:
        path = step_directory(root, step)
        report = verify_checkpoint(path)
        if report.ok:
            return step, path
        print(f"  step {step} is not complete: {report.problems[0]}")
    return None


def wait_for_files(directory: pathlib.Path) -> int:
    """Returns once a shard file is there, in whatever state, with the bytes that are in them."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            sizes = [path.stat().st_size for path in directory.iterdir() if ".distcp" in path.name]
        except FileNotFoundError:
            sizes = []  # not there yet, or renamed meanwhile
        if sizes:
            return sum(sizes)
        time.sleep(0.001)
    raise TimeoutError(f"no save has begun in {directory} after {PATIENCE_SECONDS:g} s")


def run(ray: Any, arguments: argparse.Namespace) -> bool:
    """The whole story; whether it ended well."""
    every, root = arguments.save_every, arguments.save_dir
    # With more than one thread, methods leave the main one to Ray.
    actor = ray.remote(num_cpus=1, max_concurrency=2, max_restarts=0)(Trainer)

    def on_all(pair: list[Any], method: str, *args: Any) -> list[Any]:
        result: list[Any] = ray.get([getattr(rank, method).remote(*args) for rank in pair], timeout=PATIENCE_SECONDS)
        return result

    def new_pair() -> list[Any]:
        pair = [actor.remote(rank, arguments) for rank in range(WORLD)]
        port = ray.get(pair[0].rendezvous.remote(0), timeout=PATIENCE_SECONDS)
        ray.get([rank.rendezvous.remote(port) for rank in pair[1:]], timeout=PATIENCE_SECONDS)
        print(f"two actors, checkpoints by {on_all(pair, 'start')[0]}")
        return pair

    pair = new_pair()
    for _ in range(2):
        step = on_all(pair, "train", every)[0]
        start = time.perf_counter()
        where = on_all(pair, "save")[0]
        seconds = time.perf_counter() - start
        children = sum(on_all(pair, "child_processes"))
        print(f"  step {step}: save() took {seconds:.3f} s, on {where}; child processes: {children}")
    on_all(pair, "wait")
    (lost,) = set(on_all(pair, "train", every))
    saving = [rank.save.remote(False) for rank in pair]
    written = wait_for_files(step_directory(root, lost))
    ray.kill(pair[1])
    print(f"  step {lost}: one actor killed during the save, {written:,} bytes are in its folder")
    ray.kill(pair[0])  # a job is started again as a whole
    del saving

    found = newest_that_verifies(root)
    if found is None:
        print("no checkpoint is left to resume from")
        return False
    step, path = found
    pair = new_pair()
    on_all(pair, "resume", str(path), step)
    print(f"  resumed from step {step}")
    on_all(pair, "train", lost + every - step)
    on_all(pair, "save")
    on_all(pair, "wait")
    same = all(on_all(pair, "matches_an_undisturbed_run"))
    end = newest_that_verifies(root)
    print(
        f"  step {lost + every}: the weights {'are those' if same else 'DIFFER from those'} of an undisturbed training"
    )
    return same and end is not None and end[0] == lost + every


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save-dir", help="where checkpoints go; a temporary folder otherwise")
    parser.add_argument("--save-every", type=int, default=3, help="steps between saves")
    parser.add_argument("--rows", type=int, default=8192, help="rows of 256 float32 in each actor's shard: 1 KiB each")
    ckpt_engine.megatron.add_arguments(parser).set_defaults(ckpt_engine="threads")
    arguments = parser.parse_args()
    try:
        import ray
    except ImportError:
        return missing("Ray", "ray")
    try:
        there = importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        return missing("Megatron", "megatron")
    scratch = tempfile.mkdtemp(prefix="ckpt-")  # short: Ray puts sockets below it, and their paths have a limit
    arguments.save_dir = os.path.abspath(arguments.save_dir or os.path.join(scratch, "checkpoints"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the actors: no GPU, also where there is one
    # They need this folder's modules and the package, installed or not.
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry or ".") for entry in sys.path)
    try:
        ray.init(num_cpus=WORLD, include_dashboard=False, log_to_driver=False, _temp_dir=os.path.join(scratch, "ray"))
        good = run(ray, arguments)
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)
    print("good: nothing is lost but the steps since the last checkpoint" if good else "NOT GOOD")
    return 0 if good else 1


def missing(what: str, extra: str) -> int:
    print(f'{what} is not installed. Cure: pip install "ckpt-engine[{extra}]"', file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
