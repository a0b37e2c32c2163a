"""What the Megatron saves of one process share: worker threads, staging memory, and an identity that all ranks agree on.

A save needs a name (the save id in the part manifests and the commit record) before its first byte is written, and the
ranks of a Megatron save exchange no such thing. So at the first save they agree on a random number through the c10d Store
(no collective: Megatron's own sequence of collectives stays as it is), and number their saves from then on.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import logging
import os
import re
import threading
import uuid
import weakref
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckpt_engine.commit.coordinator import Coordinator
from ckpt_engine.commit.names import parse_step
from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import ConfigError
from ckpt_engine.integrations.megatron.buckets import Layout
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.workers import Workers

log = logging.getLogger("ckpt_engine")

#: The ranks come from a collective when they open their first save, so that a missing one is one without the engine.
_OPENING_SECONDS = 120.0

_TRAILING_NUMBER = re.compile(r"([0-9]{1,18})\D*$")


class SaveName(NamedTuple):
    """Identity of one save. ``number`` counts the saves of the process group; the rest is in the part manifests."""

    number: int
    save_id: str
    step: int
    rank: int
    world_size: int


def step_of(directory: str) -> int:
    """The step that a checkpoint directory is of, by its name; 0 if the name has none."""
    name = os.path.basename(directory.rstrip("/"))
    step = parse_step(name)
    if step is None:
        match = _TRAILING_NUMBER.search(name)
        step = int(match[1]) if match else 0
    return step


class Session:
    """The ranks of one default process group, numbered saves, and notes of failures. Thread-safe."""

    def __init__(self, group: Any, config: EngineConfig) -> None:
        self._group = None if group is None else weakref.ref(group)  # a destroyed group must be able to go
        self._config = config
        self._coordinator = Coordinator.for_group(None, timeout=config.commit_timeout)
        self.rank, self.world_size = self._coordinator.rank, self._coordinator.world_size
        self._lock = threading.Lock()  # SkyRL finalises from a helper thread; a coordinator is for one at a time
        self._nonce: bytes | None = None
        self._attempts = 0
        self._number = 0

    def belongs_to(self, group: Any) -> bool:
        """Whether this is the session of that default group."""
        return group is (None if self._group is None else self._group())

    def name(self, directory: str) -> SaveName:
        """Opens a save: all ranks call this in the same order.

        Raises:
            CommitTimeoutError: a rank doesn't take part: the engine isn't installed there.
            ConfigError: the ranks were installed with different settings.
        """
        with self._lock:
            self._number += 1
            if self._nonce is None:
                self._attempts += 1
                self._nonce = self._coordinator.decide(
                    f"megatron/open/{self._attempts}",
                    self._fingerprint(),
                    _judge_opening,
                    phase="plan",
                    step=None,
                    timeout=min(_OPENING_SECONDS, self._config.commit_timeout),
                )
            digest = hashlib.sha256(self._nonce + f"/{self._number}/{directory}".encode()).hexdigest()
            return SaveName(self._number, digest[:32], step_of(directory), self.rank, self.world_size)

    def _fingerprint(self) -> bytes:
        return f"checksum={self._config.checksum}".encode()

    def note_failure(self, number: int, packed: bytes) -> None:
        """Tells the others of a failure; they find it once they have synchronised with this rank."""
        with self._lock:
            self._coordinator.note(f"megatron/failed/{number}", packed)

    def failure_of(self, number: int) -> bytes | None:
        """A failure of any rank."""
        with self._lock:
            return self._coordinator.noted(f"megatron/failed/{number}")

    def close(self) -> None:
        self._coordinator.close()


def _judge_opening(fingerprints: list[bytes]) -> bytes:
    if len(set(fingerprints)) > 1:
        shown = {rank: text.decode() for rank, text in enumerate(fingerprints)}
        raise ConfigError(
            f"the ranks were installed with different settings: {shown}",
            phase="plan",
            hint="call ckpt_engine.megatron.install() with the same config on every rank",
        )
    return uuid.uuid4().bytes


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
        self.layouts: list[Layout] = []
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
                self._workers = Workers(self.config)
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
