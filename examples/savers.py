"""Three ways to save the same training state, behind one small interface, for ``train_text.py``.

``threads``  :class:`ckpt_engine.CheckpointEngine`: a snapshot in a bounded pool, written while training goes on.
``dcp``      ``torch.distributed.checkpoint.async_save``, one save on its way at a time.
``torch``    ``torch.save`` of the gathered state on rank 0, fsync, rename; training waits.

All three can be resumed from. A step counts as saved only once a crash can't take it back: for ``threads`` that is the
commit record, for ``dcp`` its ``.metadata`` file, for ``torch`` the rename.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import re
import shutil
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

if TYPE_CHECKING:
    from ckpt_engine import CheckpointInfo


@dataclasses.dataclass(frozen=True)
class Saved:
    """One save that has become durable. Seconds count from the call of ``save``."""

    step: int
    durable_seconds: float
    bytes: int
    pool_bytes: int
    budget_bytes: int


@dataclasses.dataclass(frozen=True)
class Training:
    """The objects that a checkpoint is made of."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler


class Saver(Protocol):
    """What the training loop needs. ``save`` returns when training may change the weights again."""

    def restore(self) -> tuple[int, int] | None:
        """Loads the newest saved state in place; returns (step, samples consumed), or None if there is none."""

    def save(self, step: int, samples: int) -> None: ...

    def poll(self) -> list[Saved]:
        """Saves that became durable since the last call. Never waits. Raises if one failed."""

    def close(self) -> list[Saved]:
        """Waits for what is on its way and returns the rest of the reports."""


class ThreadsSaver:
    """The whole of it is what the README shows: one state, one ``save``, one ``poll``."""

    def __init__(self, directory: str, training: Training, *, budget: int | None, keep_last: int | None) -> None:
        import ckpt_engine

        self._ckpt_engine = ckpt_engine
        self._state = {
            "model": training.model,
            "optim": training.optimizer,
            "sched": training.schedule,
            "rng": ckpt_engine.RngState(),
        }
        config = ckpt_engine.EngineConfig(staging_budget="auto" if budget is None else budget, keep_last=keep_last)
        self._engine = ckpt_engine.CheckpointEngine(directory, config=config)

    def restore(self) -> tuple[int, int] | None:
        restored = self._engine.restore(self._state, step="latest")
        if restored is None:
            return None
        progress = restored.train_state
        return restored.step, 0 if progress is None else progress.consumed_train_samples

    def save(self, step: int, samples: int) -> None:
        train_state = self._ckpt_engine.TrainState(step=step, consumed_train_samples=samples)
        self._engine.save(self._state, step=step, train_state=train_state)

    def poll(self) -> list[Saved]:
        return [self._report(info) for info in self._engine.poll()]

    def close(self) -> list[Saved]:
        rest = [self._report(info) for info in self._engine.wait(timeout=600)]
        self._engine.close(timeout=60)
        return rest

    @staticmethod
    def _report(info: CheckpointInfo) -> Saved:
        stats = info.stats
        return Saved(info.step, stats.durable_seconds, info.bytes, stats.peak_staged_bytes, stats.budget_bytes)


class DcpSaver:
    """``dcp.async_save`` with the recipe of its tutorial: wait for the previous save before the next one starts.

    Its ``durable_seconds`` end at the first ``poll`` that finds the save done, so they are rounded up to whole steps.
    """

    def __init__(self, directory: str, training: Training, *, keep_last: int | None) -> None:
        self._directory = directory
        self._training = training
        self._keep_last = keep_last
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        # async_save runs collectives in a thread; on the trainer's group they would meet the trainer's and hang both.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._pending: tuple[int, float, Future[Any]] | None = None
        self._done: list[Saved] = []
        os.makedirs(directory, exist_ok=True)

    def _state(self, progress: dict[str, int]) -> dict[str, Any]:
        model, optim = get_state_dict(self._training.model, self._training.optimizer)
        return {
            "model": model,
            "optim": optim,
            "sched": self._training.schedule.state_dict(),
            f"rng_{self._rank}": rng_state(),
            "progress": progress,
        }

    def restore(self) -> tuple[int, int] | None:
        steps = saved_steps(self._directory, ".metadata")
        if not steps:
            return None
        state = self._state({"step": 0, "samples": 0})
        dcp.load(state, checkpoint_id=step_path(self._directory, steps[-1]))
        set_state_dict(
            self._training.model,
            self._training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        self._training.schedule.load_state_dict(state["sched"])
        set_rng_state(state[f"rng_{self._rank}"])
        return state["progress"]["step"], state["progress"]["samples"]

    def save(self, step: int, samples: int) -> None:
        self._collect(wait=True)
        path = step_path(self._directory, step)
        if self._rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        started = time.perf_counter()
        state = self._state({"step": step, "samples": samples})
        future: Any = dcp.async_save(state, checkpoint_id=path, process_group=self._group)
        self._pending = (step, started, future)

    def _collect(self, *, wait: bool) -> None:
        if self._pending is None or not (wait or self._pending[2].done()):
            return
        step, started, future = self._pending
        self._pending = None
        future.result()
        path = pathlib.Path(step_path(self._directory, step))
        self._done.append(
            Saved(step, time.perf_counter() - started, sum(f.stat().st_size for f in path.iterdir()), 0, 0)
        )
        if self._rank == 0 and self._keep_last is not None:
            for old in saved_steps(self._directory, ".metadata")[: -self._keep_last]:
                shutil.rmtree(step_path(self._directory, old), ignore_errors=True)

    def poll(self) -> list[Saved]:
        self._collect(wait=False)
        done, self._done = self._done, []
        return done

    def close(self) -> list[Saved]:
        self._collect(wait=True)
        return self.poll()


class TorchSaver:
    """``torch.save`` of everything on rank 0. Simple and durable; the whole state is gathered and training waits."""

    def __init__(self, directory: str, training: Training, *, keep_last: int | None) -> None:
        self._directory = directory
        self._training = training
        self._keep_last = keep_last
        self._distributed = dist.is_initialized()
        self._rank = dist.get_rank() if self._distributed else 0
        self._done: list[Saved] = []
        os.makedirs(directory, exist_ok=True)

    def restore(self) -> tuple[int, int] | None:
        steps = saved_steps(self._directory, "state.pt")
        if not steps:
            return None
        path = os.path.join(step_path(self._directory, steps[-1]), "state.pt")
        state = torch.load(path, map_location="cpu", weights_only=False)
        set_state_dict(
            self._training.model,
            self._training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(full_state_dict=True),
        )
        self._training.schedule.load_state_dict(state["sched"])
        set_rng_state(state["rng"][self._rank])
        return state["step"], state["samples"]

    def save(self, step: int, samples: int) -> None:
        started = time.perf_counter()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optim = get_state_dict(self._training.model, self._training.optimizer, options=options)
        rng: list[Any] = [rng_state()]
        if self._distributed:
            rng = [None] * dist.get_world_size()
            dist.all_gather_object(rng, rng_state())
        path = step_path(self._directory, step)
        if self._rank == 0:
            temporary = path + ".tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            os.makedirs(temporary)
            state = {"model": model, "optim": optim, "sched": self._training.schedule.state_dict(), "rng": rng}
            with open(os.path.join(temporary, "state.pt"), "wb") as file:
                torch.save({**state, "step": step, "samples": samples}, file)
                file.flush()
                os.fsync(file.fileno())
            shutil.rmtree(path, ignore_errors=True)
            os.rename(temporary, path)
            sync_directory(self._directory)
            size = os.path.getsize(os.path.join(path, "state.pt"))
            self._done.append(Saved(step, time.perf_counter() - started, size, 0, 0))
            if self._keep_last is not None:
                for old in saved_steps(self._directory, "state.pt")[: -self._keep_last]:
                    shutil.rmtree(step_path(self._directory, old), ignore_errors=True)
        if self._distributed:
            dist.barrier()

    def poll(self) -> list[Saved]:
        done, self._done = self._done, []
        return done

    def close(self) -> list[Saved]:
        return self.poll()


def step_path(directory: str, step: int) -> str:
    return os.path.join(directory, f"iter_{step:07d}")


def saved_steps(directory: str, proof: str) -> list[int]:
    """Steps whose directory holds the file that is written last, ascending."""
    found = (re.fullmatch(r"iter_(\d{7,})", name) for name in os.listdir(directory))
    steps = sorted(int(match[1]) for match in found if match)
    return [step for step in steps if os.path.exists(os.path.join(step_path(directory, step), proof))]


def sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rng_state() -> dict[str, Any]:
    return {"python": random.getstate(), "torch": torch.get_rng_state()}


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
