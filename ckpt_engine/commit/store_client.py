"""How the coordinator uses a c10d ``Store``: from a thread of its own, by polling, with values of any size.

Promises: a store whose host is frozen or unreachable can't hold the caller beyond its deadline; waiting doesn't hold
up other threads that use the same store; values beyond TCPStore's limit go through.

It knows nothing of rounds and verdicts, and doesn't judge errors: those of the store come out as they are.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

log = logging.getLogger("ckpt_engine")

T = TypeVar("T")

#: TCPStore closes the connection of a client that sends more than 8 MiB in one value.
PART_BYTES = 4 << 20

#: Values fetched in one request, so that the answer stays below 64 MiB.
_KEYS_PER_REQUEST = 16

#: Pauses between two looks at the store: short at first, because most rounds are over at once.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02

#: The store serves some 10^5 requests a second: the more ranks poll it, the longer each has to pause.
_PAUSE_PER_RANK = 0.00004

#: Seconds after its deadline that a call to the store may still be on its way before the store counts as hung.
_STORE_PATIENCE = 5.0

_WHOLE, _IN_PARTS = b"w", b"p"


class StoreHangs(Exception):
    """A call to the store did not come back."""


class WaitCancelled(Exception):
    """Nobody wants the answer any more."""


class Call:
    """One visit to the store.

    Attributes:
        deadline: of its waits, on the monotonic clock. The work itself may move it.
        abandoned: the caller has gone.
    """

    def __init__(self, timeout: float) -> None:
        self.deadline = time.monotonic() + timeout
        self.abandoned = False
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class StoreClient:
    """A store as seen by one thread of one rank.

    Args:
        store: a c10d store, prefixed.
        users: ranks that poll it.
    """

    def __init__(self, store: Any, users: int) -> None:
        self._store = store
        self._users = users
        self._longest_pause = max(_LONGEST_PAUSE, _PAUSE_PER_RANK * users)
        # One rank alone has a store in its own memory, which can't hang.
        self._thread: _StoreThread | None = None
        if users > 1:
            try:
                self._thread = _StoreThread()
            except (RuntimeError, MemoryError) as error:  # the other ranks have to hear of this rank all the same
                log.warning(
                    "the store is used without a thread of its own, a host that hangs can hold this rank: %s", error
                )
        if self._thread is not None:
            # Not at exit: engines that are closed at exit still need it.
            weakref.finalize(self, self._thread.stop).atexit = False

    def clone(self) -> StoreClient:
        """The same keys over another connection, where the store can do that; over the same one otherwise."""
        store = self._store
        if self._users > 1 and hasattr(store, "clone"):
            try:
                store = store.clone()
            except (RuntimeError, OSError) as error:  # no descriptor left, or not implemented; sharing works as well
                log.debug("the store can't be cloned, its connection is shared: %s", error)
        return StoreClient(store, self._users)

    def run(self, call: Call, work: Callable[[Call], T]) -> T:
        """Does ``work``, which uses the methods below, and returns what it returns.

        Raises:
            StoreHangs: it did not come back in time.
        """
        return work(call) if self._thread is None else self._thread.run(call, work)

    def stop(self) -> None:
        """Ends the thread; idempotent. The client can't be used any more."""
        if self._thread is not None:
            self._thread.stop()

    def wait_for(self, call: Call, keys: list[str], *, gone: bool = False) -> bool:
        """Waits until all keys are there (or, with ``gone``, until they aren't), at most until the call's deadline.

        A blocking ``get`` or ``wait`` would hold the lock of the connection: the trainer's own ``set`` took seconds.

        Raises:
            WaitCancelled: the caller has gone.
        """
        pause = _FIRST_PAUSE
        while self._store.check(keys) == gone:
            if call.abandoned:
                raise WaitCancelled
            left = call.deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, self._longest_pause)
        return True

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def count(self, key: str) -> int:
        """Adds 1 to a counter and returns its value: only one caller gets a 1."""
        return int(self._store.add(key, 1))

    def write(self, key: str, payload: bytes) -> None:
        """Sets a value of any size."""
        if len(payload) <= PART_BYTES:
            self._store.set(key, _WHOLE + payload)
            return
        starts = range(0, len(payload), PART_BYTES)
        for number, start in enumerate(starts):
            self._store.set(f"{key}.{number}", payload[start : start + PART_BYTES])
        self._store.set(key, _IN_PARTS + str(len(starts)).encode())  # last: whoever sees it finds the parts

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Values of keys that are known to be there."""
        payloads = []
        for key, value in zip(keys, self._fetch(keys), strict=True):
            if value[:1] == _WHOLE:
                payloads.append(value[1:])
            else:
                payloads.append(b"".join(self._fetch([f"{key}.{number}" for number in range(int(value[1:]))])))
        return payloads

    def _fetch(self, keys: Sequence[str]) -> list[bytes]:
        if len(keys) == 1 or not self._store.has_extended_api():
            return [self._store.get(key) for key in keys]
        values: list[bytes] = []
        for start in range(0, len(keys), _KEYS_PER_REQUEST):
            values += self._store.multi_get(list(keys[start : start + _KEYS_PER_REQUEST]))
        return values

    def discard(self, key: str) -> None:
        """Deletes a value made by :meth:`write`, if it is there."""
        if not self.has(key):
            return
        header = self._store.get(key)
        if header[:1] == _IN_PARTS:
            for number in range(int(header[1:])):
                self._store.delete_key(f"{key}.{number}")
        self._store.delete_key(key)

    def delete(self, key: str) -> None:
        """Deletes a counter."""
        self._store.delete_key(key)


_Work = queue.SimpleQueue[tuple[Call, Callable[[Call], Any]] | None]


class _StoreThread:
    """Makes the calls to a store.

    A request to a host that is frozen or unreachable blocks in C++ without a time limit. Made here, it can hold
    neither the caller nor, as the thread is a daemon, the end of the interpreter. The thread starts at once, because
    a save that is on its way when the interpreter exits needs it, and no thread can be started by then.
    """

    def __init__(self) -> None:
        self._work: _Work = queue.SimpleQueue()
        self._stuck: Call | None = None
        threading.Thread(target=_serve, args=(self._work,), name="ckpt-store", daemon=True).start()

    def run(self, call: Call, work: Callable[[Call], T]) -> T:
        if self._stuck is not None and not self._stuck.done.is_set():
            raise StoreHangs
        self._stuck = None
        self._work.put((call, work))
        try:
            while not call.done.wait(max(0.0, call.deadline + _STORE_PATIENCE - time.monotonic())):
                if time.monotonic() >= call.deadline + _STORE_PATIENCE:
                    self._stuck = call
                    raise StoreHangs
        finally:
            call.abandoned = True  # an interrupted caller must not leave a wait behind that blocks the next call
        if call.error is not None:
            try:
                raise call.error
            finally:
                call.error = None  # its traceback holds this frame, which would hold it: a cycle with everything in it
        result: T = call.result
        return result

    def stop(self) -> None:
        self._work.put(None)


def _serve(work: _Work) -> None:
    # Knows the queue only: a client that nobody stops can still be collected, and ends its thread then.
    while (item := work.get()) is not None:
        call, function = item
        try:
            if not call.abandoned:
                call.result = function(call)
        except BaseException as error:
            call.error = error
        call.done.set()
        del item, call, function
