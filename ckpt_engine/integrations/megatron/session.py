"""What the Megatron saves of one process share: worker threads, staging memory, known plans, and the rounds with other ranks.

The ranks talk over the c10d Store (no collective: Megatron's own sequence of collectives stays as it is).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckpt_engine.commit.coordinator import Coordinator
from ckpt_engine.commit.names import parse_step
from ckpt_engine.config import EngineConfig
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.staging.guard import node_identity
from ckpt_engine.workers import Workers

if TYPE_CHECKING:
    from ckpt_engine.integrations.megatron.planning import Plan

log = logging.getLogger("ckpt_engine")

#: The ranks come from a collective when they open their first save, so that a missing one is one without the engine.
_OPENING_SECONDS = 120.0

_TRAILING_NUMBER = re.compile(r"([0-9]{1,18})\D*$")


def step_of(directory: str) -> int:
    """The step that a checkpoint directory is of, by its name; 0 if the name has none."""
    name = os.path.basename(directory.rstrip("/"))
    step = parse_step(name)
    if step is None:
        match = _TRAILING_NUMBER.search(name)
        step = int(match[1]) if match else 0
    return step


class Session:
    """The ranks of one default process group, and the number of their next save. Thread-safe.

    Opening and finalising have a coordinator each: SkyRL finalises in a helper thread while its trainer may be saving again.
    """

    def __init__(self, group: Any, config: EngineConfig) -> None:
        self._group = None if group is None else weakref.ref(group)  # a destroyed group must be able to go
        self._config = config
        self._front = Coordinator.for_group(None, timeout=config.commit_timeout)
        self._back = self._front.for_thread()
        self.rank, self.world_size = self._front.rank, self._front.world_size
        self._front_lock, self._back_lock = threading.Lock(), threading.Lock()
        self._number = 0
        self._checks = 0
        self.local_ranks: int | None = None  # ranks on this node, once the ranks have met

    def belongs_to(self, group: Any) -> bool:
        """Whether this is the session of that default group."""
        return group is (None if self._group is None else self._group())

    def next_number(self, step: int) -> int:
        """The number of the next save; all ranks count alike.

        A rank that missed a save, which failed on the others, counts it too, or it would answer all later ones a save late.
        """
        with self._front_lock:
            self._number += 1
            while (missed := self._front.failed(f"megatron/open/{self._number}")) is not None and missed.step != step:
                log.warning(
                    "this rank missed the save of step %s, which failed on the others: %s", missed.step, missed.message
                )
                self._number += 1
            return self._number

    def next_check(self) -> int:
        """The number of the next check, which counts for itself."""
        with self._front_lock:
            self._checks += 1
            return self._checks

    def open(self, tag: str, payload: bytes, judge: Callable[[list[bytes]], bytes], step: int) -> bytes:
        """A round before anything is written; raises like :meth:`ckpt_engine.commit.coordinator.Coordinator.decide`."""
        with self._front_lock:
            if self.local_ranks is None:
                mine = node_identity()
                patience = min(_OPENING_SECONDS, self._config.commit_timeout)
                tag_of_hosts = f"megatron/hosts/{self._number}"
                hosts = pickle.loads(
                    self._front.decide(
                        tag_of_hosts, mine.encode(), pickle.dumps, phase="plan", step=step, timeout=patience
                    )
                )
                self.local_ranks = hosts.count(mine.encode())
            return self._front.decide(f"megatron/{tag}", payload, judge, phase="plan", step=step)

    def finalize(self, number: int, payload: bytes, judge: Callable[[list[bytes]], bytes], step: int) -> bytes:
        """The round that commits a save."""
        with self._back_lock:
            return self._back.decide(f"megatron/commit/{number}", payload, judge, phase="commit", step=step)

    def close(self) -> None:
        self._back.close()
        self._front.close()


@dataclasses.dataclass
class _Current:
    """The core of this process, if one was needed."""

    core: Core | None = None


class Core:
    """One process's part: made at the first save, kept until :func:`reset`. Making it can't fail."""

    def __init__(self, config: EngineConfig) -> None:
        self.pid = os.getpid()
        self.config = config
        self.templates = TemplateCache()
        # One thread: it waits for the storage, renames and writes the manifest; saves end in the order they began.
        self.finisher = concurrent.futures.ThreadPoolExecutor(1, "ckpt-finish")
        self.plans: list[Plan] = []  # the most recently used one last
        self._lock = threading.Lock()
        self._workers: Workers | None = None
        self._session: Session | None = None

    @property
    def workers(self) -> Workers:
        """Threads and staging memory, made when the first save is staged.

        Raises:
            MemoryBudgetError: there is no memory for it. The next save looks again.
        """
        with self._lock:
            if self._workers is None:
                ranks = None if self._session is None else self._session.local_ranks
                self._workers = Workers(self.config, local_ranks=ranks)
            return self._workers

    def session(self) -> Session:
        """The session of the default process group as it is now: a group made anew has other ranks and another store."""
        group = distributed_c10d._get_default_group() if dist.is_initialized() else None
        with self._lock:
            if self._session is None or not self._session.belongs_to(group):
                self._session = Session(group, self.config)
            return self._session

    def close(self, *, with_session: bool) -> None:
        """Waits for the threads. The session stays for saves that are still to be finalised."""
        self.finisher.shutdown(wait=True)
        if self._workers is not None:
            self._workers.close()
        if self._session is not None and with_session:
            self._session.close()


_lock = threading.Lock()
_current = _Current()
_config = EngineConfig()


def configure(config: EngineConfig, *, unfinished: int) -> None:
    """Settings of the saves from now on. Saves on their way end with theirs."""
    global _config
    if config == _config:
        return
    reset(unfinished=unfinished)
    _config = config


def core() -> Core:
    """The core of this process. One of a forked parent is left alone: its threads are not here."""
    with _lock:
        if _current.core is None or _current.core.pid != os.getpid():
            _current.core = Core(_config)
        return _current.core


def reset(*, unfinished: int) -> None:
    """Gives threads and memory back once the writes on their way have ended.

    Args:
        unfinished: saves that are still to be finalised; they need the session.
    """
    with _lock:
        old, _current.core = _current.core, None
    if old is not None and old.pid == os.getpid():
        old.close(with_session=unfinished == 0)
