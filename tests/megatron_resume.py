"""What the ranks of :mod:`tests.test_megatron_resume` do: a Megatron-LM run of one tiny layer, and all that may become of its files."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import importlib
import logging
import os
import re
import shutil
import signal
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

#: What the checkpoint's own fields say, and what the sidecar of another writer says.
LEGACY = {"consumed_train_samples": 40, "skipped_train_samples": 1, "consumed_valid_samples": 5}
OTHER = {"consumed_train_samples": 48, "skipped_train_samples": 2, "consumed_valid_samples": 6}
LEGACY_FLOPS, OTHER_FLOPS = 5e20, float(torch.tensor(7e20, dtype=torch.float32))  # what is left of 7e20 in float32

TRACKER = "latest_checkpointed_iteration.txt"
FLAGS = ("do_train", "do_valid", "do_test")


def sidecar(counters: torch.dtype = torch.int64, *, step: int = 5, flags: bool = True) -> dict[str, torch.Tensor]:
    """As Megatron-Bridge writes it: FLOPs in float32, and the counters in int32 up to its 0.3."""
    values = {name: torch.tensor(value, dtype=counters) for name, value in {"step": step, **OTHER}.items()}
    values["floating_point_operations_so_far"] = torch.tensor(7e20, dtype=torch.float32)
    return {**values, **{name: torch.tensor(flags and name != "do_test") for name in FLAGS}}


class Run:
    """A Megatron-LM run of one tiny layer: its save and its load, and what they did to ``args``."""

    def __init__(self, rank: int, world: int, folder: str, root: str, asynchronous: bool = False) -> None:
        from tests import megatron_ranks, megatron_shims

        megatron_shims.use(folder)
        if not hasattr(typing, "override"):  # Python 3.11; the wheels are for 3.12
            typing.override = lambda function: function  # type: ignore[attr-defined]
        torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[assignment]
        import ckpt_engine
        import ckpt_engine.megatron

        self.rank, self.world, self.root = rank, world, root
        self.adapter = ckpt_engine.megatron
        self.adapter.install(ckpt_engine.EngineConfig(**megatron_ranks.CONFIG))
        self.was_late = "megatron.training.checkpointing" not in sys.modules
        from megatron.core import msc_utils, num_microbatches_calculator, parallel_state
        from megatron.core.rerun_state_machine import initialize_rerun_state_machine
        from megatron.core.tensor_parallel.random import initialize_rng_tracker
        from megatron.training import async_utils, checkpointing, global_vars

        msc_utils.MultiStorageClientFeature.disable()  # as --disable-msc does; before 0.19 it is on where it is installed
        self.checkpointing, self.async_utils = checkpointing, async_utils
        parallel_state.initialize_model_parallel(1, 1)
        num_microbatches_calculator.init_num_microbatches_calculator(rank, None, 8, 1, world)
        initialize_rerun_state_machine()
        initialize_rng_tracker()
        self.args = self._arguments(asynchronous, [checkpointing, async_utils])
        global_vars._GLOBAL_ARGS = self.args
        if asynchronous:
            async_utils.init_persistent_async_worker(rank)

    def _arguments(self, asynchronous: bool, modules: list[Any]) -> argparse.Namespace:
        """All that the modules ask of args, None unless it matters."""
        names = {name for module in modules for name in re.findall(r"args\.(\w+)", Path(module.__file__).read_text())}
        matters = {
            "use_dist_ckpt": True,
            "ckpt_format": "torch_dist",
            "async_save": asynchronous,
            "async_strategy": "nvrx",
            "use_persistent_ckpt_worker": True,
            "ckpt_fully_parallel_save": True,
            "ckpt_fully_parallel_save_process_group": "dp",
            "ckpt_load_validate_sharding_integrity": True,
            "dist_ckpt_strictness": "assume_ok_unexpected",
            "no_save_optim": True,
            "no_load_optim": True,
            "no_load_rng": True,
            "global_batch_size": 8,
            "num_layers": 1,
            "hidden_size": 4,
            "num_attention_heads": 1,
            "add_position_embedding": True,
            "rank": self.rank,
            "world_size": self.world,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
        }
        absent = ("iteration", "num_floating_point_operations_so_far", *FLAGS)
        return argparse.Namespace(**{**{name: None for name in names if name not in absent}, **matters})

    def model(self, value: float) -> Any:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        rank = self.rank

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = torch.nn.Parameter(torch.full((8, 4), value))

            def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
                return {"w": ShardedTensor.from_rank_offsets("w", self.w.data, replica_id=rank)}

        return Model()

    def save(self, name: str, step: int = 5, *, bare: bool = False, **settings: Any) -> str:
        """A checkpoint with the legacy counters; ``bare`` as stock writes it: no sidecar, no commit record."""
        self.args.save = os.path.join(self.root, name)
        for key, value in {**LEGACY, **settings}.items():
            setattr(self.args, key, value)
        self.checkpointing.save_checkpoint(
            step, [self.model(float(step))], None, None, LEGACY_FLOPS, checkpointing_context={}
        )
        directory = os.path.join(self.args.save, f"iter_{int(step):07d}")
        if bare:
            self.on_rank_0(lambda: shutil.rmtree(os.path.join(directory, "ckpt_engine")))
            self.on_rank_0(lambda: os.unlink(os.path.join(directory, "train_state.pt")))
        return directory

    def on_rank_0(self, act: Callable[[], Any]) -> None:
        torch.distributed.barrier()
        if self.rank == 0:
            act()
        torch.distributed.barrier()

    def load(self, name: str, **settings: Any) -> Any:
        """What load_checkpoint returns, and ``args`` after it; or what it raises. The counters of ``args`` begin at -1."""
        from tests.megatron_shims import CudaMeansCpu

        wanted = {"finetune": False, "load": os.path.join(self.root, name), "override_ckpt_iteration": None}
        counters = ("iteration", "num_floating_point_operations_so_far", *LEGACY)
        for key, value in {**wanted, **dict.fromkeys(counters, -1), **settings}.items():
            setattr(self.args, key, value)
        model, started = self.model(0.0), time.monotonic()
        try:
            with CudaMeansCpu():
                returned = self.checkpointing.load_checkpoint([model], None, None, checkpointing_context={})
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
            return {"raised": problem, "rank": getattr(error, "rank", None), "seconds": time.monotonic() - started}
        finally:
            flags = {key: vars(self.args).pop(key) for key in FLAGS if key in vars(self.args)}
        return {
            "returned": returned,
            "weights": model.w.unique().tolist(),
            "args": {key: getattr(self.args, key) for key in counters},
            "flags": flags,
        }


def everything(rank: int, world: int, folder: str, root: str) -> dict[str, Any]:
    """All scenarios on one rank."""
    from ckpt_engine.integrations.megatron import progress

    run = Run(rank, world, folder, root)
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt_engine").addHandler(handler)
    found: dict[str, Any] = {"late": run.was_late}

    def put(directory: str, values: Any) -> None:
        run.on_rank_0(lambda: torch.save(values, os.path.join(directory, "train_state.pt")))

    events: list[str] = []
    with watched(events):
        committed = run.save("committed", do_train=True, do_valid=True)
    found["keys"] = {k: (v.dtype, tuple(v.shape)) for k, v in torch.load(f"{committed}/train_state.pt").items()}
    found["committed"] = run.load("committed")
    bare = run.save("bare", bare=True)
    found["legacy"] = run.load("bare")
    put(bare, sidecar())
    reader = progress.read
    if rank != 0:
        progress.read = lambda *_: sys.exit("only rank 0 may read it")
    found["other"] = run.load("bare", do_train=False, do_test=True)
    progress.read = reader
    found["finetune"] = run.load("bare", finetune=True)
    found["overridden"] = run.load("bare", override_ckpt_iteration=3)
    put(bare, sidecar(flags=False))
    found["no flags"] = run.load("bare", do_train=True)
    put(bare, sidecar(torch.int32))
    found["int32"] = run.load("bare")

    generate = run.checkpointing.generate_state_dict
    run.checkpointing.generate_state_dict = lambda *a, **k: {
        key: value for key, value in generate(*a, **k).items() if key != "args"
    }
    argless = run.save("argless")
    run.checkpointing.generate_state_dict = generate
    found["argless wrote"] = os.path.exists(f"{argless}/train_state.pt")
    put(argless, sidecar())
    samples: list[int] = []
    stock = run.checkpointing.update_num_microbatches
    run.checkpointing.update_num_microbatches = lambda consumed_samples, **_: samples.append(consumed_samples)
    found["argless"] = run.load("argless")
    found["argless samples"] = samples
    run.checkpointing.update_num_microbatches = stock

    # Damage.
    put(bare, sidecar(step=4))
    found["wrong step"] = run.load("bare")
    run.on_rank_0(lambda: os.truncate(os.path.join(bare, "train_state.pt"), 100))
    found["torn"] = run.load("bare")
    found["torn, finetune"] = run.load("bare", finetune=True)
    put(bare, {key: value for key, value in sidecar().items() if key != "do_valid"})
    found["key missing"] = run.load("bare")
    run.on_rank_0(lambda: os.unlink(f"{bare}/train_state.pt"))
    run.on_rank_0(lambda: os.mkdir(f"{bare}/train_state.pt"))
    found["a directory"] = run.load("bare")
    put(committed, sidecar())
    found["not the committed one"] = run.load("committed")

    # One after the other is gone.
    found["all there"] = run.load("gone") if run.save("gone") else None
    for name in ("latest_train_state.pt", "iter_0000005/train_state.pt", "iter_0000005/ckpt_engine/commit.json"):
        run.on_rank_0(lambda name=name: os.unlink(os.path.join(root, "gone", name)))  # type: ignore[misc]
        found[f"without {name}"] = run.load("gone")
    where = os.path.join(root, "gone")
    for name in (".metadata", "common.pt"):
        file, hidden = f"{where}/iter_0000005/{name}", f"{where}/hidden"
        if os.path.exists(file):  # not all versions have a common.pt
            run.on_rank_0(lambda a=file, b=hidden: os.rename(a, b))  # type: ignore[misc]
            found[f"without {name}"] = run.load("gone")
            run.on_rank_0(lambda a=file, b=hidden: os.rename(b, a))  # type: ignore[misc]
    run.on_rank_0(lambda: os.rename(f"{where}/{TRACKER}", f"{where}/hidden"))
    del heard[:]
    found["without tracker"] = (run.load("gone"), list(heard))
    run.on_rank_0(lambda: os.rename(f"{where}/hidden", f"{where}/{TRACKER}"))
    run.on_rank_0(lambda: os.rename(f"{where}/iter_0000005", f"{where}/iter_0000006"))
    found["without iter_0000005"] = run.load("gone")
    run.on_rank_0(lambda: Path(where, TRACKER).write_text("6"))
    put(f"{where}/iter_0000006", sidecar())
    found["renamed"] = run.load("gone")

    found["uninstalled"] = uninstalling(run)
    found["tracker"] = events
    return found


@contextlib.contextmanager
def watched(events: list[str]) -> Iterator[None]:
    """Notes what is done to files and to the tracker: syncs by path, what takes the tracker's name, and who opens it."""
    sync, rename, open_ = os.fsync, os.rename, builtins.open

    def noting_sync(fd: Any) -> None:
        events.append(f"sync {os.readlink(f'/proc/self/fd/{fd}')}")
        sync(fd)

    def noting_rename(source: Any, target: Any, **options: Any) -> None:
        events.append(f"rename {source} to {target}")
        rename(source, target, **options)

    def noting_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if str(file).endswith(TRACKER):
            events.append(f"open {file} {mode}")
        return open_(file, mode, *args, **options)

    replaced: Any = (noting_sync, noting_rename, noting_open)
    os.fsync, os.rename, builtins.open = replaced
    try:
        yield
    finally:
        os.fsync, os.rename, builtins.open = sync, rename, open_


def uninstalling(run: Run) -> dict[str, Any]:
    """The module's names while installed, after two uninstalls, and after a new install and a reload."""
    module = run.checkpointing
    holder: Any = types.ModuleType("some_framework")
    holder._load_base_checkpoint = module._load_base_checkpoint
    sys.modules[holder.__name__] = holder
    run.adapter.uninstall()
    run.adapter.uninstall()
    from megatron.core import msc_utils

    found = {
        "stock": [
            "open" not in vars(module),
            not hasattr(module._load_base_checkpoint, "__wrapped__"),
            holder._load_base_checkpoint is module._load_base_checkpoint,
            module.multiprocessing is importlib.import_module("multiprocessing"),
            getattr(module, "open_file", None) is getattr(msc_utils, "open_file", None),
            getattr(module, "maybe_msc", None) is (msc_utils.maybe_msc if hasattr(module, "maybe_msc") else None),
            all("ckpt_engine" not in type(finder).__module__ for finder in sys.meta_path),
            type(module.__spec__.loader).__name__ == "SourceFileLoader"
            and not vars(module.__spec__.loader).get("exec_module"),
        ]
    }
    found["loads"] = run.load("bare")
    run.adapter.install()
    found["again"] = [hasattr(module._load_base_checkpoint, "__wrapped__"), "open" in vars(module)]
    found["again"].append(holder._load_base_checkpoint is module._load_base_checkpoint)
    importlib.reload(module)
    found["again"] += [hasattr(module._load_base_checkpoint, "__wrapped__"), "open" in vars(module)]
    run.adapter.uninstall()
    found["end"] = [hasattr(module._load_base_checkpoint, "__wrapped__"), "open" in vars(module)]
    return found


class Fatal(int):
    """A step that kills the process when it is made text: stock does that between opening the tracker and writing it."""

    def __str__(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def crashing(rank: int, world: int, folder: str, root: str, asynchronous: bool, changed: bool) -> None:
    """Saves step 5, and dies in the middle of writing the tracker for step 6."""
    run = Run(rank, world, folder, root, asynchronous)
    run.save("run")
    run.async_utils.maybe_finalize_async_save(blocking=True)
    if not changed:
        from ckpt_engine.integrations.megatron import training

        training.restore()
    run.save("run", Fatal(6))
    run.async_utils.maybe_finalize_async_save(blocking=True)


PACKAGE = "megatron/training/checkpointing.py"


def odd_import(rank: int, world: int, root: str, source: str) -> dict[str, Any]:
    """A ``megatron.training.checkpointing`` that isn't the one that the engine knows."""
    from ckpt_engine.integrations.megatron import training

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt_engine").addHandler(handler)
    os.makedirs(os.path.join(root, os.path.dirname(PACKAGE)))
    Path(root, PACKAGE).write_text(source)
    sys.path.insert(0, root)
    training.watch()
    training.watch()
    try:
        module: Any = importlib.import_module("megatron.training.checkpointing")
    except ZeroDivisionError:
        return {"failed": "megatron.training.checkpointing" not in sys.modules, "heard": heard}
    found = {"names": sorted(name for name in vars(module) if not name.startswith("__")), "heard": heard}
    training.restore()
    return {**found, "after": sorted(name for name in vars(module) if not name.startswith("__"))}
