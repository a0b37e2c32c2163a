"""The ways to save with megatron-core, as :mod:`benchmarks.megatron` sees them: processes that it starts and tells what to do.

:func:`share` puts a state into shared memory once for all of them; a :class:`MegatronPeer` is one way to save, with a process
(:mod:`benchmarks.megatron_worker`) per rank. Every wait has a limit, and closing a peer ends all that it has started.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import psutil
import torch

from benchmarks.megatron_report import PeerName
from benchmarks.megatron_worker import Order
from benchmarks.report import MIB
from benchmarks.states import State

_START_SECONDS = 120.0
_SAVE_SECONDS = 900.0
_STOP_SECONDS = 30.0


# -- the state -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shared:
    """The state in shared memory: ``parts`` says what of it belongs to which rank."""

    fd: int
    bytes: int
    size: int
    parts: list[list[tuple[str, str, list[int], int]]]


def share(state: State, ranks: int) -> Shared:
    """Copies the state there. The ranks hold different tensors, about as many bytes each: pipeline parallelism."""
    fd = os.memfd_create("state", os.MFD_CLOEXEC)
    parts: list[list[tuple[str, str, list[int], int]]] = [[] for _ in range(ranks)]
    offset = seen = 0
    for key, tensor in _named(state.tree):
        content = memoryview(cast(Any, tensor.view(-1).view(torch.uint8).numpy()))
        for at in range(0, len(content), 64 * MIB):
            part = content[at : at + 64 * MIB]
            wrote = os.pwrite(fd, part, offset + at)
            if wrote != len(part):
                raise OSError(f"{wrote} of {len(part)} bytes went into shared memory")
        parts[seen * ranks // state.bytes].append(
            (key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)
        )
        seen += len(content)
        offset += -(-len(content) // 64) * 64
    os.ftruncate(fd, offset)
    return Shared(fd, state.bytes, offset, parts)


def _named(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            yield prefix + key, value
        else:
            yield from _named(value, f"{prefix}{key}.")


# -- workers ---------------------------------------------------------------------------------------------------------


class _Worker:
    """One rank of one peer."""

    def __init__(self, order: Order, log: Path) -> None:
        self._log = log
        here, there = os.pipe()
        self._replies = os.fdopen(here, "rb", buffering=0)
        self._received = b""
        # Through -c: the manager process that stock spawns would import a __main__ with torch in it first.
        command = [sys.executable, "-c", "from benchmarks.megatron_worker import main; main()"]
        path = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(there, order.state_fd),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
                start_new_session=True,
            )
        os.close(there)
        self._orders = cast(BinaryIO, self._process.stdin)
        self.pid = self._process.pid
        os.set_blocking(here, False)
        self.tell(dataclasses.asdict(dataclasses.replace(order, reply_fd=there)))

    def tell(self, content: dict[str, Any]) -> None:
        self._orders.write(json.dumps(content).encode() + b"\n")
        self._orders.flush()

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next answer; raises what the worker raised, or what became of it."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            # Polled: a fork that outlives the worker keeps the pipe open.
            part = self._replies.read(1 << 16)
            if part:
                self._received += part
            elif self._process.poll() is not None:
                raise RuntimeError(f"the worker ended with status {self._process.returncode}: {self._tail()}")
            elif time.monotonic() > deadline:
                raise TimeoutError(f"no answer of the worker within {seconds:.0f} s: {self._tail()}")
            else:
                time.sleep(0.005)
        line, self._received = self._received.split(b"\n", 1)
        content: dict[str, Any] = json.loads(line)
        if "error" in content:
            raise RuntimeError(f"{content['error']}\n{content['traceback']}".rstrip())
        return content

    def close(self) -> None:
        """Stops it and whatever it has started."""
        try:
            self.tell({"do": "stop"})
            self._process.wait(_STOP_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            pass
        try:
            os.killpg(self.pid, signal.SIGKILL)  # its own session: nobody else is in it
        except ProcessLookupError:
            pass
        self._process.wait()
        self._replies.close()
        try:
            self._orders.close()
        except BrokenPipeError:
            pass  # what was still to be told

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-600:]


class MegatronPeer:
    """One way to save: its workers, and the directory that they write to."""

    def __init__(self, name: PeerName, folder: str, shared: Shared, root: str) -> None:
        self.name = name
        self.root = root
        os.makedirs(os.path.join(root, "saves"))
        self._workers: list[_Worker] = []
        self._before = 0
        try:
            for rank, tensors in enumerate(shared.parts):
                order = Order(
                    folder=folder,
                    asynchronous=name.asynchronous,
                    rank=rank,
                    ranks=len(shared.parts),
                    rendezvous=os.path.abspath(os.path.join(root, "rendezvous")),
                    state_fd=shared.fd,
                    state_bytes=shared.size,
                    tensors=tensors,
                    reply_fd=-1,
                )
                self._workers.append(_Worker(order, Path(root) / f"worker-{rank}.log"))
        except BaseException:
            self.close()
            raise

    def wait_until_started(self) -> None:
        for worker in self._workers:
            version = worker.receive(_START_SECONDS)["version"]
            if version != self.name.version:
                raise RuntimeError(f"the worker imported megatron-core {version}, expected {self.name.version}")

    def prepare(self, budget: int | None) -> None:
        """Installs the engine, if this is its peer. All peers have started: what processes share is shared by as many."""
        self._before = self.memory()
        if self.name.engine:
            self._all({"do": "install", "budget": budget}, _START_SECONDS)

    def save(self, step: int) -> list[dict[str, Any]]:
        path = os.path.abspath(os.path.join(self.root, "saves", f"step_{step}"))
        return self._all({"do": "save", "path": path, "step": step}, _SAVE_SECONDS)

    def peak_memory(self, step: int) -> int:
        """Saves; the highest that was seen, above that before any save."""
        peak, stop = [0], threading.Event()

        def watch() -> None:
            while not stop.wait(0.01):
                peak[0] = max(peak[0], self.memory())

        thread = threading.Thread(target=watch, name="memory", daemon=True)
        thread.start()
        try:
            self.save(step)
        finally:
            stop.set()
            thread.join()
        return max(0, peak[0] - self._before)

    def memory(self) -> int:
        """Proportional set size of the workers and all that they have started, without shared memory (the state)."""
        return sum(_private(pid) for worker in self._workers for pid in _tree(worker.pid))

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _all(self, content: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        for worker in self._workers:
            worker.tell(content)
        return [worker.receive(seconds) for worker in self._workers]


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _private(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file if line.startswith("Pss"))
    except (OSError, ValueError):
        return 0  # it has ended
    return 1024 * sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_File") if name in fields)
