"""Inside Ray: saves from actors and tasks, a killed actor, the memory monitor, and groups made of actors.

One local Ray instance serves the whole module, with a threshold of its memory monitor low enough to be the limit that rules
the engine's budget. Whatever Ray started has to be gone at the end.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psutil
import pytest
import torch
import torch.distributed as dist

import ckpt_engine
from ckpt_engine import CheckpointEngine, CommitTimeoutError, EngineConfig
from ckpt_engine.config import MIB
from ckpt_engine.errors import ConfigError
from ckpt_engine.staging.guard import AUTO_CAP_BYTES, RAY_MARGIN, decide_budget

ray: Any = pytest.importorskip("ray")

import ckpt_engine.integrations.ray as ours  # noqa: E402  (it imports Ray)

pytestmark = pytest.mark.timeout(90)

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

#: For calls of actors; the import of torch in a new process is part of it.
PATIENCE = 60.0

#: Deadline of the saves that lose a rank, and what a busy machine may add.
COMMIT_TIMEOUT, SLACK = 3.0, 3.0

T = TypeVar("T")


def small_state(seed: int = 0, mib: int = 4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"weights": {f"w{i}": torch.randn(MIB // 4, generator=generator) for i in range(mib)}, "seed": seed}


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {"weights": {name: torch.zeros_like(value) for name, value in state["weights"].items()}, "seed": None}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    same = all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())
    return same and one["seed"] == other["seed"]


def forbidden(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a process was started, or a signal handler installed")


def without_processes(work: Callable[[], T]) -> T:
    """Does ``work`` where nothing can start a process or install a signal handler."""
    import _posixsubprocess
    import multiprocessing
    import signal

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp"):
            patch.setattr(os, name, forbidden)
        patch.setattr(subprocess, "Popen", forbidden)
        patch.setattr(_posixsubprocess, "fork_exec", forbidden)
        patch.setattr(multiprocessing.Process, "start", forbidden)
        patch.setattr(signal, "signal", forbidden)
        return work()


def save_thrice(directory: str) -> dict[str, Any]:
    """Three asynchronous saves and a restore; what it took, and where it ran."""
    budget, state = 8 * MIB, small_state(mib=64)
    process, peak, over = psutil.Process(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    def work() -> bool:
        with CheckpointEngine(directory, EngineConfig(staging_budget=budget)) as engine:
            for step in (1, 2, 3):
                engine.save(state, step=step)
            engine.wait(timeout=PATIENCE)
            assert engine.steps() == [1, 2, 3]
            return True

    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        without_processes(work)
    finally:
        over.set()
        watcher.join()
    found = blank(state)
    with CheckpointEngine(directory, EngineConfig(staging_budget=budget)) as engine:
        restored = engine.restore(found)
    return {
        "main thread": threading.current_thread() is threading.main_thread(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "CKPT_ENGINE_TEST": os.environ.get("CKPT_ENGINE_TEST"),
        "restored": restored is not None and restored.step == 3 and equal(state, found),
        "children": len(process.children(recursive=True)),
        "grown": peak - before - budget,
    }


class Rank:
    """One rank as an actor."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.engine: CheckpointEngine | None = None

    def call(self, fn: Callable[..., T], *args: Any) -> T:
        return fn(*args)

    def open(self, name: str, directory: str, budget: Any = 8 * MIB) -> Any:
        """Joins a group of two, and makes an engine. Returns what it says about memory."""
        if dist.is_initialized():
            dist.destroy_process_group()
        ours.join_group(self.rank, 2, name, timeout=PATIENCE / 2)
        config = EngineConfig(staging_budget=budget, commit_timeout=COMMIT_TIMEOUT)
        self.engine = CheckpointEngine(directory, config)
        return self.engine.memory()

    def save(self, step: int, *, wait: bool = True) -> None:
        assert self.engine is not None
        handle = self.engine.save({**small_state(step), "rank": ckpt_engine.PerRank(self.rank)}, step=step)
        if wait:
            handle.result(PATIENCE)

    def hang_in_fsync(self, marker: str) -> None:
        """From now on no write becomes durable here."""

        def hang(descriptor: int) -> None:
            pathlib.Path(marker).touch()
            time.sleep(PATIENCE)

        os.fsync = hang

    def lost(self) -> tuple[BaseException, float]:
        """The error that the save on its way ends with, and after how long."""
        assert self.engine is not None
        started = time.monotonic()
        with pytest.raises(CommitTimeoutError) as caught:
            self.engine.wait(PATIENCE)
        return caught.value, time.monotonic() - started

    def latest(self) -> int | None:
        assert self.engine is not None
        return self.engine.latest()

    def restore(self) -> tuple[int, bool, int]:
        assert self.engine is not None
        state = blank(small_state()) | {"rank": ckpt_engine.PerRank(None)}
        restored = self.engine.restore(state)
        assert restored is not None
        return restored.step, equal(small_state(restored.step), state), state["rank"].value

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close(PATIENCE)
            self.engine = None

    def pid(self) -> int:
        return os.getpid()


class AsyncRank:
    """An actor whose methods are coroutines."""

    async def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)


@pytest.fixture(autouse=True)
def no_child_process_left() -> None:
    """Instead of the one for all modules: Ray's processes live on from test to test, and :func:`cluster` counts them."""


@pytest.fixture(scope="module")
def threshold() -> float:
    """Far enough above what is in use that Ray kills nothing, and below what the engine would leave free by itself."""
    memory = psutil.virtual_memory()
    return round(min(0.9, (memory.total - memory.available) / memory.total + 0.35), 2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, threshold: float) -> Iterator[pathlib.Path]:
    """A local Ray; yields the directory of its logs."""
    import tempfile

    before = set(psutil.Process().children(recursive=True))
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ckpt-", ignore_cleanup_errors=True) as scratch,
    ):
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        patch.setenv("RAY_memory_usage_threshold", str(threshold))
        patch.setenv("RAY_AUTH_MODE", "disabled")  # it would keep a token in the home directory
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        started: list[psutil.Process] = []
        try:
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=80 * MIB,
                _temp_dir=scratch,
            )
            yield pathlib.Path(scratch) / "session_latest" / "logs"
            started = [child for child in psutil.Process().children(recursive=True) if child not in before]
        finally:
            ray.shutdown()
        _, left = psutil.wait_procs(started, timeout=15)
        for process in left:
            process.kill()
        assert [process.name() for process in left] == []


@pytest.fixture(scope="module")
def pair(cluster: pathlib.Path) -> list[Any]:
    """Two actors whose methods run on threads of Ray's. Each can be started again once."""
    actor = ray.remote(
        num_cpus=1, max_concurrency=2, max_restarts=1, runtime_env={"env_vars": {"CKPT_ENGINE_TEST": "1"}}
    )(Rank)
    return [actor.remote(rank) for rank in range(2)]


def on(actors: list[Any], method: str, *args: Any, **options: Any) -> list[Any]:
    result: list[Any] = ray.get([getattr(actor, method).remote(*args, **options) for actor in actors], timeout=PATIENCE)
    return result


# -- saves in actors and tasks -----------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_the_package_does_not_import_ray() -> None:
    code = "import ckpt_engine, ckpt_engine.integrations, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60).returncode == 0


def assert_as_in_a_trainer(found: dict[str, Any], *, main_thread: bool) -> None:
    assert found.pop("grown") <= 50 * MIB
    assert found.pop("CKPT_ENGINE_TEST") in ("1", None)
    assert found == {"main thread": main_thread, "OMP_NUM_THREADS": "1", "restored": True, "children": 0}


def test_saves_in_a_threaded_actor_start_no_process(pair: list[Any], tmp_path: pathlib.Path) -> None:
    """B058: fork, spawn, Popen and signal.signal raise, and the engine runs on a thread of Ray's; memory stays in budget."""
    found = ray.get(pair[0].call.remote(save_thrice, str(tmp_path)), timeout=PATIENCE)
    assert found["CKPT_ENGINE_TEST"] == "1", "the actor has no runtime_env"
    assert_as_in_a_trainer(found, main_thread=False)


def test_saves_in_an_async_actor_start_no_process(cluster: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """B058, with coroutines: the engine runs on the thread of the event loop."""
    actor = ray.remote(num_cpus=1)(AsyncRank).remote()
    assert_as_in_a_trainer(ray.get(actor.call.remote(save_thrice, str(tmp_path)), timeout=PATIENCE), main_thread=False)
    ray.kill(actor)


def test_saves_in_a_task_start_no_process(cluster: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """B058, in a task: on the main thread, but in a process of Ray's."""
    task = ray.remote(num_cpus=1)(save_thrice)
    assert_as_in_a_trainer(ray.get(task.remote(str(tmp_path)), timeout=PATIENCE), main_thread=True)


# -- memory ------------------------------------------------------------------------------------------------------------


def of_the_raylet(logs: pathlib.Path) -> tuple[int, int]:
    """Threshold and total as the raylet itself says them."""
    found = re.search(
        r"usage threshold at (\d+) bytes .* total system memory bytes: (\d+)", (logs / "raylet.out").read_text()
    )
    if found is None:
        pytest.skip("this version of Ray words its log otherwise")
    return int(found[1]), int(found[2])


def test_the_monitor_is_found_from_driver_actor_and_task(pair: list[Any], cluster: pathlib.Path) -> None:
    threshold, total = of_the_raylet(cluster)
    task = ray.remote(num_cpus=1)(ours.memory_monitor)
    seen = [ours.memory_monitor(), *ray.get([pair[0].call.remote(ours.memory_monitor), task.remote()])]
    for monitor in seen:
        assert monitor is not None and monitor.enabled and monitor.certain
        assert monitor.total == total
        assert monitor.threshold == pytest.approx(threshold, rel=1e-6)  # Ray computes in 32 bits
        assert set(monitor.settings) == {"RAY_memory_usage_threshold"}
        assert 0 < monitor.used < monitor.total
        assert monitor.room == monitor.threshold - int(total * RAY_MARGIN) - monitor.used


def test_variables_of_a_runtime_env_do_not_move_the_threshold(cluster: pathlib.Path) -> None:
    """The raylet decides, and it has its own environment."""
    options = {"num_cpus": 1, "runtime_env": {"env_vars": {"RAY_memory_usage_threshold": "0.99"}}}
    monitor = ray.get(ray.remote(**options)(ours.memory_monitor).remote(), timeout=PATIENCE)
    assert monitor.threshold == pytest.approx(of_the_raylet(cluster)[0], rel=1e-6)


def test_the_budget_of_an_actor_keeps_below_the_threshold(pair: list[Any], cluster: pathlib.Path) -> None:
    """B083: what "auto" grants leaves Ray's margin, however much the machine itself has free."""
    decision, monitor = ray.get(pair[0].call.remote(decide_and_look), timeout=PATIENCE)
    assert "Ray's memory threshold" in decision.explain()
    bound = {limit.name: limit.bound for limit in decision.limits if limit.name.startswith("Ray's")}
    assert min(bound.values()) == pytest.approx(of_the_raylet(cluster)[0], rel=1e-6)
    # Other processes come and go between the two looks.
    assert decision.granted <= monitor.room / 2 + 256 * MIB
    if decision.granted < AUTO_CAP_BYTES:
        assert decision.ruled_by.startswith("Ray's memory threshold"), decision.explain()


def decide_and_look() -> tuple[Any, Any]:
    return decide_budget("auto", local_ranks=1), ours.memory_monitor()


def test_two_actors_of_a_node_divide_the_budget(pair: list[Any], tmp_path: pathlib.Path) -> None:
    """B010: neither LOCAL_WORLD_SIZE nor anything else tells an actor how many share its node; the ranks find out together."""
    monitor = ours.memory_monitor()
    reports = on(pair, "open", uuid.uuid4().hex, str(tmp_path), "auto")
    on(pair, "close")
    assert monitor is not None
    assert [report.local_ranks for report in reports] == [2, 2]
    assert sum(report.granted for report in reports) <= monitor.room / 2 + 512 * MIB


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_without_all_of_its_ranks_names_who_is_missing(cluster: pathlib.Path) -> None:
    for rank, missing in ((0, (1,)), (1, (0,))):
        with pytest.raises(CommitTimeoutError) as caught:
            ours.join_group(rank, 2, uuid.uuid4().hex, timeout=0.5)
        assert caught.value.silent_ranks == missing
    assert not dist.is_initialized()


def test_ranks_that_disagree_about_their_number_are_refused(cluster: pathlib.Path) -> None:
    name = uuid.uuid4().hex
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(ours.join_group, rank, 2 + rank, name, timeout=10) for rank in range(2)]
        errors = [future.exception(PATIENCE) for future in joining]
    assert all(isinstance(error, ConfigError) and "rank 1: 3" in str(error) for error in errors), errors


def test_a_group_is_for_processes_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="rank is 2, expected 0 to 1"):
        ours.join_group(2, 2, "group")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="outside of Ray"):
        ours.join_group(0, 1, "group")


# -- a killed actor ----------------------------------------------------------------------------------------------------


@pytest.mark.crash
def test_a_killed_actor_costs_its_save_and_nothing_else(pair: list[Any], tmp_path: pathlib.Path) -> None:
    """B058, B032: the checkpoint before stays the latest; the other is told in time who is silent; both go on from there."""
    directory, marker = tmp_path / "checkpoints", tmp_path / "marker"
    on(pair, "open", uuid.uuid4().hex, str(directory))
    on(pair, "save", 1)
    survivor = ray.get(pair[0].pid.remote())
    ray.get(pair[1].hang_in_fsync.remote(str(marker)))
    on(pair, "save", 2, wait=False)
    deadline = time.monotonic() + PATIENCE
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    ray.kill(pair[1], no_restart=False)

    error, seconds = ray.get(pair[0].lost.remote(), timeout=PATIENCE)
    assert error.silent_ranks == (1,) and error.step == 2
    assert seconds <= COMMIT_TIMEOUT + SLACK
    assert ray.get(pair[0].latest.remote()) == 1
    ray.get(pair[0].close.remote(), timeout=PATIENCE)

    while True:  # calls of an actor that is being restarted fail
        try:
            ray.get(pair[1].pid.remote(), timeout=PATIENCE)
            break
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline, "the actor was not restarted"
            time.sleep(0.05)
    on(pair, "open", uuid.uuid4().hex, str(directory))
    assert on(pair, "restore") == [(1, True, 0), (1, True, 1)]
    on(pair, "save", 2)
    assert on(pair, "latest") == [2, 2]
    on(pair, "close")
    assert ray.get(pair[0].pid.remote()) == survivor
    assert sorted(path.name for path in directory.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
