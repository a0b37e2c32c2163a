"""What ``memory_monitor`` makes of a made-up machine: settings of the raylet, containers, resource isolation.

The rules are those that Ray's sources state; ``test_ray.py`` holds the common case against what a running raylet says.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("ray")

import ckpt_engine.integrations.ray as ours  # it imports Ray

pytestmark = pytest.mark.timeout(60)

GIB = 1 << 30

RAYLET = "4711"


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ours.MemoryMonitor]:
    """A worker's view of a made-up machine: 100 GiB, of which 40 are in use."""
    monkeypatch.setenv("RAY_RAYLET_PID", RAYLET)
    files = {"proc/meminfo": f"MemTotal: {100 * GIB // 1024} kB\nMemAvailable: {60 * GIB // 1024} kB\n"}

    def look(more: dict[str, str], **environ: str) -> ours.MemoryMonitor:
        entries = "\0".join(f"{name}={value}" for name, value in environ.items())
        for name, text in {**files, f"proc/{RAYLET}/environ": entries, **more}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monitor = ours.memory_monitor(proc=str(tmp_path / "proc"), cgroup_root=str(tmp_path / "cgroup"))
        assert monitor is not None
        return monitor

    return look


def gib(*amounts: float) -> tuple[Any, ...]:
    return tuple(pytest.approx(amount * GIB, rel=1e-6) for amount in amounts)


@pytest.mark.parametrize(
    "environ, threshold",
    [
        ({}, 95.0),
        ({"RAY_memory_usage_threshold": "0.5"}, 50.0),
        ({"RAY_memory_usage_threshold": "0.5", "RAY_min_memory_free_bytes": str(10 * GIB)}, 90.0),
        ({"RAY_memory_usage_threshold": "much"}, 95.0),
    ],
)
def test_settings_of_the_raylet(machine: Callable[..., Any], environ: dict[str, str], threshold: float) -> None:
    monitor = machine({}, **environ)
    assert (monitor.watched, monitor.total, monitor.used, monitor.threshold) == ("the node", *gib(100, 40, threshold))
    assert monitor.limit().room == monitor.room == gib(threshold - 2 - 40)[0]
    assert "\n" not in str(monitor)


def test_a_monitor_that_is_off_says_so(machine: Callable[..., Any]) -> None:
    assert "off" in str(machine({}, RAY_memory_monitor_refresh_ms="0"))


def test_a_container_is_watched_without_its_file_cache(machine: Callable[..., Any]) -> None:
    """Since Ray 2.10 neither list of file pages counts as used. What lies below the root of the mount isn't looked at."""
    stat = f"anon {2 * GIB}\ninactive_file {4 * GIB}\nactive_file {5 * GIB}\n"
    v2 = {"memory.max": f"{20 * GIB}\n", "memory.current": f"{12 * GIB}\n", "memory.stat": stat}
    v1 = {
        "memory.limit_in_bytes": f"{20 * GIB}\n",
        "memory.usage_in_bytes": f"{12 * GIB}\n",
        "memory.stat": stat.replace("inactive_file", "total_inactive_file").replace("\nactive", "\ntotal_active"),
    }
    tighter = {"cgroup/job/memory.max": f"{4 * GIB}\n", "proc/self/cgroup": "0::/job\n"}
    for files in (
        {f"cgroup/memory/{name}": text for name, text in v1.items()},
        {f"cgroup/{n}": t for n, t in v2.items()},
    ):
        monitor = machine(files | tighter)
        assert (monitor.watched, monitor.total, monitor.used) == ("the container", *gib(20, 3))
        assert monitor.threshold == gib(19)[0]


def test_a_limit_above_the_memory_of_the_node_is_none(machine: Callable[..., Any]) -> None:
    files = {"memory.limit_in_bytes": str(2**63 - 4096), "memory.usage_in_bytes": "1", "memory.stat": "x 1\n"}
    assert machine({f"cgroup/memory/{name}": text for name, text in files.items()}).watched == "the node"


def test_under_resource_isolation_the_limit_of_the_user_group_kills(machine: Callable[..., Any]) -> None:
    """Objects in shared memory count there, too, whichever of Ray's two groups they were charged to."""
    node = "cgroup/box/ray-node_0123"
    monitor = machine(
        {
            "proc/self/cgroup": "0::/box/ray-node_0123/user/workers\n",
            f"{node}/user/memory.high": f"{30 * GIB}\n",
            f"{node}/user/memory.stat": f"anon {5 * GIB}\nfile {9 * GIB}\nshmem {2 * GIB}\n",
            f"{node}/system/memory.stat": f"anon {7 * GIB}\nshmem {3 * GIB}\n",
        }
    )
    assert (monitor.watched, monitor.used, monitor.threshold) == ("Ray's user group", *gib(10, 30))
