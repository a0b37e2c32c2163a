"""Checkpoints in object stores, through NVIDIA's multi-storage-client (MSC): ``msc://profile/path``.

A shard file becomes one object. Its extents pass through a stream that the client reads from, so that no shard is held in memory::

    writer threads                         upload thread, one per shard file being written
    write(extent 1) waits for its turn     StorageClient.upload_file(key, stream)
    write(extent 0) offers its memory ───▶ stream.read(n): copies n bytes out of what is offered
             returns when all is copied    parts of a multipart upload, sent by the client's own threads

Promises: an object appears under its name when all of it is there, and never half; a shard that is given up leaves no object, and
its multipart upload is aborted (after a kill nobody is left to do that: give the bucket a lifecycle rule that aborts incomplete
multipart uploads). What the store has acknowledged is taken to be durable. A process that exits during an upload loses it, since
boto3 starts no part then: wait for saves first (Megatron does, by finalising its queue).

Memory: parts that the client is sending come on top of the staging budget. A stream hands out the next one only when the client has
let go of so many that they are no more than the ``room`` of the file, or two of them: for S3 two parts are 64 MiB if the profile
doesn't say otherwise (``multipart_chunksize``; files up to its ``multipart_threshold`` are sent in one piece). Providers that want
more than :data:`LARGEST_READ` in one piece are refused with an error, not served from a spooled file: Google's native one, AIStore's
and Hugging Face's for larger files; S3-compatible endpoints of the first two work.

A profile of type "file" is a file system: there :func:`object_place` answers with its directory, since MSC's own writer for it does
not fsync.

Not here: retrying. The client repeats requests by its profile's settings; once bytes of a shard are gone from memory they can't be
sent again, and the save fails.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from ckpt_engine.errors import CheckpointError, CommitTimeoutError, ConfigError, StorageError
from ckpt_engine.storage.place import LocalPlace, Place, Sink

log = logging.getLogger("ckpt_engine")

PREFIX = "msc://"

#: ``pathlib.Path("msc://profile/x")`` is ``msc:/profile/x``.
_MANGLED = "msc:/"

#: Most that a client may want in one piece: a multiple of usual part sizes. Beyond it, it wants the file in memory.
LARGEST_READ = 256 << 20

#: Copied under one hold of the GIL, so that the trainer gets its turn.
_PIECE = 1 << 20

#: How often somebody who waits looks whether the save has failed elsewhere.
_POLL = 0.1

#: How often a stream looks whether the client has let go of something.
_GLANCE = 0.005

#: CPython counts references at once; elsewhere nothing is held back.
count_references = getattr(sys, "getrefcount", None)

#: How long giving up waits for a running upload; afterwards that cleans up behind itself.
_ABORT_SECONDS = 10.0

_T = TypeVar("_T")


def is_url(path: str) -> bool:
    """Whether this names something in MSC, as it is or as ``pathlib`` mangles it."""
    return path.startswith(_MANGLED)


def normalized(url: str) -> str:
    """The same URL for all spellings, so that ranks can compare it."""
    return PREFIX + "/".join(part for part in url[len(_MANGLED) :].split("/") if part)


def object_place(url: str) -> Place:
    """The place of a URL, or of a path that the client's configuration maps to a profile.

    Raises:
        ConfigError: the package isn't installed, or it doesn't know the profile.
    """
    path = normalized(url) if is_url(url) else url
    try:
        package = importlib.import_module("multistorageclient")
    except ImportError as error:
        raise ConfigError(
            f"{path!r} needs multi-storage-client, which can't be imported ({error})",
            path=path,
            phase="config",
            hint="pip install multi-storage-client on every node, or save to a directory",
        ) from error
    try:
        client, key = package.resolve_storage_client(path)
        where = client.get_posix_path(key)
    except Exception as error:  # its errors for a wrong configuration have many types
        raise ConfigError(
            f"multi-storage-client doesn't take {path!r}: {type(error).__name__}: {error}",
            path=path,
            phase="config",
            hint="look at the profiles in its configuration (MSC_CONFIG)",
        ) from error
    if where is None:
        return ObjectPlace(client, key, path)
    if getattr(client, "_metadata_provider", None) is not None:
        raise ConfigError(
            f"the profile of {path!r} keeps files of a file system under a manifest, which the engine doesn't write",
            path=path,
            phase="config",
            hint="save through a profile without a metadata_provider",
        )
    return LocalPlace(os.path.normpath(where))


class ObjectPlace:
    """The objects under a prefix.

    Args:
        client: MSC's ``StorageClient``.
        key: the prefix, as the client knows it.
        path: for messages.
    """

    renames = False

    def __init__(self, client: Any, key: str, path: str) -> None:
        self._client = client
        self._key = key.rstrip("/")
        self.path = path

    def __repr__(self) -> str:
        return f"ObjectPlace({self.path!r})"

    def _at(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key and name else self._key or name

    def _call(self, what: str, name: str, function: Callable[[], _T]) -> _T:
        try:
            return function()
        except (FileNotFoundError, CheckpointError):
            raise
        except Exception as error:
            raise _storage_error(f"{what} failed", error, f"{self.path}/{name}", None) from error

    def make(self, folder: str = "") -> None:
        """Nothing: a prefix is there when an object has it."""

    def names(self, folder: str = "") -> list[str]:
        prefix = self._at(folder)

        def listed() -> list[str]:
            found = self._client.list(path=prefix, include_directories=True)
            names = (item.key.strip("/")[len(prefix) :].strip("/") for item in found)
            return [name for name in names if name]  # an empty object may stand for the prefix itself

        return self._call("listing", folder, listed)

    def exists(self, name: str) -> bool:
        return bool(self._call("looking", name, lambda: self._client.is_file(self._at(name))))

    def read(self, name: str, limit: int | None = None) -> bytes:
        def content() -> bytes:
            if limit is None:
                return bytes(self._client.read(self._at(name)))
            types = importlib.import_module("multistorageclient.types")
            return bytes(self._client.read(self._at(name), byte_range=types.Range(offset=0, size=limit)))

        return self._call("reading", name, content)

    def put(self, name: str, data: bytes) -> None:
        self._call(f"writing {len(data)} bytes", name, lambda: self._client.write(self._at(name), data))

    def remove(self, name: str) -> None:
        try:
            self._call("removing", name, lambda: self._client.delete(self._at(name)))
        except FileNotFoundError:
            pass

    def rename(self, old: str, new: str) -> None:
        self._call("copying", old, lambda: self._client.copy(self._at(old), self._at(new)))
        self.remove(old)

    def sync(self, folder: str = "") -> None:
        """Nothing: what the store has acknowledged is durable."""

    def digest(self, name: str) -> tuple[int, str] | None:
        try:
            data = self.read(name)
        except FileNotFoundError:
            return None
        return len(data), hashlib.sha256(data).hexdigest()

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
        key = self._at(name)

        def upload(stream: io.RawIOBase) -> int:
            self._client.upload_file(key, stream)
            return int(self._client.info(key).content_length)

        return ObjectShard(
            upload,
            lambda: self.remove(name),
            f"{self.path}/{name}",
            size,
            step=step,
            timeout=timeout,
            cancelled=cancelled,
            room=room,
        )


class ObjectShard:
    """One shard file on its way into a store. Has the interface of :class:`ckpt_engine.storage.shard_file.ShardFile`.

    Extents may be written by several threads at once, in any order as long as an earlier one isn't kept back: a write waits until
    all before it are taken. ``storage.writer`` begins them in file order, so the next one in order is always on its way.

    Args:
        upload: sends a stream; returns the size that the store has got.
        remove: removes the object.
        cancelled: whether the save has failed elsewhere.
        room: bytes of the file that the client may hold; two reads' worth if that is more.
        timeout: seconds without a byte being taken before a write or :meth:`finish` gives up.
    """

    def __init__(
        self,
        upload: Callable[[io.RawIOBase], int],
        remove: Callable[[], None],
        path: str,
        size: int,
        *,
        step: int | None,
        timeout: float,
        cancelled: Callable[[], bool],
        room: int,
    ) -> None:
        self.path, self.size, self.direct = path, size, False
        self._upload, self._remove = upload, remove
        self._step, self._timeout, self._cancelled, self._room = step, timeout, cancelled, room
        self._condition = threading.Condition()  # guards all below; never held while bytes are copied or sent
        self._offer: memoryview | None = None
        self._used = 0  # bytes taken of the offer
        self._taken = 0  # bytes taken of the file
        self._copying = False
        self._lent: list[bytes] = []  # what the client has read and may still hold
        self._moved = time.monotonic()
        self._ended = self._aborted = False
        self._error: StorageError | None = None
        self._thread = threading.Thread(target=self._run, name="ckpt-upload", daemon=True)
        self._thread.start()

    # -- writer threads ---------------------------------------------------------------------------------------------

    def write(self, data: memoryview, offset: int) -> None:
        """Hands over ``data`` when all before ``offset`` is taken; returns when all of it is taken, too.

        Args:
            data: may reach beyond the end of the file, where it is cut.

        Raises:
            StorageError: the upload has failed, or the save has.
            CommitTimeoutError: the store takes nothing.
        """
        with data.cast("B") as view, view[: self.size - offset] as mine, self._condition:
            if offset < self._taken:  # a repeated write, of which some is gone
                raise self._failure(f"bytes from {offset} on can't be sent again, {self._taken} are on their way")
            self._wait(lambda: self._taken == offset and self._offer is None)
            self._offer, self._used = mine, 0
            self._condition.notify_all()
            try:
                self._wait(lambda: self._offer is None)
            finally:
                while self._copying:  # the memory goes back to the pool next
                    self._condition.wait()
                self._offer = None

    def _wait(self, ready: Callable[[], bool]) -> None:
        since = time.monotonic()
        while not ready():
            if self._error is not None:
                raise copy.copy(self._error)  # the one that is kept must not gather tracebacks
            if self._ended:
                raise self._failure(f"the upload ended after {self._taken} of {self.size} bytes")
            self._check_wanted()
            if time.monotonic() - max(since, self._moved) > self._timeout:
                raise CommitTimeoutError(
                    f"the store took no bytes for {self._timeout:g} s ({self._taken} of {self.size} are on their way)",
                    step=self._step,
                    path=self.path,
                    phase="write",
                )
            self._condition.wait(_POLL)

    def _check_wanted(self) -> None:
        if self._aborted or self._cancelled():
            raise self._failure("the file was given up")

    def _failure(self, what: str) -> StorageError:
        return StorageError(what, step=self._step, path=self.path, phase="write")

    def finish(self) -> None:
        """Waits until the store has got the object.

        Raises:
            StorageError: it hasn't, or another one than was sent.
            CommitTimeoutError: it doesn't answer.
        """
        with self._condition:
            self._wait(lambda: self._ended)
            if self._error is not None:
                raise copy.copy(self._error)
            self._check_wanted()

    def abort(self) -> None:
        """Ends the upload and removes what came of it, of a finished one too. Never raises; may be called again."""
        with self._condition:
            if self._aborted:
                return
            self._aborted, ended = True, self._ended
            self._condition.notify_all()
        if ended:
            self._discard()
        else:
            self._thread.join(_ABORT_SECONDS)

    def _discard(self) -> None:
        try:
            self._remove()
        except Exception as error:
            log.warning("%s: could not remove an unfinished shard file: %s", self.path, error)

    # -- upload thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: StorageError | None = None
        try:
            found = self._upload(_Stream(self))
            if self._taken != self.size or found != self.size:
                failure = self._failure(f"{self._taken} of {self.size} bytes were sent, the store has got {found}")
        except BaseException as error:  # whatever it is, the writers have to hear of it
            failure = _storage_error("the upload failed", error, self.path, self._step)
        with self._condition:
            self._error, self._ended = failure, True
            aborted = self._aborted
            self._condition.notify_all()
        if aborted:
            self._discard()

    def take(self, start: int, count: int) -> bytes:
        """The next ``count`` bytes, as soon as they are written. For the stream."""
        if count > LARGEST_READ:
            raise StorageError(
                f"the storage provider wants {count} bytes in one piece, expected at most {LARGEST_READ}",
                step=self._step,
                path=self.path,
                phase="write",
                hint="make more and smaller shard files (thread_count of the strategy), or use the store's S3 interface",
            )
        self._wait_for_room(count)
        # The buffer of a BytesIO becomes the result without being copied again.
        buffer = io.BytesIO()
        while missing := count - buffer.tell():
            with self._condition:
                if start != self._taken - buffer.tell():
                    raise self._failure(
                        f"bytes from {start} on can't be sent again (a retry of the client; its log says what failed first)"
                    )
                while self._offer is None:
                    self._check_wanted()
                    self._condition.wait(_POLL)
                self._check_wanted()
                self._copying = True
                piece = self._offer[self._used : self._used + min(missing, _PIECE)]
            length = 0
            try:
                length = buffer.write(piece)
            finally:
                piece.release()
                with self._condition:
                    self._copying = False
                    self._taken += length
                    self._used += length
                    self._moved = time.monotonic()
                    if self._offer is not None and self._used == self._offer.nbytes:
                        self._offer = None
                    self._condition.notify_all()
        data = buffer.getvalue()
        self._lent.append(data)
        return data

    def _wait_for_room(self, count: int) -> None:
        """Waits until the client has sent enough of what it has read, which shows in that nobody refers to it any more.

        boto3 would read ten parts ahead of what it sends, whatever memory there is.
        """
        while (held := self._held()) and held + count > max(self._room, 2 * count):
            with self._condition:
                self._check_wanted()
            time.sleep(_GLANCE)

    def _held(self) -> int:
        if count_references is None:
            self._lent.clear()
        else:
            lent = self._lent
            # One reference is the list's, one the argument's.
            lent[:] = [lent[i] for i in range(len(lent)) if count_references(lent[i]) > 2]
        return sum(map(len, self._lent))


class _Stream(io.RawIOBase):
    """What the client reads. Says how long it is; can be read once, from the start to the end."""

    def __init__(self, shard: ObjectShard) -> None:
        self._shard = shard
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._shard.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, count: int | None = -1) -> bytes:
        left = max(0, self._shard.size - self._position)
        wanted = left if count is None or count < 0 else min(count, left)
        data = self._shard.take(self._position, wanted) if wanted else b""
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, target: Any) -> int:
        with memoryview(target).cast("B") as view:
            data = self.read(view.nbytes)
            view[: len(data)] = data
        return len(data)


def _storage_error(what: str, error: BaseException, path: str, step: int | None) -> StorageError:
    found = StorageError(
        f"{what}: {type(error).__name__}: {error}",
        step=step,
        path=path,
        phase="write",
        errno=getattr(error, "errno", None),
        hint="look at the credentials and limits of the MSC profile" if isinstance(error, PermissionError) else None,
    )
    return found
