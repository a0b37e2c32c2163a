"""What RL and training frameworks do with Megatron, call for call, on two gloo ranks with the engine installed.

Each act stands for one way in which a framework saves (SkyRL, AReaL, verl, NeMo-RL, slime and miles, ms-swift, Megatron-Bridge):
which queue it owns, what it looks at and changes in a request, from which thread it finalises, what it patches. Nothing in an
act knows of the engine but its look at the result. All acts of a version run in one pair of processes (:func:`play`), in which
no process can be started. The promises about what comes of them are in :mod:`tests.test_megatron_frameworks`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import logging
import os
import shutil
import sys
import time
import typing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron_framework_tools import (
    SHARD_FILE,
    another_writer,
    asked,
    async_classes,
    blank_of,
    default_strategy,
    free,
    import_by_name,
    in_a_thread,
    names,
    own_strategy,
    queue_of_megatron_training,
    retained_by,
    save,
    saves_through_nvrx,
    shards_of,
    skyrls_queue,
    staged_on_the_host,
    threads_forced,
    wrong_with,
)
from tests.megatron_ranks import (
    CONFIG,
    _forbid_processes,
    _outcome,
    big_state,
    data_of,
    problems,
    published,
    state,
    writes,
)


def play(rank: int, world: int, folder: str, nvrx: str | None, root: str) -> dict[str, Any]:
    """Runs all acts, with NVRx from the folder ``nvrx``; for each of them its result, or the text of what it raised."""
    from tests import megatron_shims

    megatron_shims.use(folder)
    if nvrx is not None:
        sys.path.insert(0, nvrx)
    if not hasattr(typing, "override"):  # Python 3.11; the wheels of megatron.training are for 3.12
        typing.override = lambda function: function  # type: ignore[attr-defined]
    handler = logging.FileHandler(log_of(root, rank))  # to the end of the process: exit handlers have a say, too
    handler.setLevel(logging.WARNING)
    logging.getLogger("ckpt_engine").addHandler(handler)
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("fork"))
    _forbid_processes()
    import_by_name()
    from megatron.core.msc_utils import MultiStorageClientFeature

    import ckpt_engine
    import ckpt_engine.megatron

    MultiStorageClientFeature.disable()  # what else is installed here must decide about one act only
    ckpt_engine.megatron.install(ckpt_engine.EngineConfig(**CONFIG))
    found: dict[str, Any] = {}
    for name, act in ACTS.items():
        directory = os.path.join(root, name)
        if rank == 0:
            os.mkdir(directory)
        dist.barrier()
        found[name] = _outcome(lambda act=act, directory=directory: act(rank, directory))  # type: ignore[misc]
        dist.barrier()
    found["forks"] = forks
    return found


def log_of(root: str, rank: int) -> str:
    """Where a rank keeps what the engine says at level WARNING and above, its exit included."""
    return os.path.join(root, f"log-{rank}.txt")


# -- SkyRL ---------------------------------------------------------------------------------------------------------------


def act_skyrl_async(rank: int, directory: str) -> Any:
    """Staged on the host, scheduled on the queue that SkyRL puts into Megatron; a helper thread finalises the last save."""
    wanted, finalised = {}, []
    with skyrls_queue() as base:
        for step in (1, 2):
            finalised.append(base.async_calls.maybe_finalize_async_calls(blocking=True))
            path = os.path.join(directory, f"global_step_{step}", "policy")
            sharded = state(float(step))
            wanted[path] = data_of(sharded)
            request = save(sharded, path, default_strategy(), async_sharded_save=True, **asked("mcore"))
            request = staged_on_the_host(request)
            free(sharded)
            base.async_calls.schedule_async_request(request)
            dist.barrier()
        finalised.append(in_a_thread(lambda: base.async_calls.maybe_finalize_async_calls(blocking=True)))
    return {"problems": wrong_with(wanted), "finalised": finalised}


def act_skyrl_nothing_to_write(rank: int, directory: str) -> Any:
    """A state so small that one of the ranks gets nothing of it to write."""
    sharded = {"replica": state(3.0)["replica"]}
    wanted = data_of(sharded)
    blank = {"replica": state(blank=True)["replica"]}
    with skyrls_queue() as base:
        request = save(sharded, directory, default_strategy(), async_sharded_save=True, **asked("mcore"))
        base.async_calls.schedule_async_request(staged_on_the_host(request))
        free(sharded)
        in_a_thread(lambda: base.async_calls.maybe_finalize_async_calls(blocking=True))
    return problems(directory, wanted, blank)


def act_skyrl_sync(rank: int, directory: str) -> Any:
    """After each synchronous save the queue is closed and made anew, also with an asynchronous save in it (the third)."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    wanted = {}
    with skyrls_queue() as base:
        for step, asynchronous in enumerate((False, False, True, False), 1):
            path = os.path.join(directory, f"global_step_{step}")
            sharded = state(float(step))
            wanted[path] = data_of(sharded)
            options = asked("mcore") if asynchronous else {}
            request = save(sharded, path, default_strategy(), async_sharded_save=asynchronous, **options)
            if asynchronous:
                base.async_calls.schedule_async_request(request)
            elif request is not None:
                raise ValueError("a synchronous save has returned a request")
            free(sharded)
            if not asynchronous:
                dist.barrier()
                base.async_calls.close()
                base.async_calls = AsyncCallsQueue(persistent=True)
    return wrong_with(wanted)


def act_skyrl_cloud(rank: int, directory: str) -> Any:
    """A load from a bucket: every rank fetches its own shard files, rank 0 all other files, and no folder."""
    from megatron.core import dist_checkpointing

    bucket, local = os.path.join(directory, "bucket"), os.path.join(directory, "local")
    sharded = state(4.0)
    wanted = data_of(sharded)
    save(sharded, bucket, default_strategy(), async_sharded_save=False)
    if rank == 0:
        os.mkdir(local)
    dist.barrier()
    mine = []
    for entry in sorted(os.scandir(bucket), key=lambda entry: entry.name):
        match = SHARD_FILE.search(entry.name)
        if match is not None and int(match[1]) == rank:
            mine.append(entry.name)
        if entry.name in mine or (rank == 0 and match is None and not entry.is_dir()):
            shutil.copyfile(entry.path, os.path.join(local, entry.name))
    dist.barrier()
    loaded = dist_checkpointing.load(state(blank=True), local)
    tensors = {key: value for key, value in wanted.items() if isinstance(value, torch.Tensor)}
    return {
        "fetched": mine,
        "differ": [key for key, value in tensors.items() if not torch.equal(loaded[key], value)],
        "written": sorted(shards_of(bucket, rank)),
    }


# -- AReaL ---------------------------------------------------------------------------------------------------------------


def act_areal(rank: int, directory: str) -> Any:
    """A queue of its own, requests that it looks into and clears, and a publication with a collective in it.

    B035: the ranks write at different speeds and poll at different times.
    """
    calls = names["AsyncCallsQueue"]()
    wanted, polls, depths = {}, [], []
    publications: list[Any] = []

    def publish(path: str) -> None:
        seen = [published(path)] if rank == 0 else [None]
        dist.broadcast_object_list(seen, src=0)
        publications.append(seen[0])

    with writes(lambda: time.sleep(0.4)) if rank == 1 else contextlib.nullcontext():
        for step in (1, 2):
            path = os.path.join(directory, f"step_{step}")
            polls.append(calls.maybe_finalize_async_calls(blocking=False))
            sharded = state(float(step))
            wanted[path] = data_of(sharded)
            request = save(sharded, path, default_strategy(), async_sharded_save=True, **asked("mcore"))
            lists = retained_by(request)
            request.add_finalize_fn(lambda path=path: publish(path))
            calls.schedule_async_request(request)
            for tensors in lists:
                tensors.clear()
            free(sharded)
            for _ in range(3):
                depths.append(calls.get_num_unfinalized_calls())
                time.sleep(0.1 * rank)
                polls.append(calls.maybe_finalize_async_calls(blocking=False))
        for _ in range(2):  # the second one has nothing to wait for
            polls.append(calls.maybe_finalize_async_calls(blocking=True))
    return {"problems": wrong_with(wanted), "polls": polls, "depths": depths, "publications": publications}


# -- verl ----------------------------------------------------------------------------------------------------------------


def act_verl(rank: int, directory: str) -> Any:
    """Three requests a save on Megatron's queue, nobody polls, and only the last request has a finalize function."""
    from megatron.core.dist_checkpointing.strategies.base import async_calls

    wanted: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    tracked: list[list[list[str]]] = []
    for step in (1, 2):
        # The large one is written last, and reported last, if nothing keeps the order.
        model, optimizer, extra = big_state(6 * step), state(10.0 * step), {"object": state(float(step))["object"]}
        parts = {
            "model": (model, blank_of(lambda step=step: big_state(6 * step))),  # type: ignore[misc]
            "optimizer": (optimizer, state(blank=True)),
            "extra": ({**extra, "iteration": step}, {"object": state(blank=True)["object"]}),
        }
        paths = [os.path.join(directory, f"global_step_{step}", name) for name in parts]
        for path, (sharded, blank) in zip(paths, parts.values(), strict=True):
            wanted.append((path, data_of(sharded), blank))
            request = save(sharded, path, own_strategy(), async_sharded_save=True)
            if path == paths[-1]:
                request.add_finalize_fn(lambda paths=paths: tracked.append([published(path) for path in paths]))
            async_calls.schedule_async_request(request)
            free(sharded)
    async_calls.maybe_finalize_async_calls(blocking=True)
    found = [problem for path, data, blank in wanted for problem in problems(path, data, blank)]
    return {"problems": found, "tracked": tracked}


def act_verl_own_queue(rank: int, directory: str) -> Any:
    """As later versions of verl do: a queue of its own, polled once per training step, with metadata of the content."""
    from megatron.core import dist_checkpointing

    calls = names["AsyncCallsQueue"](persistent=False)
    sharded = state(2.0)
    wanted = data_of(sharded)
    content = {"distrib_optim_sharding_type": "dp_reshardable"}
    options = {"content_metadata": dict(content), **asked("mcore")}
    calls.schedule_async_request(save(sharded, directory, default_strategy(), async_sharded_save=True, **options))
    free(sharded)
    deadline, finalised = time.monotonic() + 20, []
    while not finalised and time.monotonic() < deadline:
        time.sleep(0.02)
        finalised = calls.maybe_finalize_async_calls(blocking=False)
    kept = dist_checkpointing.load_content_metadata(directory)
    return {"problems": problems(directory, wanted), "finalised": finalised, "kept": kept == content}


def act_verl_dropped(rank: int, directory: str) -> Any:
    """B046: nobody schedules the request. The next save has nothing to do with it."""
    dropped, path = os.path.join(directory, "dropped"), os.path.join(directory, "next")
    request = save(state(9.0), dropped, own_strategy(), async_sharded_save=True)
    del request
    gc.collect()
    sharded = state(3.0)
    wanted = data_of(sharded)
    save(sharded, path, own_strategy(), async_sharded_save=False)
    return {"problems": problems(path, wanted), "dropped": published(dropped)}


# -- NeMo-RL -------------------------------------------------------------------------------------------------------------


def act_nemo_rl(rank: int, directory: str) -> Any:
    """Saves into ``tmp_step_N``; a thread finalises, a thread renames it. In between the caches of the writer are emptied."""
    wanted = {}
    for step, asynchronous in ((3, False), (4, True)):
        part = os.path.join("policy", "weights", f"iter_{step:07d}") if asynchronous else ""
        temporary, final = (os.path.join(directory, f"{prefix}step_{step}") for prefix in ("tmp_", ""))
        sharded = state(float(step))
        wanted[os.path.join(final, part)] = data_of(sharded)
        if asynchronous:
            calls = queue_of_megatron_training()
            request = save(sharded, os.path.join(temporary, part), own_strategy(), async_sharded_save=True)
            calls.schedule_async_request(request)
            free(sharded)
            in_a_thread(lambda calls=calls: calls.maybe_finalize_async_calls(blocking=True))  # type: ignore[misc]
            del request
            gc.collect()
            getattr(async_classes()["FileSystemWriterAsync"], "cleanup_tensor_caches", lambda: None)()  # NVRx has it
        else:
            with saves_through_nvrx():
                save(sharded, os.path.join(temporary, part), own_strategy(), async_sharded_save=False)
        dist.barrier()
        if rank == 0:
            in_a_thread(lambda temporary=temporary, final=final: os.rename(temporary, final))  # type: ignore[misc]
        dist.barrier()
    return {"problems": wrong_with(wanted), "left": sorted(os.listdir(directory))}


# -- slime, miles --------------------------------------------------------------------------------------------------------


def act_slime(rank: int, directory: str) -> Any:
    """Another writer class in Megatron's module, a new strategy per save, and a blocking finalisation before each."""
    calls, wanted, finalised = names["AsyncCallsQueue"](), {}, []
    with another_writer():
        for step in (1, 2, 3):
            finalised.append(calls.maybe_finalize_async_calls(blocking=True))
            path = os.path.join(directory, f"iter_{step:07d}")
            sharded = state(float(step))
            wanted[path] = data_of(sharded)
            calls.schedule_async_request(save(sharded, path, own_strategy(), async_sharded_save=True))
            free(sharded)
        finalised.append(calls.maybe_finalize_async_calls(blocking=True))
    return {"problems": wrong_with(wanted), "finalised": finalised}


# -- ms-swift ------------------------------------------------------------------------------------------------------------


def act_ms_swift(rank: int, directory: str) -> Any:
    """The tracker names a checkpoint from the moment that it is scheduled. What do we say of it until it is complete?"""
    from ckpt_engine import CheckpointEngine
    from ckpt_engine.restore.verify import verify_checkpoint

    calls = names["AsyncCallsQueue"]()
    tracker = os.path.join(directory, "latest_checkpointed_iteration.txt")
    found: dict[str, Any] = {"tracked": [], "committed": [], "verified": []}

    def comparable(common: dict[str, Any]) -> dict[str, Any]:
        return {**common, "args": {k: v for k, v in vars(common["args"]).items() if k != "rank"}}

    def look(path: str) -> None:
        dist.barrier()
        with open(tracker) as file:
            found["tracked"].append(int(file.read()))
        found["verified"].append(verify_checkpoint(path).ok)
        with CheckpointEngine(directory) as engine:
            found["committed"].append(engine.latest())
        dist.barrier()

    wanted = {}
    with threads_forced(3):
        for step in (1, 2):
            path = os.path.join(directory, f"iter_{step:07d}")
            sharded = state(float(step))
            wanted[path] = data_of(sharded)
            sharded["args"] = argparse.Namespace(rank=rank, iteration=step, save=directory)
            strategy = names["TorchDistSaveShardedStrategy"]() if asked("mcore") else default_strategy()
            options = {"preprocess_common_before_consistancy_check": comparable, **(asked("mcore") if step > 1 else {})}
            request = save(sharded, path, strategy, async_sharded_save=True, **options)
            if rank == 0:
                with open(tracker, "w") as file:
                    file.write(str(step))
            calls.schedule_async_request(request)
            del sharded["args"]
            free(sharded)
            look(path)
            calls.maybe_finalize_async_calls(True, no_dist=False)
            look(path)
    calls.close()
    return {"problems": wrong_with(wanted), **found}


# -- Megatron-Bridge, and others -----------------------------------------------------------------------------------------


def act_bridge(rank: int, directory: str) -> Any:
    """A queue of the default strategy with a warmed-up worker, polled in every iteration, and closed at the end."""
    classes, finalised, wanted = async_classes(), [], {}
    calls = classes["AsyncCallsQueue"](persistent=True)
    for mode in ("fork", "spawn"):
        how = {} if calls.__module__.startswith("nvidia") else {"mp_mode": mode}  # NVRx always spawns
        if hasattr(classes["AsyncCallsQueue"], "warmup_persistent_caller"):
            classes["AsyncCallsQueue"].warmup_persistent_caller(rank, cpu_priority=10, io_priority=None, **how)
        classes["get_write_results_queue"](mode)
    strategy = own_strategy(thread_count=2)
    done: list[int] = []
    for step in range(1, 7):
        if step % 2 == 0:
            path = os.path.join(directory, f"iter_{step:07d}")
            sharded = state(float(step))
            wanted[path] = data_of(sharded)
            request = save(sharded, path, strategy, async_sharded_save=True, **asked("nvrx"))
            request.add_finalize_fn(lambda step=step: done.append(step))
            request.add_finalize_fn(dist.barrier)
            calls.schedule_async_request(request)
            free(sharded)
        finalised += calls.maybe_finalize_async_calls(blocking=False, no_dist=False)
    finalised += calls.maybe_finalize_async_calls(blocking=True, no_dist=False)
    calls.close()
    return {"problems": wrong_with(wanted), "finalised": finalised, "done": done, "queue": type(calls).__module__}


def act_executed_by_the_caller(rank: int, directory: str) -> Any:
    """As trainers do that want a synchronous save with a strategy of their choice: an asynchronous one, run on the spot."""
    sharded = state(5.0)
    wanted = data_of(sharded)
    request = save(sharded, directory, own_strategy(thread_count=2), async_sharded_save=True, **asked("mcore"))
    request.execute_sync()
    free(sharded)
    return problems(directory, wanted)


def act_msc_installed(rank: int, directory: str) -> Any:
    """multi-storage-client (Megatron's extra "dev") is on for all paths where it is installed, up to 0.17: for plain ones, too."""
    from megatron.core.msc_utils import MultiStorageClientFeature

    if importlib.util.find_spec("multistorageclient") is None:
        return "multi-storage-client is not installed"
    found = {}
    MultiStorageClientFeature.enable()
    try:
        for name, asynchronous in (("sync", False), ("async", True)):
            path = os.path.join(directory, name)
            sharded = state(6.0)
            wanted = data_of(sharded)
            calls = names["AsyncCallsQueue"]()
            request = save(sharded, path, own_strategy(), async_sharded_save=asynchronous)
            if request is not None:
                calls.schedule_async_request(request)
                free(sharded)
                calls.maybe_finalize_async_calls(blocking=True)
            found[name] = {"problems": problems(path, wanted), "published": published(path)}
    finally:
        MultiStorageClientFeature.disable()
    return found


ACTS: dict[str, Callable[[int, str], Any]] = {
    name.removeprefix("act_"): act for name, act in list(globals().items()) if name.startswith("act_")
}
