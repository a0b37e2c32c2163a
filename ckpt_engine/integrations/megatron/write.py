"""One Megatron save on this rank: the callable that takes the place of stock's write function, and what comes of it.

::

    get_save_function_and_args -> (write, write.preload, [rank, buckets, None])
    write.preload()            caller's thread: copies everything into extents; writer threads write meanwhile
    write(rank, buckets, ..)   caller's thread, synchronous saves: waits until the files are durable
    write.done()               caller's thread, polls of a queue
    write.results()            caller's thread, finalisation: results of exactly this save, or its wrapped error

Files are written under temporary names; once all are durable, the finisher thread renames them, and writes this rank's part
manifest before it reports. Promises: when ``preload`` returns nothing reads the sources any more; whatever goes wrong on
this rank is in ``results``, so that Megatron's own gather takes it to all ranks; after a failure no file of this save
is left on this rank. Pickling the callable is refused: it means that somebody is about to start a process.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.storage import WriteResult

from ckpt_engine.commit.coordinator import pack_error, unpack_error
from ckpt_engine.commit.manifest import COMMIT_NAME, PartEntry, part_name
from ckpt_engine.commit.names import PART_DIRECTORY, absolute_directory
from ckpt_engine.errors import CheckpointError, CommitTimeoutError
from ckpt_engine.integrations.megatron.buckets import Buckets, emptied, layout_of, value_results
from ckpt_engine.integrations.megatron.session import Core, SaveName, Session
from ckpt_engine.persisting import ShardSave
from ckpt_engine.storage.fs import fsync_dir, make_directory, write_atomic

log = logging.getLogger("ckpt_engine")

#: A shard file on its way is called "." + its name + this + the save id.
_TEMPORARY = ".tmp-"


class Results(list[WriteResult]):
    """Write results as Megatron gathers them, with what the commit record needs to know of this rank's part."""

    def __init__(self, results: Sequence[WriteResult], name: SaveName, part: PartEntry, size: int) -> None:
        super().__init__(results)
        self.name = name
        self.part = part
        self.size = size

    def __reduce__(self) -> tuple[Any, ...]:
        return (Results, (list(self), self.name, self.part, self.size))


class ThreadedWrite:
    """A save on its way; callable like stock's write function. Made on every rank, also where there is nothing to write."""

    def __init__(self, core: Core, buckets: Sequence[Any], directory: Any, train_state: bytes | None = None) -> None:
        self.directory = os.fspath(directory)
        self.checksum = core.config.checksum
        self.train_state = train_state
        self.checked = False  # whoever finalises this looks for notes of failures
        self._pid = os.getpid()
        self._core = core
        self._buckets: Sequence[Any] | None = buckets
        self._lock = threading.Lock()
        self._started = False
        self._done = threading.Event()
        self._shards: ShardSave | None = None
        self._results: Results | None = None
        self._error: CheckpointError | None = None
        self.session: Session | None = None
        self.name = SaveName(0, "", 0, 0, 1)
        try:
            self.directory = absolute_directory(self.directory)
            self.session = core.session()
            self.name = self.session.name(self.directory)
        except Exception as error:  # one rank that raised here would leave the others in Megatron's next collective
            self._fail(error, "plan")
        unfinished.add(self)

    def __reduce__(self) -> NoReturn:
        raise CheckpointError(
            "a save of ckpt_engine can't be sent to another process",
            step=self.name.step,
            phase="stage",
            hint="schedule it on an AsyncCallsQueue that install() has seen, or call execute_sync()",
        )

    def __repr__(self) -> str:
        state = "failed" if self._error else "durable" if self._done.is_set() else "on its way"
        return f"<save of {self.directory}: {state}>"

    # -- caller's thread --------------------------------------------------------------------------------------------

    def preload(self) -> list[Any]:
        """Stages everything; returns the buckets emptied, as a stand-in for stock's staged ones. Raises interrupts only."""
        buckets = self._buckets or []
        self.start(buckets)
        return emptied(buckets)

    def start(self, buckets: Sequence[Any]) -> None:
        """Stages and starts to write, once; further calls do nothing. Errors are kept for :meth:`results`."""
        with self._lock:
            if self._started or self._done.is_set():
                return
            self._started = True
        if os.getpid() != self._pid:
            raise CheckpointError(
                "a save was started in a forked process", path=self.directory, step=self.name.step, phase="stage"
            )
        submitted = False
        shards: ShardSave | None = None
        try:
            content = Buckets.of(buckets)
            core, name = self._core, self.name
            workers = core.workers
            workers.fit()
            layout = layout_of(content, core.templates, core.layouts, rank=name.rank, checksum=core.config.checksum)
            shards = self._shards = ShardSave(
                layout.images,
                layout.static,
                [[value for _, value in values] for values in content.values],
                lambda key: self._temporary(content.paths[key]),
                workers.pool,
                step=name.step,
                rank=name.rank,
                directory=self.directory,
                extent_bytes=workers.geometry.extent_bytes,
                config=core.config,
            )
            indexes = [index for values in content.values for index, _ in values]
            tensors = content.tensors
            finish = (shards, dict(content.paths), layout.results, indexes)
            # Submitted before staging: the writers free the extents that staging waits for, and what is submitted now
            # runs to its end even if the interpreter exits.
            workers.write(shards.queue)
            core.finisher.submit(self._finish, *finish)
            submitted = True
            shards.stage(tensors, workers.copiers)
        except BaseException as error:
            if submitted and shards is not None:
                shards.queue.fail(error)
            else:
                self._fail(error, "stage")
            if not isinstance(error, Exception):
                raise  # an interrupt is the trainer's own
        finally:
            self._buckets = None

    def __call__(self, *args: Any, **_: Any) -> None:
        """Stock's write function: returns once the files are durable or the save has failed, and raises neither way."""
        if not self._started:
            self.start(args[1] if len(args) > 1 and args[1] is not None else self._buckets or [])
        self.wait()

    def done(self) -> bool:
        """Whether this rank's files are durable, or the save has failed here. One that was never started has nothing to wait for."""
        return self._done.is_set() or not self._started

    def wait(self) -> None:
        """Waits for :meth:`done`, as long as the storage takes bytes. Then the error of :meth:`results` says so."""
        patience, seen = 2 * self._core.config.commit_timeout + 5, -1
        while self._started and not self._done.wait(patience):
            now = self._shards.queue.progress if self._shards is not None else seen
            if now == seen:
                self._fail(CommitTimeoutError(f"no progress for {patience:g} s", phase="write"), "write")
            seen = now

    def cancel(self, reason: str) -> None:
        """Gives the save up: running writes end, the files are removed."""
        error = CheckpointError(reason, step=self.name.step, path=self.directory, phase="write")
        with self._lock:
            begun, self._started = self._started, True
        if self._shards is not None:
            self._shards.queue.fail(error)
        if not begun:
            self._fail(error, "write")

    def results(self) -> Any:
        """What ``retrieve_write_results`` returns: results, or DCP's wrapped exception. A failure is told to the other ranks."""
        if not self._done.is_set():
            state = "has not ended" if self._started else "was never started in this process"
            self._fail(CheckpointError(f"results were asked for, but the write {state}", phase="write"), "write")
        if self._error is None and self._results is not None:
            return self._results
        error = self._error or CheckpointError("the write ended without results", phase="write")
        if self.session is not None:
            try:
                self.session.note_failure(
                    self.name.number, pack_error(error, rank=self.name.rank, step=None, phase=None)
                )
            except CheckpointError as unheard:
                log.debug("the other ranks hear of the failure from Megatron only: %s", unheard)
        return _wrap_exception(error)

    # -- finisher thread --------------------------------------------------------------------------------------------

    def _finish(self, shards: ShardSave, paths: dict[str, str], results: list[WriteResult], indexes: list[Any]) -> None:
        renamed: list[str] = []
        try:
            shards.wait()
            with self._lock:
                if self._done.is_set():
                    raise CheckpointError("the save was given up", phase="write")
            part = self._publish(shards, list(paths.values()), [index.fqn for index in indexes], renamed)
            everything = results + value_results(list(paths), indexes, shards.placed)
            self._results = Results(everything, self.name, part, shards.size)
            self._done.set()
        except BaseException as error:
            for path in [*renamed, *map(self._temporary, paths.values())]:
                _remove(path)
            self._fail(error, "write")
        shards.release()

    def _publish(self, shards: ShardSave, paths: list[str], names: list[str], renamed: list[str]) -> PartEntry:
        """Gives the files their names and writes the part manifest; all durable when it returns."""
        folder = os.path.join(self.directory, PART_DIRECTORY)
        make_directory(folder)
        # An earlier checkpoint at this path is over now, and must not be taken for a whole one from here on.
        _remove(os.path.join(folder, COMMIT_NAME))
        fsync_dir(folder)
        for path in paths:
            os.rename(self._temporary(path), path)
            renamed.append(path)
        for directory in {os.path.dirname(path) for path in paths}:
            _clear_leftovers(directory, {os.path.basename(path) for path in paths})
            fsync_dir(directory)
        content = shards.part(self.name.save_id, self.name.world_size, names)
        part = PartEntry(self.name.rank, part_name(self.name.rank), len(content), hashlib.sha256(content).hexdigest())
        write_atomic(os.path.join(folder, part.name), content)
        return part

    def _temporary(self, path: str) -> str:
        folder, name = os.path.split(path)
        return os.path.join(folder, f".{name}{_TEMPORARY}{self.name.save_id}")

    def _fail(self, error: BaseException, phase: str) -> None:
        with self._lock:
            if self._done.is_set():
                return
            # A copy without frames: the traceback would keep the state alive, and has to travel to the other ranks.
            self._error = unpack_error(
                pack_error(error, rank=self.name.rank, step=self.name.step, phase=phase, path=self.directory)
            )
            self._buckets = None
            self._done.set()


def write_of(function: Any) -> ThreadedWrite | None:
    """The save that a request's ``async_fn`` stands for, if it is one of ours."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if isinstance(function, ThreadedWrite) else None


def _clear_leftovers(directory: str, names: set[str]) -> None:
    """Removes what killed runs have left of these files: an iteration that is saved again after a crash has the same names."""
    in_flight = {write.name.save_id for write in list(unfinished)}
    with os.scandir(directory) as entries:
        found = [entry.name for entry in entries]
    for name in found:
        final, mark, save_id = name.removeprefix(".").partition(_TEMPORARY)
        if mark and name.startswith(".") and final in names and save_id not in in_flight:
            _remove(os.path.join(directory, name))


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s can't be removed: %s", path, error)


#: Saves that nobody has finalised yet.
unfinished: weakref.WeakSet[ThreadedWrite] = weakref.WeakSet()
