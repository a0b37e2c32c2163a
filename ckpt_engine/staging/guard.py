"""The memory guard: how much host memory the engine may take, from the limits that really hold here.

What it holds: :func:`weigh_budget`, which reads every limit that can kill the process or refuse it memory, and grants
a part of the tightest, shared between the ranks of the node (:func:`decide_budget` does the same and refuses too little):

=========================  =====================================================================================
cgroup v2 and v1           ``memory.max``, ``memory.high``, ``memory.limit_in_bytes`` of the process's group and of
                           every group above it. File cache that the kernel can drop isn't counted as used.
``MemAvailable``           the node as a whole
``Committed_AS``           with ``vm.overcommit_memory=2``: what may still be promised
``RLIMIT_AS``, ``_DATA``   of this process alone, so not divided by the ranks
Ray's memory monitor       kills workers above a share of the node or the container; the raylet's settings count,
                           not the worker's
=========================  =====================================================================================

What it promises: it only reads, takes about a millisecond, and works where any of these files is missing or unreadable;
the decision carries every limit that was seen, so that one log line explains it.

What it does not do: it keeps no state and maps nothing. The answer is true for the moment;
:mod:`ckpt_engine.staging.pressure` asks again and again.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import resource
import threading
from collections.abc import Iterator, Mapping
from typing import Literal

from ckpt_engine.config import MIB, MIN_BUDGET_BYTES
from ckpt_engine.errors import MemoryBudgetError

log = logging.getLogger("ckpt_engine")

#: Part of what is left that "auto" takes: the trainer, its data loader and its communicators go on growing.
AUTO_FRACTION = 0.5

#: Most that "auto" takes for one rank. More makes no save faster: staging then is bound by the copies, not by the room.
AUTO_CAP_BYTES = 8 << 30

#: Part of what is left that a number of the user's may take. The rest keeps a wrong number from being an OOM kill.
USER_FRACTION = 0.9

#: What "auto" means where no limit can be read at all.
BLIND_BYTES = 256 * MIB

#: Distance to keep from Ray's threshold, as a share of the memory that it watches: Ray looks every 250 ms, and kills at
#: once.
RAY_MARGIN = 0.02

#: Limits from here up mean "none": v1 writes the largest multiple of a page that fits into 63 bits.
_UNLIMITED = 1 << 60


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """One limit that was found.

    Attributes:
        name: what an operator calls it.
        room: bytes that may still be used under it.
        detail: the numbers behind ``room``.
        per_process: it holds for this process alone; otherwise all ranks of the node share it.
        promised: what is mapped counts, touched or not, thread stacks included.
        bound: the limit itself, where that is known.
    """

    name: str
    room: int
    detail: str
    per_process: bool = False
    promised: bool = False
    bound: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class BudgetDecision:
    """How much staging memory this rank may hold, and why.

    Attributes:
        granted: bytes.
        requested: what was asked for.
        ruled_by: name of the limit that decided, or what else did.
        limits: every limit that was found, the tightest first.
        local_ranks: ranks that share the node.
        share: what the tightest limit leaves this rank, its pool included; ``None`` if no limit could be read.
    """

    granted: int
    requested: int | Literal["auto"]
    ruled_by: str
    limits: tuple[Limit, ...]
    local_ranks: int
    share: int | None = None

    def explain(self) -> str:
        """The decision in one line."""
        asked = "auto" if self.requested == "auto" else _size(int(self.requested))
        found = "; ".join(f"{limit.name}: {_size(limit.room)} left ({limit.detail})" for limit in self.limits)
        return (
            f"staging budget {_size(self.granted)} per rank, ruled by {self.ruled_by} "
            f"(asked: {asked}, ranks on this node: {self.local_ranks}). Limits: {found or 'none could be read'}"
        )

    @property
    def complete(self) -> bool:
        """Whether the system's limits allow all that was asked for."""
        return all(self.ruled_by != limit.name for limit in self.limits[:1])

    def check(self) -> None:
        """
        Raises:
            MemoryBudgetError: not even :data:`ckpt_engine.config.MIN_BUDGET_BYTES` is granted. Names the limit.
        """
        if self.granted >= MIN_BUDGET_BYTES:
            return
        tightest = self.limits[0] if self.limits and self.ruled_by != "staging_budget" else None
        detail = f", which has {_size(tightest.room)} left ({tightest.detail})" if tightest else ""
        raise MemoryBudgetError(
            f"the staging budget comes to {self.granted} bytes for each of {self.local_ranks} local ranks, expected at "
            f"least {MIN_BUDGET_BYTES}; ruled by {self.ruled_by}{detail}",
            phase="stage",
            hint="free host memory, raise that limit, or start fewer ranks on this node",
        )

    def warn_if_cut(self) -> None:
        """Says once that a number of the user's was too large."""
        if self.requested != "auto" and self.granted < self.requested:
            log.warning(
                "staging_budget of %d bytes is cut to %d bytes by %s: %s",
                *(self.requested, self.granted, self.ruled_by, self.explain()),
            )


def local_rank_count(environ: Mapping[str, str]) -> int:
    """Ranks on this node as the launcher says it in ``LOCAL_WORLD_SIZE``, else 1."""
    text = environ.get("LOCAL_WORLD_SIZE", "").strip()
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    if text:
        log.warning("LOCAL_WORLD_SIZE is %r, expected a whole number from 1: taking 1", text)
    return 1


def node_identity(proc: str = "/proc") -> str:
    """What is the same for all ranks of one node and differs between nodes: its name and the boot of its kernel.

    Containers of one node with host names of their own count as nodes of their own: each has limits of its own as a rule,
    and where it hasn't, looking again while running keeps their sum within the node.
    """
    return f"{os.uname().nodename}/{_read(os.path.join(proc, 'sys/kernel/random/boot_id')).strip()}"


def stack_bytes() -> int:
    """Address space that each new thread takes for its stack. It counts for RLIMIT_AS and as committed, touched or not."""
    if threading.stack_size():
        return threading.stack_size()
    bound = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return bound if 0 < bound < _UNLIMITED else 8 * MIB


def decide_budget(
    requested: int | Literal["auto"],
    *,
    local_ranks: int,
    already_held: int = 0,
    proc: str = "/proc",
    cgroup_root: str = "/sys/fs/cgroup",
    environ: Mapping[str, str] = os.environ,
) -> BudgetDecision:
    """Like :func:`weigh_budget`, with a warning where a number of the user's is cut.

    Raises:
        MemoryBudgetError: not even :data:`ckpt_engine.config.MIN_BUDGET_BYTES` can be granted. Names the limit.
    """
    decision = weigh_budget(
        requested,
        local_ranks=local_ranks,
        already_held=already_held,
        proc=proc,
        cgroup_root=cgroup_root,
        environ=environ,
    )
    decision.check()
    if already_held == 0:  # a pool that is looked at again before each save would say the same each time
        decision.warn_if_cut()
    return decision


def weigh_budget(
    requested: int | Literal["auto"],
    *,
    local_ranks: int,
    already_held: int = 0,
    already_mapped: int | None = None,
    stacks: int = 0,
    proc: str = "/proc",
    cgroup_root: str = "/sys/fs/cgroup",
    environ: Mapping[str, str] = os.environ,
) -> BudgetDecision:
    """How much staging memory this rank may hold; may come to less than can be worked with, or to nothing.

    Args:
        requested: bytes, or ``"auto"``.
        local_ranks: ranks on this node, each with a pool of its own.
        already_held: bytes that this rank's pool holds now. They are in every "used" that is read here, so they are
            added to this rank's share again: asking twice gives the same answer.
        already_mapped: the same, counting what is mapped but not touched yet; for limits on what is promised.
        stacks: address space that threads yet to be started will take.
        proc: where procfs is mounted.
        cgroup_root: where the control groups are mounted.
        environ: the environment, for Ray's settings.

    Returns:
        ``"auto"``: half of this rank's share of the tightest limit, at most :data:`AUTO_CAP_BYTES`. A number: that
        number, or 90 % of the share if that is less.
    """
    ranks = max(local_ranks, 1)
    mapped = already_held if already_mapped is None else already_mapped
    memory = _table(os.path.join(proc, "meminfo"))
    groups = list(_memory_groups(proc, cgroup_root))
    found = [
        *_cgroup_limits(groups),
        *_node_limits(proc, memory),
        *_process_limits(proc),
        *_ray_limits(memory, groups, _raylet_settings(proc, environ)),
    ]

    def share(limit: Limit) -> int:
        mine = limit.room if limit.per_process else limit.room // ranks
        return max(mine + mapped - stacks, 0) if limit.promised else mine + already_held

    limits = tuple(sorted(found, key=share))
    tightest = limits[0] if limits else None
    wanted: float
    if requested == "auto":
        if tightest is None:
            wanted, ruled_by = BLIND_BYTES, "the default, since no limit could be read"
        else:
            wanted, ruled_by = share(tightest) * AUTO_FRACTION, tightest.name
            if wanted < MIN_BUDGET_BYTES <= share(tightest) * USER_FRACTION:
                wanted = MIN_BUDGET_BYTES
        if wanted > AUTO_CAP_BYTES:
            wanted, ruled_by = AUTO_CAP_BYTES, f"the cap of {_size(AUTO_CAP_BYTES)} per rank"
        granted = int(wanted) // MIB * MIB
    else:
        granted, ruled_by = requested, "staging_budget"
        if tightest is not None and share(tightest) * USER_FRACTION < requested:
            granted, ruled_by = int(share(tightest) * USER_FRACTION), tightest.name
    return BudgetDecision(granted, requested, ruled_by, limits, ranks, None if tightest is None else share(tightest))


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """A control group with memory accounting: its limits by file name, and what it uses."""

    path: str
    bounds: dict[str, int]
    used: int
    inactive_file: int
    active_file: int

    @property
    def reclaimable(self) -> int:
        # Counting the cache as used would leave no room after the first save or the first epoch of any job: a group
        # fills up with clean file pages to its limit and stays there.
        return min(self.inactive_file + self.active_file, self.used)


def pressure_files(proc: str = "/proc", cgroup_root: str = "/sys/fs/cgroup") -> dict[str, str]:
    """Files that tell how long tasks have waited for memory, by what they are of: the node, and groups with a limit."""
    files = {NODE: os.path.join(proc, "pressure", "memory")}
    for path, directory in _directories(proc, cgroup_root)[0]:
        if any(_number(os.path.join(directory, name)) is not None for name in _V2_BOUNDS):
            files[f"cgroup {path}"] = os.path.join(directory, "memory.pressure")
    return {name: path for name, path in files.items() if os.path.exists(path)}


#: Key of the node in :func:`pressure_files`.
NODE = "the node"

_V2_BOUNDS = ("memory.max", "memory.high")


def _directories(proc: str, root: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(path, directory) of the groups that this process's memory is charged to, the innermost first, for v2 and for v1."""
    unified, legacy = "/", "/"
    for line in _read(os.path.join(proc, "self", "cgroup")).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            unified = path
        elif "memory" in controllers.split(","):
            legacy = path
    hybrid = os.path.join(root, "unified")
    mount = hybrid if os.path.isdir(hybrid) else root
    return list(_upwards(mount, unified)), list(_upwards(os.path.join(root, "memory"), legacy))


def _memory_groups(proc: str, root: str) -> Iterator[_Group]:
    """Those of them that have a limit."""
    v2, v1 = _directories(proc, root)
    for path, directory in v2:
        yield from _group(path, directory, _V2_BOUNDS, "memory.current", "")
    for path, directory in v1:
        # total_ figures include the groups below, as the usage does.
        yield from _group(path, directory, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def _upwards(mount: str, path: str) -> Iterator[tuple[str, str]]:
    """(path, directory) of a group and of those above it, up to the mount point."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []  # the process's group lies outside the cgroup namespace: nothing but the mount point is certain
    # In a container the mount often shows the container's group as its root while the path is that of the host: what
    # the mount doesn't show is cut off at the front.
    while parts and not os.path.isdir(os.path.join(mount, *parts)):
        parts.pop(0)
    for count in range(len(parts), -1, -1):
        yield "/" + "/".join(parts[:count]), os.path.join(mount, *parts[:count])


def _group(path: str, directory: str, bound_files: tuple[str, ...], usage_file: str, prefix: str) -> Iterator[_Group]:
    bounds = {name: value for name in bound_files if (value := _number(os.path.join(directory, name))) is not None}
    bounds = {name: value for name, value in bounds.items() if value < _UNLIMITED}
    used = _number(os.path.join(directory, usage_file))
    if not bounds or used is None:
        return  # no limit here, "max" included; a root group has none of these files
    stat = _table(os.path.join(directory, "memory.stat"))
    inactive, active = stat.get(f"{prefix}inactive_file", 0), stat.get(f"{prefix}active_file", 0)
    yield _Group(path, bounds, used, inactive, active)


def _cgroup_limits(groups: list[_Group]) -> Iterator[Limit]:
    for group in groups:
        for name, bound in group.bounds.items():
            yield Limit(
                f"cgroup {name} of {group.path}",
                max(bound - group.used + group.reclaimable, 0),
                f"limit {_size(bound)}, used {_size(group.used)}, of which {_size(group.reclaimable)} is file cache",
                bound=bound,
            )


def _node_limits(proc: str, memory: Mapping[str, int]) -> Iterator[Limit]:
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    if available is not None:
        detail = f"of {_size(total)}" if total is not None else "of the node"
        yield Limit("MemAvailable", available, detail, bound=total or 0)
    if _number(os.path.join(proc, "sys", "vm", "overcommit_memory")) == 2:
        bound, committed = memory.get("CommitLimit"), memory.get("Committed_AS")
        if bound is not None and committed is not None:
            yield Limit(
                "vm.overcommit_memory=2",
                max(bound - committed, 0),
                f"CommitLimit {_size(bound)}, Committed_AS {_size(committed)}",
                promised=True,
                bound=bound,
            )


def _process_limits(proc: str) -> Iterator[Limit]:
    status = _table(os.path.join(proc, "self", "status"))
    for name, which, field in (
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
    ):
        bound = resource.getrlimit(which)[0]
        if bound != resource.RLIM_INFINITY and 0 <= bound < _UNLIMITED:
            used = status.get(field, 0)
            detail = f"limit {_size(bound)}, {field} {_size(used)}"
            yield Limit(name, max(bound - used, 0), detail, per_process=True, promised=True, bound=bound)


_RAY_SETTINGS = ("RAY_memory_usage_threshold", "RAY_min_memory_free_bytes", "RAY_memory_monitor_refresh_ms")


def _ray_limits(memory: Mapping[str, int], groups: list[_Group], environ: Mapping[str, str]) -> Iterator[Limit]:
    """Room below the threshold of Ray's memory monitor, for the node and for each group with a limit.

    Which of them Ray watches depends on its version and on how the container shows its cgroup; the tightest is safe.
    """
    if not any(
        name in environ for name in ("RAY_RAYLET_PID", "RAY_JOB_ID", "RAY_NODE_ID", "RAY_memory_usage_threshold")
    ):
        return
    if environ.get("RAY_memory_monitor_refresh_ms", "").strip() == "0":
        return  # the monitor is switched off
    fraction = _ray_setting(environ, "RAY_memory_usage_threshold", 0.95)
    if not 0 < fraction <= 1:
        fraction = 0.95
    keep_free = _ray_setting(environ, "RAY_min_memory_free_bytes", -1)

    def limit(what: str, total: int, used: int) -> Limit:
        threshold = total * fraction
        if keep_free >= 0:
            threshold = max(threshold, total - keep_free)  # Ray kills above the higher of the two
        room = int(threshold - total * RAY_MARGIN) - used
        detail = f"kills above {_size(int(threshold))} of {_size(total)}, used {_size(used)} as Ray counts it"
        return Limit(f"Ray's memory threshold for {what}", max(room, 0), detail, bound=int(threshold))

    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    if total is not None and available is not None:
        yield limit("the node", total, total - available)
    for group in groups:
        bound = min(group.bounds.values())
        if total is None or bound < total:
            yield limit(f"cgroup {group.path}", bound, group.used - group.reclaimable)  # as Ray counts since 2.10


def _raylet_settings(proc: str, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with Ray's settings as the raylet has them: it kills, and a worker's runtime_env doesn't move it."""
    pid = environ.get("RAY_RAYLET_PID", "").strip()
    text = _read(os.path.join(proc, pid, "environ")) if pid.isdecimal() else ""
    if not text:
        return environ
    theirs = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
    return {
        **{name: value for name, value in environ.items() if name not in _RAY_SETTINGS},
        **{name: theirs[name] for name in _RAY_SETTINGS if name in theirs},
    }


def _ray_setting(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environ.get(name, default))
    except ValueError:
        log.warning("%s is %r, expected a number: taking %g", name, environ.get(name), default)
        return default


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # not "no limit": nothing can be read just now
        log.debug("memory guard: %s", str(error))  # not the error: handlers may keep it, and its frames
        return ""


def _number(path: str) -> int | None:
    """The whole number in a file, or ``None`` if there is none ("max", or no such file)."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _table(path: str) -> dict[str, int]:
    """Lines of ``name value`` or ``name: value kB``, in bytes."""
    table = {}
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            table[words[0].rstrip(":")] = int(words[1]) * (1024 if words[-1] == "kB" else 1)
    return table


def _size(count: int) -> str:
    if count >= 1 << 30:
        return f"{count / (1 << 30):.2f} GiB"
    return f"{count / MIB:.1f} MiB"
