"""What all tests share.

* A test that leaves a child process behind fails: the engine promises never to start one, and a forgotten helper of one
  test would take the processor and the files of the next.
* ``free_port``: a loopback port for tests that start ranks of their own.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator

import psutil
import pytest

#: Helper of the standard library that lives as long as the process that first used multiprocessing.
_LIVES_ON = "multiprocessing.resource_tracker"


def _describe(process: psutil.Process) -> str | None:
    """Command line of a process, or None if it has gone or may stay."""
    try:
        command = " ".join(process.cmdline()) or process.name()
        status = process.status()
    except psutil.NoSuchProcess:
        return None
    return None if _LIVES_ON in command else f"pid {process.pid} ({status}): {command[:200]}"


@pytest.fixture(autouse=True)
def no_child_process_left() -> Iterator[None]:
    """Fails a test that leaves child processes, and ends them so that they can't disturb the next one."""
    this = psutil.Process()
    before = set(this.children(recursive=True))
    yield
    multiprocessing.active_children()  # reaps those that have ended
    left = [child for child in this.children(recursive=True) if child not in before]
    _, left = psutil.wait_procs([child for child in left if _describe(child)], timeout=2.0)
    found = [text for text in map(_describe, left) if text]
    for child in left:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(left, timeout=5.0)
    if found:
        pytest.fail("child processes left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture
def free_port() -> int:
    """A TCP port on the loopback interface that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
