"""The ways to save, behind one small interface.

``raw``        the limit: two threads, 16 MiB extents, O_DIRECT, preallocated files, fsync. No format, no checksum.
``torch``      ``torch.save`` and fsync. The trainer waits.
``dcp``        ``torch.distributed.checkpoint.save`` on one rank with the writer's defaults. The trainer waits.
``dcp_async``  ``torch.distributed.checkpoint.async_save`` in its thread variant, over a gloo group of one rank.
``engine``     :class:`ckpt_engine.CheckpointEngine`.

Each peer writes every save below its own root directory, in a new subdirectory, and a save counts as durable only when
the bytes and the names are on the device. No peer removes anything: the caller does, outside the measured time.
"""

from __future__ import annotations

import abc
import ctypes
import dataclasses
import errno
import mmap
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from benchmarks.states import State

MIB = 1 << 20
_EXTENT = 16 * MIB
_SECTOR = 4096
_DEADLINE = 1800.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclasses.dataclass(frozen=True)
class Pending:
    """A save that was called: ``done`` never blocks, ``result`` waits until it is durable and gives its own figures."""

    done: Callable[[], bool]
    result: Callable[[], Mapping[str, Any]]

    @classmethod
    def finished(cls, figures: Mapping[str, Any]) -> Pending:
        """Of a peer that has written everything before it returned."""
        return cls(lambda: True, lambda: figures)


class Peer(abc.ABC):
    """One way to save.

    Attributes:
        name: as on the command line.
        background: whether :meth:`save` returns before the bytes are durable.
        root: directory that belongs to this peer alone.
    """

    name = ""
    background = False

    def __init__(self, root: str) -> None:
        self.root = root
        os.makedirs(root)

    @abc.abstractmethod
    def save(self, state: State, step: int) -> Pending:
        """Saves; returns when the state may be changed again."""

    def close(self) -> None:  # noqa: B027  (most peers hold nothing)
        """Gives back what the peer holds."""

    def _path(self, step: int) -> str:
        return os.path.join(self.root, f"step_{step}")


# -- the limit -------------------------------------------------------------------------------------------------------


class RawPeer(Peer):
    """Writes as many bytes as the state has, from memory that is ready, as fast as the device takes them."""

    name = "raw"

    def __init__(self, root: str, threads: int = 2, extents: int = 4) -> None:
        super().__init__(root)
        self._memory = [[mmap.mmap(-1, _EXTENT) for _ in range(extents)] for _ in range(threads)]
        for row in self._memory:
            for extent in row:
                extent[:] = secrets.token_bytes(MIB) * (_EXTENT // MIB)

    def save(self, state: State, step: int) -> Pending:
        path = self._path(step)
        os.mkdir(path)
        share = -(-state.bytes // len(self._memory))
        failures: list[BaseException] = []
        direct: list[bool] = []

        def work(number: int, size: int) -> None:
            try:
                direct.append(self._write(os.path.join(path, f"{number}.raw"), size, self._memory[number]))
            except BaseException as error:  # a thread's exception would otherwise be printed and the save called fast
                failures.append(error)

        threads = []
        for number in range(len(self._memory)):
            size = max(0, min(share, state.bytes - number * share))
            threads.append(threading.Thread(target=work, args=(number, size), name=f"raw-{number}"))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        _sync_directory(path)
        _sync_directory(self.root)
        return Pending.finished({"direct_io": all(direct)})

    def _write(self, path: str, size: int, extents: list[mmap.mmap]) -> bool:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        direct = getattr(os, "O_DIRECT", 0)
        try:
            fd = os.open(path, flags | direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # tmpfs and the like: buffered is then the fastest there is, and the report says so. open() made the file.
            direct = 0
            fd = os.open(path, flags & ~os.O_EXCL)
        try:
            if size and _libc.fallocate(fd, 0, 0, -(-size // _SECTOR) * _SECTOR) != 0:
                code = ctypes.get_errno()
                if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise OSError(code, f"fallocate of {size} bytes: {os.strerror(code)}", path)
            for number, offset in enumerate(range(0, size, _EXTENT)):
                length = -(-min(_EXTENT, size - offset) // _SECTOR) * _SECTOR
                with memoryview(extents[number % len(extents)]) as whole, whole[:length] as view:
                    wrote = os.pwrite(fd, view, offset)
                if wrote != length:
                    raise OSError(errno.EIO, f"wrote {wrote} of {length} bytes at {offset}", path)
            os.ftruncate(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)
        return bool(direct)


# -- what PyTorch has ------------------------------------------------------------------------------------------------


class TorchPeer(Peer):
    """``torch.save`` into one file."""

    name = "torch"

    def save(self, state: State, step: int) -> Pending:
        path = self._path(step)
        os.mkdir(path)
        with open(os.path.join(path, "state.pt"), "wb") as file:
            torch.save(state.tree, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(path)
        _sync_directory(self.root)
        return Pending.finished({})


class DcpPeer(Peer):
    """``torch.distributed.checkpoint.save`` without a group; the writer's defaults include ``sync_files=True``."""

    name = "dcp"

    def save(self, state: State, step: int) -> Pending:
        path = self._path(step)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for with no_dist
            save(state.tree, storage_writer=FileSystemWriter(path), no_dist=True)
        return Pending.finished({})


class DcpAsyncPeer(Peer):
    """``torch.distributed.checkpoint.async_save``: a full copy on the caller's thread, then ``save`` in a thread."""

    name = "dcp_async"
    background = True

    def save(self, state: State, step: int) -> Pending:
        answer = async_save(state.tree, storage_writer=FileSystemWriter(self._path(step)))
        # A stager that works in the background answers with two futures; the copy must be over before training goes on.
        if isinstance(answer, AsyncSaveResponse):
            answer.staging_completion.result(timeout=_DEADLINE)
            future = answer.upload_completion
        else:
            future = answer

        def result() -> Mapping[str, Any]:
            future.result(timeout=_DEADLINE)
            return {}

        return Pending(future.done, result)


# -- the engine ------------------------------------------------------------------------------------------------------


class EnginePeer(Peer):
    """``CheckpointEngine`` with everything at its default but the staging budget and, if given, the number of writers."""

    name = "engine"
    background = True

    def __init__(self, root: str, budget: int | None, writers: int | None) -> None:
        super().__init__(root)
        from ckpt_engine import CheckpointEngine, EngineConfig

        config = EngineConfig(staging_budget="auto" if budget is None else budget)
        if writers is not None:
            config = dataclasses.replace(config, writers=writers)
        self._engine = CheckpointEngine(root, config=config)

    def save(self, state: State, step: int) -> Pending:
        from ckpt_engine import TrainState

        handle = self._engine.save(state.tree, step=step, train_state=TrainState(step=step))

        def result() -> Mapping[str, Any]:
            return dataclasses.asdict(handle.result(timeout=_DEADLINE).stats)

        return Pending(handle.done, result)

    def close(self) -> None:
        self._engine.close(timeout=_DEADLINE)


PEERS = ("raw", "torch", "dcp", "dcp_async", "engine")


def make_peer(name: str, root: str, budget: int | None, writers: int | None = None) -> Peer:
    """Makes the peer called ``name``.

    Args:
        name: one of ``PEERS``.
        root: directory to make, for this peer alone.
        budget, writers: the engine's staging budget in bytes and its number of writers, ``None`` for its own choice.
    """
    if name == "engine":
        return EnginePeer(root, budget, writers)
    for kind in (RawPeer, TorchPeer, DcpPeer, DcpAsyncPeer):
        if kind.name == name:
            return kind(root)
    raise ValueError(f"peer is {name!r}, expected one of {', '.join(PEERS)}")


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
