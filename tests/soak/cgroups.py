"""A memory group of one's own: made below (v1) or next to (v2) the group of this process, and removed afterwards.

What it promises: the limit is on that group alone, and this process never enters it; no setting of any other group is
touched. :class:`Unavailable` says why there is none.

What counts as used: the working set, which is usage without the file cache that the kernel can drop. The cache of a group
fills up to its limit sooner or later, and says nothing about who needs memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 10.0


class Unavailable(Exception):
    """Something that a campaign needs isn't here. The message is the reason."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """Bytes charged to a group: all of it, and what of it isn't file cache."""

    charged: int
    working_set: int


@dataclasses.dataclass(frozen=True)
class Deaths:
    """Times that the group was out of memory, and processes killed for it; ``limit_hit``: times it reached its limit at all.

    Reaching the limit is no failure: the kernel drops file cache then.
    """

    out_of_memory: int
    killed: int
    limit_hit: int


class MemoryGroup:
    """One group.

    Attributes:
        directory: where it is mounted.
        version: 1 or 2.
    """

    def __init__(self, directory: Path, version: int) -> None:
        self.directory = directory
        self.version = version
        self._events = _listen(directory) if version == 1 else None
        self._out_of_memory = 0

    @property
    def mount(self) -> str:
        """The mount point that shows groups of this version to the memory guard and to Ray."""
        return str(_ROOT / "memory" if self.version == 1 else _ROOT)

    def limit(self, size: int | None) -> None:
        """Sets the limit, or none."""
        name, none = ("memory.limit_in_bytes", "-1") if self.version == 1 else ("memory.max", "max")
        self._write(name, none if size is None else str(size))
        if self.version == 2:
            with contextlib.suppress(OSError):  # a kernel without swap accounting
                self._write("memory.swap.max", "max" if size is None else "0")

    def usage(self) -> Usage:
        charged = int(self._read("memory.usage_in_bytes" if self.version == 1 else "memory.current"))
        prefix = "total_" if self.version == 1 else ""
        stat = dict(line.split(" ", 1) for line in self._read("memory.stat").splitlines())
        cache = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
        return Usage(charged, max(charged - cache, 0))

    def peak_charged(self) -> int:
        """The highest usage since the group was made, file cache included."""
        with contextlib.suppress(OSError):  # v2 before Linux 5.19
            return int(self._read("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"))
        return 0

    def deaths(self) -> Deaths:
        if self.version == 2:
            events = self._counts("memory.events")
            return Deaths(events.get("oom", 0), events.get("oom_kill", 0), events.get("max", 0))
        killed = self._counts("memory.oom_control").get("oom_kill", 0)
        if self._events is not None:
            with contextlib.suppress(BlockingIOError):
                self._out_of_memory += os.eventfd_read(self._events)
        return Deaths(max(self._out_of_memory, killed), killed, int(self._read("memory.failcnt")))

    def members(self) -> list[int]:
        return [int(line) for line in self._read("cgroup.procs").split()]

    def close(self) -> None:
        """Gives back what this object holds, and leaves the group alone."""
        if self._events is not None:
            os.close(self._events)
            self._events = None

    def remove(self) -> None:
        """Removes the group. Those who started processes in it have ended them."""
        self.close()
        end = time.monotonic() + _REMOVE_SECONDS
        while True:
            try:
                self.directory.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # an ended process is a member until it is gone altogether
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _read(self, name: str) -> str:
        return (self.directory / name).read_text()

    def _write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def _counts(self, name: str) -> dict[str, int]:
        pairs = (line.split() for line in self._read(name).splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A fresh group without a limit.

    Raises:
        Unavailable: none can be made.
    """
    group = _make()
    try:
        if os.getpid() in group.members():
            raise Unavailable("this process is in the group that it made: it would be killed with the others")
        yield group
    finally:
        group.remove()


def _make() -> MemoryGroup:
    reasons = []
    for parent, version in _parents():
        directory = parent / f"ckpt-soak-{uuid.uuid4().hex[:8]}"
        try:
            directory.mkdir()
        except OSError as error:
            reasons.append(str(error))
            continue
        # Under v2 the parent may not hand the memory controller down, and switching it on would change a group of others.
        if (directory / ("memory.limit_in_bytes" if version == 1 else "memory.max")).exists():
            return MemoryGroup(directory, version)
        directory.rmdir()
        reasons.append(f"{parent} hands no memory controller down")
    raise Unavailable(f"no memory control group can be made here: {'; '.join(reasons) or 'none is mounted'}")


def _parents() -> Iterator[tuple[Path, int]]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        if "memory" in names.split(","):
            own = _ROOT / "memory" / path.lstrip("/")
            yield (own if own.is_dir() else _ROOT / "memory"), 1
        elif number == "0" and not names and (_ROOT / "cgroup.controllers").exists():
            # A v2 group with processes in it can't have groups with controllers below: hence those above as well.
            own = _ROOT / path.lstrip("/")
            yield from ((place, 2) for place in (own, *own.parents) if place.is_relative_to(_ROOT) and place.is_dir())


def _listen(directory: Path) -> int | None:
    """Has the kernel count the times that a v1 group is out of memory, also those that kill nobody."""
    try:
        counter = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with open(directory / "memory.oom_control") as control:
            (directory / "cgroup.event_control").write_text(f"{counter} {control.fileno()}")
    except OSError:
        return None
    return counter
