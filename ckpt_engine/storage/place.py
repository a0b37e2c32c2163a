"""Where a checkpoint goes: a directory, or the objects under one prefix of a store.

A :class:`Place` is what a save needs of either, in names relative to it (``"ckpt_engine/commit.json"``)::

                                   LocalPlace                           storage.msc.ObjectPlace
    create ... finish, of a shard  O_EXCL, pwrite, fsync                an upload; nothing is there before its end
    rename                         rename(2)                            copy, then delete; for small files only
    put                            temporary file, fsync, rename, sync  one object, replaced in one step
    sync                           fsync of the directory               nothing: what is acknowledged is durable

So both give a save the same two things to build a commit on: a name shows either nothing, or an earlier content, or all of the
new one; and what was done before a :meth:`Place.put` of the commit record is durable when that returns.

Not here: which names there are, and in which order they are written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Literal, Protocol

from ckpt_engine.storage.fs import fsync_dir, make_directory, write_atomic
from ckpt_engine.storage.shard_file import ShardFile


class Sink(Protocol):
    """A shard file that is being written: :class:`ckpt_engine.storage.shard_file.ShardFile`, or a stream to elsewhere."""

    path: str
    size: int
    direct: bool

    def write(self, data: memoryview, offset: int) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class Place(Protocol):
    """A directory of one checkpoint, wherever it is. Any thread may use it.

    Attributes:
        path: for messages, and to compare with other ranks.
        renames: a shard is created under a temporary name and renamed when all of them are durable. Without, it appears under its
            own name, whole, when it is finished.
    """

    path: str
    renames: bool

    def make(self, folder: str = "") -> None:
        """Makes it, or a folder in it, if it isn't there."""
        ...

    def names(self, folder: str = "") -> list[str]:
        """What lies in it, or in a folder of it."""
        ...

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""
        ...

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The content of a small file, or its first ``limit`` bytes; ``FileNotFoundError`` if there is none."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Gives a small file this content, in one durable step."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file. Fine if it isn't there. Durable after :meth:`sync`."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Gives a file another name, in the place of what has it. ``FileNotFoundError`` if there is none. Durable after :meth:`sync`."""
        ...

    def sync(self, folder: str = "") -> None:
        """Makes removed and new names durable."""
        ...

    def digest(self, name: str) -> tuple[int, str] | None:
        """Size and SHA-256 of a file that somebody else has written, made durable; ``None`` if there is none."""
        ...

    def create(
        self,
        name: str,
        size: int,
        *,
        direct: bool | Literal["auto"],
        step: int | None,
        timeout: float,
        cancelled: Callable[[], bool],
        room: int,
    ) -> Sink:
        """Begins a shard file.

        Args:
            direct: as for :meth:`ShardFile.create`, where there is such a thing.
            timeout: seconds without progress after which a stream gives up.
            cancelled: whether the save has failed elsewhere, so that nobody should wait any more.
            room: bytes of the file that may be held in memory outside of the staging pool.
        """
        ...


class LocalPlace:
    """A directory of a file system.

    Args:
        path: absolute.
    """

    renames = True

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"LocalPlace({self.path!r})"

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name) if name else self.path

    def make(self, folder: str = "") -> None:
        make_directory(self._at(folder))

    def names(self, folder: str = "") -> list[str]:
        return os.listdir(self._at(folder))

    def exists(self, name: str) -> bool:
        return os.path.exists(self._at(name))

    def read(self, name: str, limit: int | None = None) -> bytes:
        with open(self._at(name), "rb") as file:
            return file.read(-1 if limit is None else limit)

    def put(self, name: str, data: bytes) -> None:
        write_atomic(self._at(name), data)

    def remove(self, name: str) -> None:
        try:
            os.unlink(self._at(name))
        except FileNotFoundError:
            pass

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at(old), self._at(new))

    def sync(self, folder: str = "") -> None:
        fsync_dir(self._at(folder))

    def digest(self, name: str) -> tuple[int, str] | None:
        try:
            fd = os.open(self._at(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        digest, size = hashlib.sha256(), 0
        try:
            while piece := os.read(fd, 1 << 20):
                digest.update(piece)
                size += len(piece)
            os.fsync(fd)
        finally:
            os.close(fd)
        return size, digest.hexdigest()

    def create(
        self,
        name: str,
        size: int,
        *,
        direct: bool | Literal["auto"],
        step: int | None,
        timeout: float,
        cancelled: Callable[[], bool],
        room: int,
    ) -> Sink:
        return ShardFile.create(self._at(name), size, direct=direct, step=step)
