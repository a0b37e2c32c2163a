"""What a campaign looks like from outside: memory of processes and of their group over time, and what the trainer tells.

A sample is taken every :data:`SAMPLE_SECONDS`; what comes and goes in between is missed, except where the kernel keeps count
(out of memory, the group's highest usage) or the trainer does (forks).
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.soak.cgroups import MemoryGroup, Usage

SAMPLE_SECONDS = 0.05
_PSS_EVERY = 20  # reading it walks all page tables
_FIGURES = (
    "at",
    "trainer",
    "pss",
    "neighbour",
    "charged",
    "working_set",
    "address_space",
    "threads",
    "descriptors",
    "children",
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Sizes in bytes, resident where it says nothing else; 0 where there is none."""

    at: float
    trainer: int
    pss: int
    neighbour: int
    charged: int
    working_set: int
    address_space: int
    threads: int
    descriptors: int
    children: int


class Sampler:
    """A thread that takes samples until it is stopped. A context manager."""

    def __init__(self, trainer: int, neighbour: int | None, group: MemoryGroup | None) -> None:
        self.samples: list[Sample] = []
        self._trainer, self._neighbour, self._group = trainer, neighbour, group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def figures(self) -> dict[str, list[float]]:
        """The samples by name, as lists."""
        return {name: [getattr(sample, name) for sample in self.samples] for name in _FIGURES}

    def peak(self, name: str) -> int:
        return max((int(getattr(sample, name)) for sample in self.samples), default=0)

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(SAMPLE_SECONDS):
            usage = self._group.usage() if self._group is not None else Usage(0, 0)
            self.samples.append(
                Sample(
                    time.monotonic(),
                    resident(self._trainer),
                    pss(self._trainer) if number % _PSS_EVERY == 0 else 0,
                    resident(self._neighbour) if self._neighbour is not None else 0,
                    usage.charged,
                    usage.working_set,
                    _mapped(self._trainer),
                    _entries(f"/proc/{self._trainer}/task"),
                    _entries(f"/proc/{self._trainer}/fd"),
                    children(self._trainer),
                )
            )
            number += 1


class Tells:
    """What the trainer has told so far. :meth:`follow` reads on."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"")  # of an earlier campaign in the same place
        self.lines: list[dict[str, Any]] = []
        self._path, self._at, self._rest = path, 0, b""

    def follow(self) -> list[dict[str, Any]]:
        """The new lines."""
        with open(self._path, "rb") as file:
            file.seek(self._at)
            content = file.read()
        self._at += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        new = [json.loads(line) for line in whole]
        self.lines += new
        return new

    def first(self, key: str) -> dict[str, Any] | None:
        return next(self.all(key), None)

    def all(self, key: str) -> Iterator[dict[str, Any]]:
        return (line for line in self.lines if key in line)


def resident(pid: int) -> int:
    """Resident set size, or 0 of a process that has ended."""
    return _statm(pid, 1)


def _mapped(pid: int) -> int:
    return _statm(pid, 0)


def _statm(pid: int, field: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[field]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0  # it has ended


def pss(pid: int) -> int:
    """Proportional set size, or 0."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next((1024 * int(line.split()[1]) for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0


def children(pid: int) -> int:
    """Child processes that there are at this moment."""
    count = 0
    for thread in _listed(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                count += len(file.read().split())
        except OSError:
            pass  # a thread that has ended
    return count


def _entries(path: str) -> int:
    return len(_listed(path))


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
