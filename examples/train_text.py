"""Trains a byte-level GPT on the sources of the Python standard library, and saves while it trains.

    python examples/train_text.py --save-dir /tmp/run --steps 200 --save-every 20
    python examples/train_text.py --save-dir /tmp/run --steps 400              # goes on at step 201
    python examples/train_text.py --save-dir /tmp/run2 --nproc 2 --parallel fsdp2 --ckpt-engine dcp

Every step is a pure function of the state before it: the data follow from (seed, step, rank), dropout from the saved
random state, and thread counts are fixed. A run that was killed and resumed therefore prints the losses of one that was
not, bit for bit; ``demo.py`` shows that, and ``tests/test_example.py`` holds it to that.

With ``--log FILE`` rank 0 appends one JSON object a line: ``{"step": 7, "loss": 2.5, "stall": null}`` for a step
(``stall``: seconds that the save call took), ``{"saved": 5, "durable_seconds": …}`` once a save is durable.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import random
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from savers import DcpSaver, Saved, Saver, ThreadsSaver, TorchSaver, Training
from textmodel import Batches, ByteGPT, load_text


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ckpt-engine", choices=["threads", "dcp", "torch"], default="threads", help="what saves the checkpoints")
    add("--save-dir", required=True, help="directory of the checkpoints")
    add("--save-every", type=int, default=20, help="steps between saves; 0: never")
    add("--keep-last", type=int, default=None, help="committed checkpoints to keep (default: all)")
    add("--staging-budget", type=int, default=None, help="bytes that the threads engine may hold (default: auto)")
    add("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from the newest checkpoint")
    add("--steps", type=int, default=200, help="step at which training ends")
    add("--nproc", type=int, default=1, help="ranks on this machine, over gloo on the loopback interface")
    add("--parallel", choices=["ddp", "fsdp2"], default="ddp", help="how ranks share the work")
    add("--batch", type=int, default=8, help="windows of text per rank and step")
    add("--context", type=int, default=128, help="bytes in a window")
    add("--width", type=int, default=128, help="width of the model, a multiple of 64")
    add("--layers", type=int, default=4)
    add("--dropout", type=float, default=0.1)
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="compute threads per rank; another number gives other roundings")
    add("--text-bytes", type=int, default=8 << 20, help="bytes of text to read at most")
    add("--log", default=None, help="file that rank 0 appends JSON lines to")
    add("--crash-at-step", type=int, default=None, help="SIGKILL every rank right after the save call of that step")
    options = parser.parse_args(argv)
    for name in ("steps", "nproc", "batch", "context", "width", "layers", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    crash = options.crash_at_step
    if options.save_every < 0:
        parser.error("--save-every must not be negative")
    if crash is not None and (options.save_every < 1 or crash % options.save_every):
        parser.error(f"--crash-at-step {crash}: nothing is saved at that step (--save-every {options.save_every})")
    return options


def relaunch(options: argparse.Namespace, argv: list[str]) -> None:
    """Becomes torchrun with ``--nproc`` workers of this script."""
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    # Without the "--" torchrun would take our --log and --nproc for abbreviations of its own options.
    script = [f"--nproc-per-node={options.nproc}", "--", os.path.abspath(__file__), *argv]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, *script])


def build(options: argparse.Namespace, world_size: int) -> tuple[torch.nn.Module, Training]:
    """The module to call, and the objects to save (without DDP's wrapper, so that any number of ranks can resume)."""
    model = ByteGPT(width=options.width, layers=options.layers, context=options.context, dropout=options.dropout)
    called: torch.nn.Module = model
    if world_size > 1 and options.parallel == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif world_size > 1:
        called = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    # Does not depend on --steps: a longer run has the same losses at the same steps.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, (20 / (step + 1)) ** 0.5))
    return called, Training(model, optimizer, schedule)


def make_saver(options: argparse.Namespace, training: Training) -> Saver:
    if options.ckpt_engine == "dcp":
        return DcpSaver(options.save_dir, training, keep_last=options.keep_last)
    if options.ckpt_engine == "torch":
        return TorchSaver(options.save_dir, training, keep_last=options.keep_last)
    return ThreadsSaver(options.save_dir, training, budget=options.staging_budget, keep_last=options.keep_last)


class Log:
    """Lines on the terminal and in the JSON file, from rank 0. Each line is handed to the system at once."""

    def __init__(self, path: str | None, rank: int) -> None:
        self._rank = rank
        self._file = open(path, "a", encoding="utf-8") if path and rank == 0 else None

    def record(self, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(fields) + "\n")
            self._file.flush()

    def say(self, text: str) -> None:
        if self._rank == 0:
            print(text, flush=True)

    def saved(self, reports: list[Saved]) -> None:
        for report in reports:
            fields = dataclasses.asdict(report)
            step = fields.pop("step")
            self.record(saved=step, **fields)
            self.say(f"  step {step} durable after {report.durable_seconds:.3f} s, {report.bytes / 1e6:.1f} MB")


def train(options: argparse.Namespace) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    # The same weights on every rank, then a random stream of its own for each (dropout).
    torch.manual_seed(options.seed)
    called, training = build(options, world_size)
    random.seed(options.seed * 1009 + rank)
    torch.manual_seed(options.seed * 1009 + rank)
    batches = Batches(
        load_text(options.text_bytes), batch=options.batch, context=options.context, seed=options.seed, rank=rank
    )
    log = Log(options.log, rank)
    saver = make_saver(options, training)
    step, samples = (saver.restore() if options.resume else None) or (0, 0)
    parameters = sum(p.numel() for p in training.model.parameters())
    log.record(start=step, parameters=parameters, world_size=world_size)
    origin = f"resumed at step {step}" if step else "from the start"
    log.say(f"{parameters / 1e6:.1f} M parameters, {world_size} rank(s), {origin}")

    while step < options.steps:
        step += 1
        tokens, targets = batches.at(step)
        loss = called(tokens, targets)
        training.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        training.optimizer.step()
        training.schedule.step()
        samples += options.batch * world_size

        shown = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(shown)
            shown /= world_size
        stall = None
        if options.save_every and step % options.save_every == 0:
            started = time.perf_counter()
            saver.save(step, samples)
            stall = time.perf_counter() - started
        log.record(step=step, loss=shown.item(), stall=stall)
        if step == options.crash_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        note = "" if stall is None else f"  saving, training stood still for {stall * 1e3:.1f} ms"
        if stall is not None or step % 10 == 0 or step == options.steps:
            log.say(f"step {step:5d}  loss {shown.item():.4f}{note}")
        log.saved(saver.poll())
    log.saved(saver.close())


def main(argv: list[str]) -> None:
    options = parse_arguments(argv)
    distributed = "LOCAL_RANK" in os.environ
    if options.nproc > 1 and not distributed:
        relaunch(options, argv)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(options.threads)
    if distributed:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    try:
        train(options)
        if distributed:
            # A rank that leaves while gloo still talks to it makes FSDP2's threads end in std::terminate now and then.
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
