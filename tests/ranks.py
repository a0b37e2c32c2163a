"""Runs a function on several real ranks: one process each, ``torch.distributed`` over gloo and a loopback TCP store.

    def work(rank: int, world_size: int, path: str) -> str: ...       # at the top level of a test module

    assert run_ranks(2, work, str(tmp_path)) == ["...", "..."]

Promises: results come in rank order; the first exception of a rank is raised here, with its traceback and rank; no
process outlives the call, be it by success, failure, timeout or interrupt; no port is guessed (the listening socket is
inherited), so runs side by side can't collide. Rank 0 hosts the store, as in a job started without an agent, and leaves
last.

It does not capture output: the ranks write to the caller's stdout and stderr.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

#: Once a rank has failed, the others have this long to say what they saw; they may be waiting for it in a collective.
_GRACE_SECONDS = 3.0

#: A rank that has handed over its result has this long to run its exit handlers.
_EXIT_SECONDS = 15.0


class RankError(RuntimeError):
    """A rank died, ran out of time, or raised something that can't be brought here."""


class RankTraceback(Exception):
    """Cause of an exception that was raised on a rank: where, and the text of its traceback."""


@dataclasses.dataclass(frozen=True)
class Died:
    """Takes the place of the result of a rank that was expected to die. ``returncode`` is ``-9`` after SIGKILL."""

    returncode: int


@dataclasses.dataclass(frozen=True)
class _Job:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    port: int
    listen_fd: int
    directory: str
    timeout: float
    init: bool


@dataclasses.dataclass(frozen=True)
class _Failure:
    error: BaseException
    text: str


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    dies: Collection[int] = (),
    init: bool = True,
) -> list[Any]:
    """Calls ``fn(rank, n, *args)`` on ``n`` ranks.

    Args:
        fn: a function at the top level of an importable module; ``args`` and results have to pickle.
        timeout: seconds for all of it, the import of torch (about 2) included.
        dies: ranks that have to die without a result, such as one that kills itself; :class:`Died` is theirs.
        init: ``False`` leaves ``torch.distributed`` alone; RANK, WORLD_SIZE, MASTER_ADDR and so on are set either way.

    Raises:
        RankError: a rank died that shouldn't, or lived that shouldn't; or the time is over (with everybody's stacks).
        BaseException: the first exception that a rank raised, caused by a :class:`RankTraceback`.
    """
    deadline = time.monotonic() + timeout
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        try:
            for rank in range(n):
                listen_fd = listener.fileno() if rank == 0 else -1
                job = _Job(fn, args, rank, n, listener.getsockname()[1], listen_fd, directory, timeout, init)
                children.append(_start(job))
            listener.close()  # only rank 0 has it now, so that a dead store refuses connections
            results = _collect(children, directory, deadline, frozenset(dies))
            _let_go(children)
            return results
        finally:
            for child in children:
                _end(child)


def _start(job: _Job) -> subprocess.Popen[bytes]:
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(os.path.abspath(entry or ".") for entry in sys.path),
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    command = [sys.executable, "-c", "import tests.ranks; tests.ranks._be_a_rank()"]
    passed = (job.listen_fd,) if job.listen_fd >= 0 else ()
    payload = pickle.dumps(job)
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=passed)
    try:
        if child.stdin is None:
            raise RankError("the rank has no stdin")
        child.stdin.write(payload)  # stdin stays open: its end tells the rank to leave
        child.stdin.flush()
    except BrokenPipeError:
        pass  # dead already; _collect reports it
    except BaseException:
        _end(child)
        raise
    return child


def _collect(
    children: list[subprocess.Popen[bytes]], directory: str, deadline: float, dies: frozenset[int]
) -> list[Any]:
    results: dict[int, Any] = {}
    failure: tuple[int, BaseException, BaseException | None] | None = None
    pause = 0.005
    while len(results) < len(children):
        for rank, child in enumerate(children):
            if rank in results:
                continue
            returncode = child.poll()  # before looking for the file: a result written just before the end counts
            path = _result_path(directory, rank)
            if os.path.exists(path):
                with open(path, "rb") as file:
                    results[rank] = pickle.load(file)
            elif returncode is not None:
                results[rank] = Died(returncode)
            else:
                continue
            wrong = _judge(rank, results[rank], rank in dies)
            if wrong is not None and failure is None:
                failure = (rank, *wrong)
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if len(results) < len(children):
            if time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(pause * 1.2, 0.05)
    if failure is not None:
        raise failure[1] from failure[2]
    if len(results) < len(children):
        late = [rank for rank in range(len(children)) if rank not in results]
        raise RankError(f"no result in time from ranks {late}; their stacks:\n{_stacks(children, directory, late)}")
    return [results[rank] for rank in range(len(children))]


def _judge(rank: int, result: Any, may_die: bool) -> tuple[BaseException, BaseException | None] | None:
    """What is wrong with the outcome of a rank: an error and its cause."""
    if isinstance(result, _Failure):
        return result.error, RankTraceback(f"on rank {rank}:\n{result.text}")
    if isinstance(result, Died) and not may_die:
        return RankError(f"rank {rank} ended with status {result.returncode} before it had a result"), None
    if may_die and not isinstance(result, Died):
        return RankError(f"rank {rank} was expected to die, but returned {result!r}"), None
    return None


def _stacks(children: list[subprocess.Popen[bytes]], directory: str, ranks: list[int]) -> str:
    for rank in ranks:
        children[rank].send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    found = []
    for rank in ranks:
        try:
            with open(_stack_path(directory, rank), errors="replace") as file:
                text = file.read()
        except OSError:
            text = ""
        found.append(f"--- rank {rank} ---\n{text or '(not started yet)'}")
    return "\n".join(found)


def _let_go(children: list[subprocess.Popen[bytes]]) -> None:
    """Lets the ranks leave in an orderly way: rank 0 last, because its store serves the exit handlers of the others."""
    for group in (children[1:], children[:1]):
        for child in group:
            _close_stdin(child)
        end = time.monotonic() + _EXIT_SECONDS
        for child in group:
            rank = children.index(child)
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RankError(f"rank {rank} has returned, but its process didn't end in {_EXIT_SECONDS} s") from None


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()
    _close_stdin(child)


def _close_stdin(child: subprocess.Popen[bytes]) -> None:
    if child.stdin is not None:
        try:
            child.stdin.close()
        except BrokenPipeError:
            pass


def _result_path(directory: str, rank: int) -> str:
    return os.path.join(directory, f"result-{rank}")


def _stack_path(directory: str, rank: int) -> str:
    return os.path.join(directory, f"stacks-{rank}")


# -- in the process of the rank ----------------------------------------------------------------------------------------


def _be_a_rank() -> None:
    # A caller that is killed closes no pipe of a rank that is busy: without this the rank would live on alone.
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    outcome: Any
    job: _Job = pickle.load(sys.stdin.buffer)
    stacks = open(_stack_path(job.directory, job.rank), "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    started = False
    try:
        if job.init:
            _init_distributed(job)
            started = True
        outcome = job.fn(job.rank, job.world_size, *job.args)
        pickled = pickle.dumps(outcome)
    except BaseException as error:
        pickled = _pickle_failure(error, job.rank)
    path = _result_path(job.directory, job.rank)
    with open(path + ".new", "wb") as file:
        file.write(pickled)
    os.rename(path + ".new", path)
    sys.stdin.buffer.read()
    if started:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _init_distributed(job: _Job) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    patience = timedelta(seconds=job.timeout)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        job.port,
        job.world_size,
        job.rank == 0,
        timeout=patience,
        wait_for_workers=False,
        master_listen_fd=job.listen_fd if job.rank == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=patience)


def _pickle_failure(error: BaseException, rank: int) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        # Interrupts and exits of a rank are failures for the caller, not reasons to stop the whole test run.
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise TypeError
        pickled = pickle.dumps(_Failure(error, text))
        pickle.loads(pickled)
        return pickled
    except Exception:
        return pickle.dumps(_Failure(RankError(f"rank {rank} raised {type(error).__name__}: {error}"), text))
