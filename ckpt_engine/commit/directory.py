"""The checkpoint directory on disk: where a save goes, how it becomes visible, what is in it.

::

    checkpoints/
      .ckpt_engine.lock                      held by the one engine that writes here
      latest_checkpointed_iteration.txt      trackers, replaced atomically after a commit
      latest_train_state.pt
      iter_0000100/                          a checkpoint; committed if ckpt_engine/commit.json is valid
      iter_0000200.tmp-<id>/                 a save on its way; the other passing names are in ``names``

A step becomes visible by one rename, after its commit record is in: whoever lists or opens ``iter_N`` at any time finds
a committed checkpoint or none, also while a step is replaced. What a kill leaves behind has a passing name that no
reader takes for a checkpoint, and :meth:`CheckpointDirectory.clear_leftovers` of the next run removes it. A save never
replaces what is not ours (:meth:`CheckpointDirectory.foreign`).

Each commit carries a number, its generation. "The newest" goes by it, since step numbers start again after a rollback.

Retention and the clearing of leftovers are in ``retention``. Not here: what is inside a checkpoint, beyond its sizes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid
from collections.abc import Iterator

from ckpt_engine.commit import listing, retention
from ckpt_engine.commit.lock import DirectoryLock
from ckpt_engine.commit.manifest import COMMIT_NAME, CommitRecord
from ckpt_engine.commit.names import (
    PART_DIRECTORY,
    PROBE_PREFIX,
    absolute_directory,
    aside_name,
    parse_leftover,
    parse_step,
    step_name,
)
from ckpt_engine.errors import ConfigError, StepExistsError, StorageError
from ckpt_engine.storage import fs

__all__ = ["CheckpointDirectory", "parse_step", "step_name"]

STEP_TRACKER = "latest_checkpointed_iteration.txt"
STATE_TRACKER = "latest_train_state.pt"


class CheckpointDirectory:
    """A directory of checkpoints. Making one does no I/O.

    Reading methods may be called by anybody at any time. Writing methods are for rank 0 of the one engine that holds
    the lock, from one thread at a time; :meth:`retire` and :meth:`clear_leftovers` also exclude each other.

    Args:
        path: the directory, made absolute now.

    Raises:
        ConfigError: ``path`` is a URI, or no path at all.
    """

    def __init__(self, path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> None:
        self.path = absolute_directory(path)
        self._lock = DirectoryLock(self.path)
        self._removals = threading.Lock()
        self._counting = threading.Lock()
        self._generation: int | None = None  # of the latest commit, as far as it is known

    def path_of(self, step: int) -> str:
        return os.path.join(self.path, step_name(step))

    # -- opening --------------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Makes the directory if it is missing and tries to make a file in it. Any number of ranks at once.

        Raises:
            ConfigError: it is a file, or not writable.
            StorageError: the file system refused for another reason (full, broken).
        """
        probe = os.path.join(self.path, f"{PROBE_PREFIX}{uuid.uuid4().hex}")
        try:
            fs.make_directory(self.path)
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):  # the writing engine clears up behind dead ones
                os.unlink(probe)
        except (OSError, StorageError) as error:
            reason = os.strerror(error.errno) if error.errno is not None else str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE):
                raise StorageError(
                    f"no file can be made in the checkpoint directory: {reason}",
                    path=self.path,
                    phase="config",
                    errno=error.errno,
                ) from error
            blocked = os.path.lexists(self.path) and not os.path.isdir(self.path)
            kind = "is not a directory" if blocked else "can't be used"
            raise ConfigError(
                f"the checkpoint directory {kind}: {reason}",
                path=self.path,
                phase="config",
                errno=error.errno,
                hint="give a directory that this user may write to",
            ) from error

    def check_readable(self) -> bool:
        """Whether the directory exists and can be listed. Writes nothing, so it also serves a read-only file system."""
        try:
            with os.scandir(self.path) as entries:
                next(entries, None)
        except OSError:
            return False
        return True

    def lock(self) -> None:
        """Keeps other engines from writing here until :meth:`unlock`, or until this process dies. Never waits.

        Raises:
            DirectoryBusyError: another engine, in this process or another one, holds the lock.
        """
        with self._counting:
            if not self._lock.held:
                self._generation = None  # another engine may have committed since
            self._lock.acquire()

    def unlock(self) -> None:
        """Idempotent."""
        self._lock.release()

    def clear_leftovers(self) -> list[str]:
        """Removes what saves and removals that were killed left behind; see :func:`retention.clear_leftovers`.

        Returns:
            The removed paths.

        Raises:
            ConfigError: the lock is not held, so that a "leftover" may be another engine's save on its way.
        """
        if not self._lock.held:
            raise ConfigError("leftovers are cleared only while the directory is locked", path=self.path, phase="plan")
        with self._removals:
            return retention.clear_leftovers(self.path, exclusive=self._lock.exclusive)

    # -- one save -------------------------------------------------------------------------------------------------

    def begin(self, step: int, save_id: str) -> str:
        """Makes the directory that a save writes into, durably, and returns its path."""
        path = os.path.join(self.path, aside_name(step, "tmp", save_id))
        with _storage_errors(step, path, "plan"):
            fs.make_directory(os.path.join(path, PART_DIRECTORY))
        return path

    def next_generation(self) -> int:
        """The number for the next commit: one more than any commit here has, and than any that was given before.

        While the lock is held, the directory is read for the first one only.

        Raises:
            StorageError: the directory can't be listed.
        """
        with self._counting:
            if self._generation is None or not self._lock.held:
                found = [record.generation for _, record in self._newest_first()]
                self._generation = max([*found, self._generation or 0])
            self._generation += 1
            return self._generation

    def foreign(self, step: int) -> str | None:
        """Why a save of ``step`` would destroy something that isn't ours, in words; ``None`` if it wouldn't.

        Foreign are a symbolic link or a file with the name of the step, a complete checkpoint that another writer made,
        or that is of another step, and a directory with anything in it that no checkpoint writer makes. A checkpoint of
        ours, committed or cut off, and what another writer left incomplete are not.
        """
        return listing.foreign(self.path_of(step), step)

    def publish(self, tmp: str, step: int, save_id: str) -> str:
        """Gives a finished save its final name; what had that name before is replaced in one step and then removed.

        Where the file system can't exchange two names, the earlier one is first renamed aside: a reader may find none
        for an instant, and after a kill in that instant :meth:`clear_leftovers` puts the earlier one back.

        Returns:
            The final path.

        Raises:
            StorageError: the file system refused. The earlier checkpoint is in its place then.
            StepExistsError: what has the final name is :meth:`foreign`.
        """
        self._check_temporary(tmp)
        final = self.path_of(step)
        if (reason := self.foreign(step)) is not None:
            raise StepExistsError(
                f"{os.path.basename(final)} {reason}, and is not replaced",
                step=step,
                path=final,
                phase="publish",
                hint="move it away, or save under another step or to another directory",
            )
        replaced: str | None = None
        with _storage_errors(step, final, "publish"):
            # The entries of shard files were made by other threads and ranks; the rename must not overtake them.
            fs.fsync_dir(os.path.join(tmp, PART_DIRECTORY))
            fs.fsync_dir(tmp)
            undo: list[tuple[str, str]] = []
            if not os.path.lexists(final):
                _rename(tmp, final, undo)
            elif fs.exchange(tmp, final):
                replaced = tmp
            else:
                replaced = os.path.join(self.path, aside_name(step, "old", save_id))
                _rename(final, replaced, undo)
            try:
                if replaced not in (None, tmp):
                    _rename(tmp, final, undo)
                fs.fsync_dir(self.path)
            except BaseException:
                # The save is going to be reported as failed, so it must not be found, and what it replaced must be.
                if replaced == tmp:
                    fs.exchange(tmp, final)
                for source, target in reversed(undo):
                    os.rename(target, source)
                raise
        if replaced is not None:
            listing.remove_quietly(replaced)
        return final

    def discard(self, tmp: str) -> None:
        """Removes the directory of a failed save. What the file system refuses is logged; the next run clears it."""
        self._check_temporary(tmp)
        listing.remove_quietly(tmp)

    def _check_temporary(self, tmp: str) -> None:
        found = parse_leftover(os.path.basename(tmp))
        # The callers rename and delete what they are given; anything but our own passing names is a mistake.
        if os.path.dirname(tmp) != self.path or found is None or found.kind != "tmp":
            raise ConfigError("this is not the directory of a save on its way", path=tmp, phase="publish")

    # -- trackers -------------------------------------------------------------------------------------------------

    def advance_trackers(self, step: int, train_state: bytes | None) -> None:
        """Points the trackers at a committed step: the train state first, since readers go by the step's tracker.

        Without a train state, the one of an earlier step is taken away: left there, it would be resumed from together
        with this step.
        """
        state_path = os.path.join(self.path, STATE_TRACKER)
        with _storage_errors(step, state_path, "publish"):
            if train_state is not None:
                fs.write_atomic(state_path, train_state)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(state_path)
        step_path = os.path.join(self.path, STEP_TRACKER)
        with _storage_errors(step, step_path, "publish"):
            fs.write_atomic(step_path, str(step).encode())

    def tracked_step(self) -> int | None:
        """The step that the tracker names; ``None`` if there is no tracker, or no step in it (Megatron's "release")."""
        try:
            with open(os.path.join(self.path, STEP_TRACKER), "rb") as file:
                text = file.read(64).strip()
        except OSError:
            return None
        return int(text) if text.isdigit() and len(text) <= 19 else None

    # -- what is there --------------------------------------------------------------------------------------------

    def committed(self, step: int) -> CommitRecord | None:
        """The commit record of a step; ``None`` if the step is missing or not committed.

        Raises:
            CheckpointError: a newer engine wrote the record.
            StorageError: the record can't be read.
        """
        return listing.read_commit(self.path_of(step), step)

    def steps(self) -> list[int]:
        """Committed steps, ascending. Goes by the commit records alone; :meth:`shortage` compares sizes."""
        found = listing.step_entries(self.path)
        return [step for step, _ in found if listing.commit_or_warn(self.path_of(step), step) is not None]

    def newest_first(self) -> list[int]:
        """Committed steps by the order of their commits, the latest first. After a rollback to 30 that is 35, 40, 30."""
        return [step for step, _ in self._newest_first()]

    def _newest_first(self) -> list[tuple[int, CommitRecord]]:
        return listing.newest_first(self.path, (step for step, _ in listing.step_entries(self.path)))

    def unverified_steps(self) -> list[int]:
        """Steps with a ``.metadata`` but no commit record, ascending: written by stock DCP."""
        found = []
        for step, _ in listing.step_entries(self.path):
            path = self.path_of(step)
            stock = os.path.isfile(os.path.join(path, ".metadata"))
            if stock and not os.path.lexists(os.path.join(path, PART_DIRECTORY, COMMIT_NAME)):
                found.append(step)
        return found

    def shortage(self, step: int, record: CommitRecord) -> str | None:
        """What a committed step lacks, by a look at names and sizes; ``None`` if nothing. Reads no data."""
        return listing.shortage(self.path_of(step), record)

    def retire(self, committed_step: int, keep_last: int | None, keep_every: int | None) -> list[str]:
        """Takes old checkpoints out of sight; see :func:`retention.retire`.

        Returns:
            Where they are now; the caller removes them (``storage.fs.remove_tree``), which may take long.
        """
        if keep_last is None:
            return []
        with self._removals, _storage_errors(committed_step, self.path, "publish"):
            return retention.retire(self.path, committed_step, self.tracked_step(), keep_last, keep_every)


def _rename(source: str, target: str, done: list[tuple[str, str]]) -> None:
    os.rename(source, target)
    done.append((source, target))


@contextlib.contextmanager
def _storage_errors(step: int, path: str, phase: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageError(
            f"{error.strerror or error} ({os.path.basename(error.filename or path)})",
            step=step,
            path=path,
            phase=phase,
            errno=error.errno,
            hint="free space or lower keep_last" if full else None,
        ) from error
