"""One Megatron save on this rank: the callable that takes the place of stock's write function, and what comes of it.

::

    ThreadedWrite(core, session, opening, target)   caller's thread: the ranks have agreed, nothing is copied yet
    write.preload()            caller's thread: copies everything into extents; writer threads write meanwhile
    write(rank, buckets, ..)   caller's thread, synchronous saves: waits until the files are durable
    write.done()               caller's thread, polls of a queue
    write.vote()               caller's thread, finalisation: this rank's part of the commit, or its error

Files are written under temporary names; once all are durable, the finisher thread renames them (objects of a store, which appear
whole or not at all, have their names from the start). Promises: when ``preload``
returns nothing reads the sources any more; whatever goes wrong on this rank is raised by ``vote``, which takes it to all
ranks; after a failure no file of this save is left on this rank. Whoever sends the callable to another process gets one that
does nothing: the save stays here.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ckpt_engine.commit.coordinator import pack_error, unpack_error
from ckpt_engine.commit.manifest import part_name
from ckpt_engine.commit.names import PART_DIRECTORY
from ckpt_engine.errors import CheckpointError, CommitTimeoutError, StorageError
from ckpt_engine.integrations.megatron.layouts import FileLayout
from ckpt_engine.integrations.megatron.planning import Opening
from ckpt_engine.integrations.megatron.session import Core, Session
from ckpt_engine.persisting import ShardSave
from ckpt_engine.saving import Vote
from ckpt_engine.spool import Pickled
from ckpt_engine.storage.place import Place

log = logging.getLogger("ckpt_engine")

#: A file on its way is called "." + its name + this + the save id.
_TEMPORARY = ".tmp-"


class Target(NamedTuple):
    """What the commit of a save writes next to the shard files.

    Attributes:
        config: content of ``metadata.json``.
        digests: whether SHA-256 sums of the shard files are wanted, for Megatron's ``integrity.json``.
    """

    config: bytes
    digests: bool = False


class ThreadedWrite:
    """A save on its way; callable like stock's write function. Made on every rank, also where there is nothing to write."""

    def __init__(self, core: Core, session: Session, opening: Opening, target: Target) -> None:
        self.core, self.session, self.target = core, session, target
        self.plan, self.place, self.step = opening.plan, opening.place, opening.step
        self.directory = opening.place.path
        self.number, self.save_id = opening.number, opening.save_id
        self.rank, self.world_size = session.rank, session.world_size
        self.train_state = opening.train_state
        self.settled = False
        self._pid = os.getpid()
        self._tensors: list[torch.Tensor] = opening.content.tensors
        self._values: list[Pickled] = opening.content.values
        self._lock = threading.Lock()
        self._started = False
        self._done = threading.Event()
        self._shards: ShardSave | None = None
        self._vote: Vote | None = None
        self._error: CheckpointError | None = None
        self._names: list[str] = []
        self._layout: FileLayout | None = None
        try:
            self._layout = opening.plan.layout(core, self.rank, opening.first)
        except Exception as error:  # the other ranks have begun; they hear of it when they finalise
            self._fail(error, "plan")
        unfinished.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        log.warning(
            "a save was scheduled on a queue that sends it to another process, which will find nothing to do; "
            "call ckpt_engine.megatron.install(), or use ThreadAsyncCallsQueue"
        )
        return functools.partial, (_nothing_to_do,)

    def __repr__(self) -> str:
        state = "failed" if self._error else "durable" if self._done.is_set() else "on its way"
        return f"<save of {self.directory}: {state}>"

    def __del__(self) -> None:
        if not getattr(self, "settled", True) and self._pid == os.getpid():
            what = "was written but never finalised" if self._started else "was never scheduled"
            log.error("a save of %s %s and is dropped: there is no checkpoint", self.directory, what)

    def buckets(self, *, empty: bool = False) -> list[Any]:
        """The content in the form of stock's write buckets, for whoever looks into the arguments of a request::

        [(full path, storage key, ([(index, BytesIO), ...], [(index, tensor), ...])), ...]
        """
        layout = self._layout
        if layout is None:
            return []
        values = layout.by_file(self._values) if self._values and not empty else [[] for _ in layout.images]
        names = self.plan.value_names
        found = []
        for number, image in enumerate(layout.images):
            keys = [names[i] for i, place in enumerate(layout.places) if place == number]
            streams = [io.BytesIO(value) if isinstance(value, bytes) else value for value in values[number]]
            data: list[Any] = list(zip(keys, streams, strict=False))
            tensors = (
                [] if empty or not self._tensors else [(self.plan.chunks[i], self._tensors[i]) for i in image.items]
            )
            found.append((os.path.join(self.directory, image.name), image.name, (data, tensors)))
        return found

    # -- caller's thread --------------------------------------------------------------------------------------------

    def preload(self) -> list[Any]:
        """Stages everything; returns the buckets emptied, as a stand-in for stock's staged ones. Raises interrupts only."""
        self.start()
        return self.buckets(empty=True)

    def start(self) -> None:
        """Stages and starts to write, once; further calls do nothing. Errors are kept for :meth:`vote`."""
        if os.getpid() != self._pid:
            return  # a queue has forked to call this; the parent's threads do the work
        with self._lock:
            if self._started or self._done.is_set():
                return
            self._started = True
        submitted = False
        shards: ShardSave | None = None
        try:
            if self._layout is None:
                raise CheckpointError("the save has no layout", phase="plan")
            core, layout = self.core, self._layout
            workers = core.workers
            workers.fit()
            shards = self._shards = ShardSave(
                layout.images,
                layout.static,
                layout.by_file(self._values),
                self.place,
                workers.pool,
                name_of=self._written_as,
                step=self.step,
                rank=self.rank,
                directory=self.directory,
                extent_bytes=workers.geometry.extent_bytes,
                config=core.config,
                digests=self.target.digests,
            )
            # Submitted before staging: the writers free the extents that staging waits for, and what is submitted now
            # runs to its end even if the interpreter exits.
            workers.write(shards.queue)
            core.finisher.submit(self._finish, shards, layout)
            submitted = True
            shards.stage(self._tensors, workers.copiers)
            log.info("step %d staged: %d bytes on rank %d for %s", self.step, shards.size, self.rank, self.directory)
        except BaseException as error:
            if submitted and shards is not None:
                shards.queue.fail(error)
            else:
                self._fail(error, "stage")
            if not isinstance(error, Exception):
                raise  # an interrupt is the trainer's own
        finally:
            self._tensors, self._values = [], []

    def __call__(self, *_: Any, **__: Any) -> None:
        """Stock's write function: returns once the files are durable or the save has failed, and raises neither way."""
        if os.getpid() == self._pid:
            self.start()
            self.wait()

    def done(self) -> bool:
        """Whether this rank's files are durable, or the save has failed here. One that was never started has nothing to wait for."""
        return self._done.is_set() or not self._started

    def wait(self) -> None:
        """Waits for :meth:`done`, as long as the storage takes bytes. Then :meth:`vote` says how it went."""
        patience, seen = 2 * self.core.config.commit_timeout + 5, -1
        while self._started and not self._done.wait(patience):
            now = self._shards.queue.progress if self._shards is not None else seen
            if now == seen:
                self._fail(CommitTimeoutError(f"no progress for {patience:g} s", phase="write"), "write")
            seen = now

    def cancel(self, reason: str) -> None:
        """Gives the save up: running writes end, the files are removed."""
        error = CheckpointError(reason, step=self.step, path=self.directory, phase="write")
        with self._lock:
            begun, self._started = self._started, True
        if self._shards is not None:
            self._shards.queue.fail(error)
        if not begun:
            self._fail(error, "write")
        elif self._done.is_set():
            self.remove()
        self.settle()

    def vote(self) -> Vote:
        """This rank's part of the commit.

        Raises:
            CheckpointError: what made the save fail on this rank.
        """
        if not self._started:
            self.start()  # a queue that called nothing: better late than never
        self.wait()
        if self._error is None and self._vote is not None:
            return self._vote
        raise self._error or CheckpointError("the write ended without a result", phase="write")

    def compose(self, votes: Sequence[Vote]) -> bytes:
        """On rank 0, the content of ``.metadata``."""
        if self._layout is None:
            raise CheckpointError("the save has no layout", phase="commit")
        return self._layout.composer.compose(self.plan.planned, votes, self.save_id)

    def committed(self) -> None:
        """The save is committed."""
        if self._layout is not None:
            self._layout.committed = True
        self.settle()

    def settle(self) -> None:
        """The caller knows what became of this save."""
        self.settled = True
        unfinished.discard(self)

    def remove(self) -> None:
        """Removes what this save has written on this rank; it has failed, here or elsewhere."""
        for name in (*self._names, temporary_part(self.rank, self.save_id)):
            _remove(self.place, name)

    # -- finisher thread --------------------------------------------------------------------------------------------

    def _finish(self, shards: ShardSave, layout: FileLayout) -> None:
        try:
            shards.wait()
            with self._lock:
                if self._done.is_set():
                    raise CheckpointError("the save was given up", phase="write")
            self._vote = self._publish(shards, layout)
            self._done.set()
        except BaseException as error:
            self.remove()
            for image in layout.images:
                _remove(self.place, self._written_as(image.name))
            self._fail(error, "write")
        shards.release()

    def _publish(self, shards: ShardSave, layout: FileLayout) -> Vote:
        """Gives the files their names and writes the part manifest; all durable when it returns."""
        place = self.place
        for image in layout.images:
            written = self._written_as(image.name)
            if written != image.name:
                place.rename(written, image.name)
            self._names.append(image.name)
        _clear_leftovers(place, {image.name for image in layout.images})
        place.sync()
        names = self.plan.value_names
        content = shards.part(self.save_id, self.world_size, [names[i] for i in layout.value_order])
        place.make(PART_DIRECTORY)
        place.put(temporary_part(self.rank, self.save_id), content)
        placed = dict(zip(layout.value_order, shards.placed, strict=True))
        return Vote(
            part=(part_name(self.rank), len(content), hashlib.sha256(content).hexdigest()),
            files=tuple((image.name, size) for image, size in zip(layout.images, shards.file_bytes, strict=True)),
            blobs=tuple(placed[i] for i in range(len(placed))),
            tensors=None if layout.committed else layout.columns,
            digests=shards.digests(),
        )

    def _written_as(self, name: str) -> str:
        return f".{name}{_TEMPORARY}{self.save_id}" if self.place.renames else name

    def _fail(self, error: BaseException, phase: str) -> None:
        with self._lock:
            if self._done.is_set():
                return
            # A copy without frames: the traceback would keep the state alive, and has to travel to the other ranks.
            self._error = unpack_error(
                pack_error(error, rank=self.rank, step=self.step, phase=phase, path=self.directory)
            )
            self._tensors, self._values = [], []
            self._done.set()


def _nothing_to_do(*_: Any, **__: Any) -> None:
    """What a :class:`ThreadedWrite` becomes in another process."""


def temporary_part(rank: int, save_id: str) -> str:
    """Where the part manifest of a rank lies until the commit."""
    return f"{PART_DIRECTORY}/.{part_name(rank)}{_TEMPORARY}{save_id}"


def write_of(function: Any) -> ThreadedWrite | None:
    """The save that a request's ``async_fn`` stands for, if it is one of ours."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if isinstance(function, ThreadedWrite) else None


def _clear_leftovers(place: Place, names: set[str]) -> None:
    """Removes what killed runs have left of these files: an iteration that is saved again after a crash has the same names."""
    if not place.renames:
        return  # there is nothing under temporary names
    in_flight = {write.save_id for write in list(unfinished)}
    for name in place.names():
        final, mark, save_id = name.removeprefix(".").partition(_TEMPORARY)
        if mark and name.startswith(".") and final in names and save_id not in in_flight:
            _remove(place, name)


def _remove(place: Place, name: str) -> None:
    try:
        place.remove(name)
    except (OSError, StorageError) as error:
        log.warning("%s of %s can't be removed: %s", name, place.path, error)


#: Saves that nobody has finalised yet.
unfinished: weakref.WeakSet[ThreadedWrite] = weakref.WeakSet()
