"""Async requests of ours on Megatron's (or NVRx's) own queue.

A request whose ``async_fn`` is a :class:`ThreadedWrite`, or that has nothing to do, is staged on the caller's thread and put
into the queue with a caller object that knows the write's state. The queue then does what it always does: one int32
``all_reduce`` per poll on the default group, and the finalize functions once all ranks are done. All other requests (local
checkpoints, say) go stock's way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ckpt_engine.integrations.megatron.verdict import Checked, settle
from ckpt_engine.integrations.megatron.write import ThreadedWrite, write_of


class ThreadCaller:
    """What a queue asks whether a request is done. Has the methods of stock's ``AsyncCaller``."""

    def __init__(self, write: ThreadedWrite | None) -> None:
        self.write = write

    def schedule_async_call(self, async_req: Any) -> None:
        """Nothing: the write runs since it was staged."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether all ranks are done. Collective unless ``no_dist``; a blocking poll waits for this rank first."""
        if blocking and self.write is not None:
            self.write.wait()
        alive = int(self.write is not None and not self.write.done())
        return not alive if no_dist else self.sync_all_async_calls(alive)

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """The one collective of a poll, as stock has it."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        count = torch.tensor([is_alive], dtype=torch.int, device=device)
        dist.all_reduce(count)
        return bool(count.item() == 0)

    def close(self, abort: bool = False) -> None:
        """Gives the write up, if asked to."""
        if self.write is not None and abort:
            self.write.cancel("the queue was closed with abort=True")
            settle(self.write)


def schedule(queue: Any, request: Any, original: Callable[..., int]) -> int:
    """``AsyncCallsQueue.schedule_async_request``: returns once nothing reads the request's tensors any more."""
    write = write_of(request.async_fn)
    if write is None and request.async_fn is not None:
        return original(queue, request)
    module = sys.modules[_home(type(queue), "schedule_async_request").__module__]
    kind: Any = vars(module)["AsyncRequest"]
    if not isinstance(request, kind):  # built by another generation of the class: same fields, or fewer
        request = kind(**{name: value for name, value in request._asdict().items() if name in kind._fields})
    index: int = queue.call_idx + 1
    queue.call_idx = index
    if write is not None:
        args = request.async_fn_args
        write.start(args[1] if len(args) > 1 and args[1] is not None else [])
        functions = list(request.finalize_fns)
        write.checked = bool(functions)
        checked = [Checked(fn, write, last=number == len(functions)) for number, fn in enumerate(functions, 1)]
        # Without the arguments: they hold the trainer's tensors, on whatever device, until the request is finalised.
        request = request._replace(async_fn_args=(), preload_fn=None, finalize_fns=checked)
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
