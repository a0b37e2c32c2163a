"""Agreement between ranks through the c10d ``Store``, without a collective.

A *round* has a tag that is used once. Its keys, below a prefix that belongs to one engine of one process group::

    <tag>/0 .. <tag>/n-1   what each rank has to say
    <tag>/c                the claim: a counter, and whoever brings it to 1 decides this round
    <tag>/v                the verdict, written by the holder of the claim and by nobody else
    <tag>/n                how many ranks have the verdict; the last one deletes what is left of the round

Rank 0 claims once everybody has spoken. A rank whose deadline passes first claims too, and its verdict is a
:class:`CommitTimeoutError` that names who is missing. One claim means one verdict: no rank can take a save for
committed that another rank has given up. The only exception is a rank 0 that claims and is silent for another whole
deadline.

Promises: every call returns or raises within twice its deadline, also when the host of the store hangs (a few seconds
later then); waiting never holds up another thread that uses the same store; a failure on one rank is the same typed
error on all of them, with its traceback as text and nothing that keeps frames or tensors alive; finished rounds leave
no key behind.

Not promised: a coordinator is for one thread at a time (:meth:`Coordinator.for_thread` makes another one), and
payloads are trusted like any other traffic of the process group.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckpt_engine.commit.remote_error import describe, pack_error, pickle_error, unpack_error
from ckpt_engine.commit.store_client import Call, StoreClient, StoreHangs, WaitCancelled
from ckpt_engine.errors import CheckpointError, CommitTimeoutError, ConfigError, EngineClosedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Coordinator", "pack_error", "unpack_error"]

log = logging.getLogger("ckpt_engine")

T = TypeVar("T")

#: How long rank 0, whose process may host the store, stays for ranks that have not read its last verdict ...
_LINGER_SECONDS = 5.0

#: ... and if that verdict was a failure, when some of them may never come.
_LINGER_AFTER_FAILURE_SECONDS = 1.0

_AGREED, _FAILED = b"=", b"!"

_ordinals: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
_ordinals_lock = threading.Lock()


class Coordinator:
    """The ranks of one process group, seen from one of them.

    Attributes:
        rank, world_size: in the group.
        timeout: seconds to wait for the other ranks, unless a call says otherwise.
    """

    def __init__(self, client: StoreClient, rank: int, world_size: int, *, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._client = client
        self._claimed: set[str] = set()
        self._last_verdict: tuple[str, float] | None = None
        self._closed = False

    @classmethod
    def for_group(cls, process_group: ProcessGroup | None, *, timeout: float) -> Coordinator:
        """The coordinator of this process in ``process_group`` (the default group if ``None``).

        Ranks of a group have to make theirs in the same order: the n-th of one rank talks to the n-th of the others.

        Raises:
            ConfigError: this rank isn't in the group, or the group has no store.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if process_group is not None:
                raise ConfigError(
                    "a process_group was given, but torch.distributed is not initialised",
                    phase="config",
                    hint="call torch.distributed.init_process_group first, or leave process_group out",
                )
            return cls._alone(timeout)
        group = process_group if process_group is not None else distributed_c10d._get_default_group()
        try:
            rank = dist.get_rank(group)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"process_group is {group!r}, expected a live ProcessGroup", phase="config") from error
        if rank < 0:
            raise ConfigError(
                f"rank {dist.get_rank()} is not in the process group of this engine",
                rank=dist.get_rank(),
                phase="config",
                hint="make the engine only on ranks of the group",
            )
        world_size = dist.get_world_size(group)
        if world_size == 1:
            return cls._alone(timeout)
        with _ordinals_lock:
            ordinal = _ordinals[group] = _ordinals.get(group, -1) + 1
        store = dist.PrefixStore(f"ckpt_engine/{ordinal}", _store_of(group))  # type: ignore[attr-defined]
        return cls(StoreClient(store, world_size), rank, world_size, timeout=timeout)

    @classmethod
    def _alone(cls, timeout: float) -> Coordinator:
        return cls(StoreClient(dist.HashStore(), 1), 0, 1, timeout=timeout)  # type: ignore[attr-defined]

    def for_thread(self) -> Coordinator:
        """The same ranks and keys for another thread, over a connection of its own where the store can do that."""
        return Coordinator(self._client.clone(), self.rank, self.world_size, timeout=self.timeout)

    def close(self) -> None:
        """Ends the use of the store; idempotent, never raises.

        Rank 0 stays, for a few seconds at most, until the others have read its last verdict: its process may host the
        store, and a rank that polls a store that has gone would report a committed save as failed.
        """
        if self._closed:
            return
        try:
            if self._last_verdict is not None and self.world_size > 1:
                tag, seconds = self._last_verdict

                def unread(call: Call) -> None:
                    self._client.wait_for(call, [f"{tag}/n"], gone=True)

                self._call(unread, timeout=min(seconds, self.timeout), phase="close", step=None)
        except CheckpointError as error:
            log.debug("closing without the store: %s", error)
        finally:
            self._closed = True
            self._client.stop()

    # -- a whole round ----------------------------------------------------------------------------------------------

    def decide(
        self,
        tag: str,
        payload: bytes,
        judge: Callable[[list[bytes]], bytes],
        *,
        phase: str,
        step: int | None,
        timeout: float | None = None,
    ) -> bytes:
        """Gives every rank the verdict that ``judge`` makes on rank 0 from everybody's payload, in rank order.

        Args:
            tag: names the round; the same on all ranks, and used once.
            judge: runs in the calling thread of rank 0. What it raises is raised on every rank.
            phase, step: for the errors.
            timeout: seconds to wait for the others, and as many again while rank 0 judges.

        Raises:
            CommitTimeoutError: a rank was silent. Every other rank gets it, and so does that one if it comes later.
            CheckpointError: ``judge`` failed, or the store is gone.
        """
        if self.rank != 0:

            def speak_and_hear(call: Call) -> bytes:
                self._client.write(f"{tag}/{self.rank}", payload)
                return self._hear(call, tag, phase, step)

            return self._call(speak_and_hear, timeout=timeout, phase=phase, step=step)

        def speak_and_gather(call: Call) -> list[bytes]:
            self._client.write(f"{tag}/0", payload)
            return self._gather(call, tag, phase, step)

        try:
            verdict = judge(self._call(speak_and_gather, timeout=timeout, phase=phase, step=step))
        except BaseException as error:
            if tag not in self._claimed and isinstance(error, CheckpointError):
                raise  # another rank has decided this round, or the store is gone
            packed = pack_error(error, rank=0, step=step, phase=phase)
            self._fail(tag, packed, phase=phase, step=step)
            if not isinstance(error, Exception):
                raise
        else:

            def agree(call: Call) -> None:
                self._announce(tag, _AGREED + verdict)
                for rank in range(self.world_size):
                    self._client.discard(f"{tag}/{rank}")
                self._acknowledge(tag, failed=False)

            self._call(agree, timeout=timeout, phase=phase, step=step)
            return verdict
        raise unpack_error(packed)  # outside of the handler: its context would keep the frames of the judge alive

    def _fail(self, tag: str, packed: bytes, *, phase: str, step: int | None) -> None:
        def fail(call: Call) -> None:
            self._announce(tag, _FAILED + packed)
            self._acknowledge(tag, failed=True)

        try:
            self._call(fail, timeout=None, phase=phase, step=step)
        except CheckpointError as error:
            log.error("the other ranks can't be told of a failure: %s", error)

    def failed(self, tag: str) -> CheckpointError | None:
        """The error of a round that failed before this rank has taken part in it; ``None`` if it hasn't. Doesn't wait."""

        def work(call: Call) -> bytes | None:
            return self._client.read([f"{tag}/v"])[0] if self._client.has(f"{tag}/v") else None

        verdict = self._call(work, timeout=None, phase="vote", step=None)
        return unpack_error(verdict[1:]) if verdict is not None and verdict[:1] == _FAILED else None

    # -- what is done at the store ----------------------------------------------------------------------------------

    def _gather(self, call: Call, tag: str, phase: str, step: int | None) -> list[bytes]:
        keys = [f"{tag}/{rank}" for rank in range(self.world_size)]
        patience = call.deadline - time.monotonic()
        missing = [] if self._client.wait_for(call, keys) else self._missing(tag)
        if not self._claim(tag):
            call.deadline = time.monotonic() + patience
            self._hear(call, tag, phase, step)
            raise CheckpointError(f"round {tag} was decided without rank 0", rank=0)
        if missing:
            raise _timed_out(missing, self.world_size, patience)
        return self._client.read(keys)

    def _hear(self, call: Call, tag: str, phase: str, step: int | None) -> bytes:
        keys = [f"{tag}/v"]
        patience = call.deadline - time.monotonic()
        failed = True
        try:
            if not self._client.wait_for(call, keys):
                # Looked at before the claim: rank 0 deletes nothing unless it has claimed itself.
                missing = self._missing(tag)
                if self._claim(tag):
                    error = _timed_out(missing or [0], self.world_size, patience)
                    error.phase, error.step = phase, step
                    self._announce(tag, _FAILED + pickle_error(error))
                else:  # rank 0 is judging, or a rank whose patience ended earlier is about to say so
                    call.deadline = time.monotonic() + patience
                    if not self._client.wait_for(call, keys):
                        raise _timed_out(
                            [0], self.world_size, 2 * patience, "the round is decided, but rank 0 told no verdict"
                        )
            verdict = self._client.read(keys)[0]
            failed = verdict[:1] != _AGREED
        finally:
            try:
                self._acknowledge(tag, failed=failed)
            except (RuntimeError, OSError) as reason:  # this rank has its verdict; rank 0 may leave right after its own
                log.debug("round %s could not be cleaned up: %s", tag, reason)
        if failed:
            raise unpack_error(verdict[1:])
        return verdict[1:]

    def _missing(self, tag: str) -> list[int]:
        return [rank for rank in range(self.world_size) if not self._client.has(f"{tag}/{rank}")]

    def _claim(self, tag: str) -> bool:
        if tag not in self._claimed:
            if self._client.count(f"{tag}/c") != 1:
                return False
            self._claimed.add(tag)
        return True

    def _announce(self, tag: str, verdict: bytes) -> None:
        if not self._claim(tag):
            log.debug("round %s was given up by another rank, whose verdict stands", tag)
            return
        self._client.write(f"{tag}/v", verdict)
        self._claimed.discard(tag)
        if self.rank == 0:
            agreed = verdict[:1] == _AGREED
            self._last_verdict = tag, _LINGER_SECONDS if agreed else _LINGER_AFTER_FAILURE_SECONDS

    def _acknowledge(self, tag: str, *, failed: bool) -> None:
        if self._client.count(f"{tag}/n") < self.world_size:
            return
        if failed:  # in a round that succeeded rank 0 has deleted them
            for rank in range(self.world_size):
                self._client.discard(f"{tag}/{rank}")
        self._client.discard(f"{tag}/v")
        self._client.delete(f"{tag}/c")
        self._client.delete(f"{tag}/n")  # last: close() takes its absence for the end of the round

    def _call(self, work: Callable[[Call], T], *, timeout: float | None, phase: str, step: int | None) -> T:
        if self._closed:
            raise EngineClosedError("this coordinator is closed", rank=self.rank, step=step, phase=phase)
        patience = self.timeout if timeout is None else timeout
        error: CheckpointError
        try:
            return self._client.run(Call(patience), work)
        except CheckpointError as known:
            error = known
        except WaitCancelled:
            error = CheckpointError("the wait for the other ranks was cancelled", rank=self.rank)
        except StoreHangs:
            error = _timed_out([0], self.world_size, patience, "rank 0's store does not answer")
        except (RuntimeError, OSError) as reason:
            error = CheckpointError(
                f"rank 0's store is gone ({describe(reason)})",
                rank=0,
                hint="rank 0, or the launcher that hosts the store, has ended; its log says why",
            )
        error.phase = error.phase or phase
        error.step = step if error.step is None else error.step
        try:
            raise error
        finally:
            del error  # the traceback holds this frame, which would hold the error: a cycle with the payloads in it


def _store_of(group: Any) -> Any:
    """The store of a process group, prefixed with what makes its keys differ from those of other groups."""
    store: Any = None
    try:
        store = distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError):  # private, may move; and groups that were made in another way aren't listed
        name = getattr(group, "group_name", None)
        if name is not None:
            default = distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"group/{name}", default)  # type: ignore[attr-defined]
    if store is None:
        raise ConfigError(
            "the process group has no store through which its ranks could agree",
            phase="config",
            hint="use a group of the gloo or nccl backend",
        )
    return store


def _timed_out(silent: Sequence[int], world_size: int, seconds: float, what: str | None = None) -> CommitTimeoutError:
    if what is None:
        ranks = "rank" if len(silent) == 1 else "ranks"
        what = f"no word from {ranks} {', '.join(map(str, silent))} of {world_size}"
    return CommitTimeoutError(
        f"{what} within {seconds:.1f} s",
        silent_ranks=tuple(silent),
        rank=silent[0],
        hint="look at the logs of the silent ranks; raise commit_timeout if they were only slow",
        remote_traceback="",  # not None, so that nobody fills in the traceback of a rank that only waited
    )
