"""The small files of a checkpoint directory, and the way to the large ones.

A name in a checkpoint is never followed out of its directory: not by ``..``, an absolute path, or a symbolic link.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import NoReturn

from ckpt_engine.commit.manifest import FileEntry
from ckpt_engine.errors import CorruptionError, StorageError
from ckpt_engine.restore.raw import HINT


class CheckpointFiles:
    """Looks into one directory. Errors name the file, relative to it."""

    def __init__(self, path: str, *, step: int | None, phase: str) -> None:
        self.path = path
        self.step = step
        self.phase = phase
        self._inside = os.path.realpath(path).rstrip("/") + "/"

    def full(self, name: str) -> str:
        """The path of a name."""
        return os.path.join(self.path, name)

    def exists(self, name: str) -> bool:
        """Whether anything has that name, a dangling link included."""
        return os.path.lexists(self.full(name))

    def locate(self, name: str) -> tuple[str, int]:
        """Path and size of a regular file inside the directory.

        Raises:
            CorruptionError: it is missing, something else, or leads outside.
        """
        if not name or os.path.isabs(name) or "\0" in name or ".." in name.split("/"):
            self.fail(name, "is no name of a file inside the checkpoint")
        path = self.full(name)
        try:
            found = os.lstat(path)
            if stat.S_ISLNK(found.st_mode) or "/" in name:
                real = os.path.realpath(path)
                if not real.startswith(self._inside):
                    self.fail(name, f"leads out of the checkpoint, to {real}")
                found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            self.fail(name, "is missing")
        except OSError as error:
            raise self._refused(name, error) from error
        if not stat.S_ISREG(found.st_mode):
            self.fail(name, "is no regular file")
        return path, found.st_size

    def sized(self, name: str, size: int, *, exact: bool) -> str:
        """The path of a file of exactly, or at least, the given size."""
        path, found = self.locate(name)
        if found != size if exact else found < size:
            self.fail(name, f"has {found} bytes, expected {size}{'' if exact else ' or more'}")
        return path

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        path, _ = self.locate(name)
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise self._refused(name, error) from error

    def vouched(self, name: str, entry: FileEntry) -> bytes:
        """The content of a small file that has the recorded size and SHA-256."""
        self.sized(name, entry.bytes, exact=True)  # before reading it, so that nobody's giant is read
        data = self.read(name)
        found = hashlib.sha256(data).hexdigest()
        if found != entry.sha256:
            self.fail(name, f"is damaged: its SHA-256 is {found}, the commit record says {entry.sha256}")
        return data

    def fail(self, name: str, message: str, *, tensor: str | None = None) -> NoReturn:
        """Raises CorruptionError."""
        raise CorruptionError(
            f"{name} {message}",
            file=name,
            tensor=tensor,
            step=self.step,
            path=self.full(name),
            phase=self.phase,
            hint=HINT,
        )

    def _refused(self, name: str, error: OSError) -> StorageError:
        return StorageError(
            f"{name} can't be read: {error.strerror or error}",
            step=self.step,
            path=self.full(name),
            phase=self.phase,
            errno=error.errno,
            hint="check the disk, the mount and the permissions; the checkpoint itself may be whole",
        )
