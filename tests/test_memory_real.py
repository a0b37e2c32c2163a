"""Promises about saves under limits that are real: address space, a memory group with a neighbour, a group full of tasks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.config import MIB

pytestmark = pytest.mark.timeout(150)

ADDRESS_SPACE = """
import json, resource, sys, threading
import torch
from ckpt_engine import CheckpointEngine, EngineConfig
MIB = 1 << 20
def limit(room):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room * MIB if room else -1, -1))
state = {f"t{i}": torch.randn(MIB) for i in range(32)}
found = {key: torch.zeros_like(t) for key, t in state.items()}
early, late = int(sys.argv[2]), int(sys.argv[3])
limit(early)
out = {}
with CheckpointEngine(sys.argv[1], EngineConfig(staging_budget=64 * MIB, commit_timeout=30.0)) as engine:
    out["threads"] = engine.memory().threads
    out["ruled_by"] = engine.memory().ruled_by
    if late:
        limit(late)
    stats = engine.save(state, 1).result(60).stats
    out["extent"], out["peak"] = stats.extent_bytes, stats.peak_staged_bytes
    limit(0)
    out["after"] = engine.save(state, 2).result(60).stats.extent_bytes
    for step in (1, 2):
        engine.restore(found, step=step)
        assert all(torch.equal(found[key], state[key]) for key in state)
print(json.dumps(out))
"""


def run(script: str, *args: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", script, *args], timeout=100, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_address_space_that_runs_short_after_construction_makes_the_extents_smaller(tmp_path: Path) -> None:
    """A state of 128 MiB, twice what the process may still map."""
    out = run(ADDRESS_SPACE, str(tmp_path), "0", "56")
    assert MIB <= out["extent"] < 16 * MIB and out["peak"] <= 56 * MIB
    assert out["after"] == 16 * MIB


def test_with_little_address_space_from_the_start_stacks_are_counted_and_saves_work(tmp_path: Path) -> None:
    """Each thread would take 72 MiB of address space if it could; the whole state is 128 MiB."""
    out = run(ADDRESS_SPACE, str(tmp_path), "96", "0")
    assert out["threads"] >= 2 and out["ruled_by"] in ("RLIMIT_AS", "staging_budget")
    assert out["peak"] <= 64 * MIB


def own_group(controller: str) -> Path:
    """A control group of this test's own, below that of this process; skips where that can't be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            base = Path("/sys/fs/cgroup") / controller / path.lstrip("/")
            group = (base if base.is_dir() else Path("/sys/fs/cgroup") / controller) / f"ckpt-{uuid.uuid4().hex[:8]}"
            try:
                group.mkdir()
            except OSError as error:
                pytest.skip(f"no {controller} control group can be made here: {error}")
            return group
    pytest.skip(f"there is no v1 {controller} controller here, and under v2 a process can't make a group beside itself")


@pytest.fixture
def memory_group() -> Iterator[Path]:
    group = own_group("memory")
    yield group
    group.rmdir()


@pytest.fixture
def pids_group() -> Iterator[Path]:
    group = own_group("pids")
    yield group
    group.rmdir()


def start_in(group: Path, script: str, *args: str) -> subprocess.Popen[str]:
    enter = f"import os, sys; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    return subprocess.Popen(
        [sys.executable, "-c", enter + script, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def stop(*children: subprocess.Popen[str]) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
        child.communicate()


TRAINER = """
import json, time, threading
import torch
from ckpt_engine import CheckpointEngine, EngineConfig
MIB = 1 << 20
torch.set_num_threads(1)
state = {f"t{i}": torch.randn(MIB) for i in range(80)}
def tell(**what): print(json.dumps(what), flush=True)
real, written = os.pwrite, []
def slow(fd, data, offset):
    time.sleep(0.03)
    written.append(1)
    if len(written) == 20: tell(staging=True)
    return real(fd, data, offset)
os.pwrite = slow
tell(ready=True)
input()
with CheckpointEngine(sys.argv[1], EngineConfig(extent_bytes=2 * MIB, commit_timeout=60.0)) as engine:
    pool = engine._workers.pool
    granted, low = engine.memory().granted, []
    stop = threading.Event()
    def sample():
        while not stop.wait(0.02): low.append(pool.stats().mapped)
    thread = threading.Thread(target=sample)
    thread.start()
    info = engine.save(state, 1).result(90)
    stop.set(); thread.join()
    pressed = engine.memory()
    tell(granted=granted, mapped=low, peak=info.stats.peak_staged_bytes, ceiling=pressed.ceiling, reason=pressed.reason)
    input()
    written += [1] * 40
    engine.save(state, 2).result(90)
    tell(ceiling=engine.memory().ceiling)
    os.pwrite = real
    input()
    found = {key: torch.zeros_like(t) for key, t in state.items()}
    same = []
    for step in (1, 2):
        engine.restore(found, step=step)
        same.append(all(torch.equal(found[key], state[key]) for key in state))
    tell(same=same)
"""

NEIGHBOUR = """
import mmap, time
print("up", flush=True)
size = int(input())
blocks = []
for _ in range(size // (4 << 20)):
    blocks.append(mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    blocks[-1].write(b"x" * (4 << 20))
    time.sleep(0.03)
print("grown", flush=True)
input()
"""


def test_a_neighbour_that_grows_makes_the_pool_give_memory_back_while_a_save_is_staging(
    memory_group: Path, tmp_path: Path
) -> None:
    """B010, B083: a real memory group; 320 MiB are saved while the room in it shrinks from 200 MiB to 60; nobody is killed."""

    def figure(name: str) -> int:
        return int((memory_group / name).read_text())

    def heard(child: subprocess.Popen[str]) -> dict[str, Any]:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line, "the trainer died"
        found: dict[str, Any] = json.loads(line)
        return found

    def say(child: subprocess.Popen[str], text: str) -> None:
        assert child.stdin is not None
        child.stdin.write(text + "\n")
        child.stdin.flush()

    trainer, neighbour = start_in(memory_group, TRAINER, str(tmp_path)), start_in(memory_group, NEIGHBOUR)
    try:
        assert heard(trainer) == {"ready": True}
        assert neighbour.stdout is not None and neighbour.stdout.readline() == "up\n"
        stat = dict(line.split() for line in (memory_group / "memory.stat").read_text().splitlines())
        anonymous = figure("memory.usage_in_bytes") - int(stat["total_inactive_file"]) - int(stat["total_active_file"])
        (memory_group / "memory.limit_in_bytes").write_text(str(anonymous + 200 * MIB))
        say(trainer, "go")
        assert heard(trainer) == {"staging": True}
        say(neighbour, str(140 * MIB))
        first = heard(trainer)
        assert neighbour.stdout.readline() == "grown\n"
        assert 60 * MIB <= first["granted"] <= 100 * MIB
        assert max(first["mapped"]) > 50 * MIB, "there was something to give back"
        assert first["mapped"][-1] <= 40 * MIB and first["ceiling"] <= 40 * MIB
        assert "cgroup memory.limit_in_bytes" in first["reason"]
        neighbour.communicate("\n", timeout=20)
        say(trainer, "again")
        second = heard(trainer)
        assert second["ceiling"] >= 60 * MIB, "relief lets it grow again"
        (memory_group / "memory.limit_in_bytes").write_text("-1")
        say(trainer, "compare")
        assert heard(trainer) == {"same": [True, True]}
        trainer.communicate(timeout=30)
        assert trainer.returncode == neighbour.returncode == 0
        assert "oom_kill 0" in (memory_group / "memory.oom_control").read_text()
    finally:
        stop(trainer, neighbour)


FEW_TASKS = """
import json, threading
import torch
from ckpt_engine import CheckpointEngine, EngineConfig
torch.set_num_threads(1)
state = {f"t{i}": torch.randn(1 << 20) for i in range(16)}
tasks = len(os.listdir("/proc/self/task"))
group, spare = sys.argv[2], int(sys.argv[3])
open(group + "/pids.max", "w").write(str(tasks + spare))
with CheckpointEngine(sys.argv[1], EngineConfig(staging_budget=32 << 20, copy_threads=4, writers=3)) as engine:
    threads = engine.memory().threads
    engine.save(state, 1).result(60)
    open(group + "/pids.max", "w").write("max")
    found = {key: torch.zeros_like(t) for key, t in state.items()}
    engine.restore(found, step=1)
    assert all(torch.equal(found[key], state[key]) for key in state)
print(json.dumps(threads))
"""


def test_a_group_that_is_full_of_tasks_gets_its_saves_with_fewer_threads(pids_group: Path, tmp_path: Path) -> None:
    """A real pids group with room for one committer, one copy thread and two more."""
    child = start_in(pids_group, FEW_TASKS, str(tmp_path), str(pids_group), "4")
    try:
        output, _ = child.communicate(timeout=90)
        assert child.returncode == 0
        assert json.loads(output) == 3
    finally:
        stop(child)
