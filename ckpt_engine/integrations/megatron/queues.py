"""Async requests on queues: ours (:class:`ThreadAsyncCallsQueue`), and Megatron's and NVRx's own when they are changed in place.

A request of ours is staged on the caller's thread and then only asked whether it is done: one int32 ``all_reduce`` per poll on
the default group, and the finalize functions once all ranks are done, as stock has it. On stock's queues all other requests (local
checkpoints, say) go stock's way; on ours they run in a thread.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ckpt_engine.errors import CheckpointError
from ckpt_engine.integrations.megatron.write import ThreadedWrite, write_of

log = logging.getLogger("ckpt_engine")


class ThreadCaller:
    """What a queue asks whether a request is done. Has the methods of stock's ``AsyncCaller``.

    Args:
        write: a save of ours; with neither this nor ``future`` there is nothing to wait for.
        future: a request of somebody else that runs in a thread.
    """

    def __init__(
        self, write: ThreadedWrite | None = None, future: concurrent.futures.Future[Any] | None = None
    ) -> None:
        self.write, self.future = write, future

    def schedule_async_call(self, async_req: Any) -> None:
        """Nothing: the write runs since it was staged."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether all ranks are done. Collective unless ``no_dist``; a blocking poll waits for this rank first."""
        if blocking:
            if self.write is not None:
                self.write.wait()
            if self.future is not None:
                concurrent.futures.wait([self.future])
        write_alive = self.write is not None and not self.write.done()
        alive = int(write_alive or (self.future is not None and not self.future.done()))
        return not alive if no_dist else self.sync_all_async_calls(alive)

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """The one collective of a poll, as stock has it."""
        return not _all_reduced(is_alive, dist.ReduceOp.SUM)

    def close(self, abort: bool = False) -> None:
        """Gives up the write if ``abort``."""
        if not abort:
            return
        if self.future is not None:
            self.future.cancel()
        if self.write is not None:
            self.write.cancel("aborted by close(abort=True)")


def _all_reduced(value: int, operation: Any) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        return value
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    tensor = torch.tensor([value], dtype=torch.int32, device=device)
    dist.all_reduce(tensor, op=operation)
    return int(tensor.item())


# -- Megatron's and NVRx's queues ----------------------------------------------------------------------------------------


class LateResultsQueue:
    """Stands where stock keeps the proxy of a Manager process, and starts that process only for a writer of stock's that uses it."""

    class _NoManager:
        def shutdown(self) -> None:
            pass

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._started: Any = None

    def start(self) -> Any:
        """The real one."""
        if self._started is None:
            self._started = self._start()
        return self._started

    @property
    def _manager(self) -> Any:
        return self._NoManager() if self._started is None else self._started._manager

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.start(), name)

    def __reduce__(self) -> Any:
        return self.start().__reduce__()


def schedule(queue: Any, request: Any, original: Callable[[Any, Any], Any]) -> Any:
    """``AsyncCallsQueue.schedule_async_request``: takes our requests and empty ones, gives all others to ``original``."""
    write = write_of(request.async_fn)
    if write is None and request.async_fn is not None:
        for argument in request.async_fn_args:
            if isinstance(argument, LateResultsQueue):
                argument.start()  # before a fork: the child's would be another one
        return original(queue, request)
    module = sys.modules[_home(type(queue), "schedule_async_request").__module__]
    kind: Any = vars(module)["AsyncRequest"]
    if not isinstance(request, kind):  # built by another generation of the class: same fields, or fewer
        request = kind(**{name: value for name, value in request._asdict().items() if name in kind._fields})
    index: int = queue.call_idx + 1
    queue.call_idx = index
    if write is not None:
        write.start()
        # Without the arguments: they hold the trainer's tensors, on whatever device, until the request is finalised.
        request = request._replace(async_fn_args=(), preload_fn=None)
    active = vars(module)["_ActiveAsyncRequest"](
        index, ThreadCaller(write), request._replace(is_frozen=True, call_idx=index)
    )
    queue.async_calls.append(active)
    return index


def close(queue: Any, abort: bool) -> None:
    """Before stock's ``close``: finalises our saves; an aborted queue drops them, so that none shows up later (B017)."""
    if not abort:
        if any(isinstance(call.async_caller, ThreadCaller) for call in queue.async_calls):
            queue.maybe_finalize_async_calls(blocking=True)  # NVRx's close doesn't, if it has started no worker
        return
    for call in [call for call in queue.async_calls if isinstance(call.async_caller, ThreadCaller)]:
        call.async_caller.close(abort=True)
        queue.async_calls.remove(call)


def _home(kind: type, method: str) -> type:
    return next(base for base in kind.__mro__ if method in vars(base))


# -- ours ----------------------------------------------------------------------------------------------------------------


class _Active(NamedTuple):
    """A scheduled request. The fields are those of stock's."""

    idx: int
    async_caller: ThreadCaller
    async_request: Any


class ThreadAsyncCallsQueue:
    """A queue of async requests on threads of this process, with the methods of Megatron's ``AsyncCallsQueue``.

    Nothing of Megatron or NVRx is needed or changed. Saves of :class:`~.strategy.ThreadedSaveStrategy` run on the engine's threads;
    other requests (``preload_fn`` on the caller's thread, then ``async_fn``) run one after the other in a thread of the queue.

    >>> import megatron.training.async_utils as async_utils                              # doctest: +SKIP
    >>> async_utils._async_calls_queue = ThreadAsyncCallsQueue()                         # doctest: +SKIP

    Args:
        persistent, options: taken for the sake of code that makes stock's queues; there is no worker to keep or to tune.
    """

    def __init__(self, persistent: bool = False, **options: Any) -> None:
        self.persistent = persistent
        self.call_idx = -1
        self.async_calls: collections.deque[_Active] = collections.deque()
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    @classmethod
    def warmup_persistent_caller(cls, *_: Any, **__: Any) -> None:
        """Nothing: there is no worker process to start."""

    def schedule_async_request(self, async_request: Any) -> int:
        """Stages a request and starts it. Every rank schedules the same requests in the same order.

        Returns:
            Its index, which :meth:`maybe_finalize_async_calls` returns when it is done.
        """
        self.call_idx += 1
        write = write_of(async_request.async_fn)
        caller = ThreadCaller(write)
        if write is not None:
            write.start()
        elif async_request.async_fn is not None:
            caller = ThreadCaller(future=self._run(async_request))
        request = async_request._replace(async_fn_args=(), preload_fn=None, is_frozen=True, call_idx=self.call_idx)
        self.async_calls.append(_Active(self.call_idx, caller, request))
        return self.call_idx

    def _run(self, request: Any) -> concurrent.futures.Future[Any]:
        args = list(request.async_fn_args)
        if request.preload_fn is not None:
            args[1] = request.preload_fn()
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "ckpt-calls")
        return self._thread.submit(request.async_fn, *args, **(request.async_fn_kwargs or {}))

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalises, in order, the requests that are done on all ranks. Collective unless ``no_dist``.

        Args:
            blocking: wait until all are done.

        Returns:
            Indices of the finalised requests, the same on all ranks.

        Raises:
            CheckpointException: a save failed on some rank; on every rank. The request is gone, the queue can be used on.
            CheckpointError: the ranks have scheduled different requests, or one of somebody else has raised.
        """
        finalized = []
        while self.async_calls and self.async_calls[0].async_caller.is_current_async_call_done(blocking, no_dist):
            active = self.async_calls.popleft()
            if not no_dist and _all_reduced(active.idx, dist.ReduceOp.MAX) != active.idx:
                raise CheckpointError(
                    f"the ranks finalise different requests; this one has number {active.idx}", phase="commit"
                )
            for function in active.async_request.finalize_fns:
                function()
            if active.async_caller.future is not None and (error := active.async_caller.future.exception()) is not None:
                raise CheckpointError(
                    f"an async request failed: {type(error).__name__}: {error}", phase="write"
                ) from error
            finalized.append(active.idx)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Requests that are not finalised yet."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalises everything, collectively; with ``abort``, gives everything up, alone. Idempotent; the queue can be used on."""
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)
        for active in self.async_calls:
            active.async_caller.close(abort=abort)
        self.async_calls.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=not abort, cancel_futures=abort)
            self._thread = None
