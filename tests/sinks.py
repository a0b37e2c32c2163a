"""Ways to hold up or break the writing of an engine, from outside: patched system calls."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest


class Gate:
    """Holds every ``pwrite`` to a shard file until it is opened."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.entered = threading.Event()

    def open(self) -> None:
        self.event.set()


def shard_descriptor(fd: int) -> bool:
    return ".distcp" in os.readlink(f"/proc/self/fd/{fd}")


@contextlib.contextmanager
def blocked_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """No byte of a shard file is written before ``gate.open()``; the gate opens at the end in any case."""
    gate = Gate()
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if shard_descriptor(fd):
            gate.entered.set()
            if not gate.event.wait(60):
                raise TimeoutError("the test never opened the gate")
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        try:
            yield gate
        finally:
            gate.open()


@contextlib.contextmanager
def failing_writes(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException], *, after: int = 0
) -> Iterator[None]:
    """``pwrite`` to shard files raises, from call number ``after`` on."""
    real = os.pwrite
    calls = [0]

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if shard_descriptor(fd):
            calls[0] += 1
            if calls[0] > after:
                raise error()
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        yield
