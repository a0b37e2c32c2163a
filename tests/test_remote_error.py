"""Promises of errors on their way to other ranks: type, fields and traceback text arrive, frames and tensors don't."""

from __future__ import annotations

import errno
import gc
import weakref
from typing import Any

import pytest
import torch

from ckpt_engine import errors
from ckpt_engine.commit.coordinator import pack_error, unpack_error
from ckpt_engine.errors import CheckpointError, StorageError

pytestmark = pytest.mark.timeout(60)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


ALL_FIELDS: dict[str, Any] = {
    "step": 3,
    "path": "/p",
    "rank": 5,
    "phase": "write",
    "hint": "do",
    "errno": 28,
    "remote_traceback": "tb",
}
SAMPLES: list[CheckpointError] = [
    *(
        kind("broken", **ALL_FIELDS)
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, CheckpointError)
    ),
    errors.StateError("s", key="model.w", step=1),
    errors.KeyMismatchError("k", missing=("a", "b"), unexpected=("c",)),
    errors.CommitTimeoutError("c", silent_ranks=(1, 2)),
    errors.CorruptionError("c", file="f", tensor="t"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: f"{type(error).__name__}-{error.message}")
def test_errors_of_the_package_arrive_with_type_and_fields(error: CheckpointError) -> None:
    before = dict(error.__dict__)
    arrived = unpack_error(pack_error(raised(error), rank=9, step=8, phase="plan", path="/q"))
    assert type(arrived) is type(error) and error.__dict__ == before
    fill = {"rank": 9, "step": 8, "phase": "plan", "path": "/q"}
    expected = {name: fill.get(name) if value is None else value for name, value in before.items()}
    text = arrived.__dict__.pop("remote_traceback")
    assert text == "tb" if expected.pop("remote_traceback") else "in raised" in text
    assert arrived.__dict__ == expected
    again = unpack_error(pack_error(arrived, rank=1, step=1, phase="close"))
    assert (again.rank, again.message, again.step) == (arrived.rank, arrived.message, arrived.step)


class Unprintable(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("x1"), "rank 2 failed in phase write: ValueError: x1"),
        (OSError(errno.EIO, "bad disk"), "rank 2 failed in phase write: OSError: [Errno 5] bad disk"),
        (KeyboardInterrupt(), "rank 2 failed in phase write: KeyboardInterrupt"),
        (SystemExit(3), "rank 2 failed in phase write: SystemExit: 3"),
        (Unprintable(), "rank 2 failed in phase write: Unprintable: <its message can't be made>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_exception_becomes_one_that_names_rank_phase_and_type(error: BaseException, expected: str) -> None:
    """B004: a BaseException, too."""
    arrived = unpack_error(pack_error(raised(error), rank=2, step=4, phase="write", path="/p"))
    assert type(arrived) is CheckpointError and arrived.message == expected
    assert (arrived.rank, arrived.step, arrived.phase, arrived.path) == (2, 4, "write", "/p")
    assert arrived.errno == (errno.EIO if isinstance(error, OSError) else None)
    assert "in raised" in (arrived.remote_traceback or "") and "traceback of rank 2" in str(arrived)


def test_errors_carry_no_frame_tensor_or_local_class() -> None:
    class Local(StorageError):
        pass

    class Marker:
        pass

    def fail(marker: Marker) -> None:
        tensor = torch.zeros(1 << 20)
        error = Local("local", path="/p")
        error.tensor = tensor  # type: ignore[attr-defined]
        raise error from ValueError(tensor)

    marker = Marker()
    watched = weakref.ref(marker)
    packed = b""
    try:
        fail(marker)
    except Local as error:
        packed = pack_error(error, rank=0, step=1, phase="write")
    del marker
    arrived = unpack_error(packed)
    gc.collect()
    assert watched() is None, "the frame that failed is still alive"
    assert len(packed) < 100_000, f"{len(packed)} bytes"
    assert type(arrived) is StorageError and arrived.path == "/p"
    assert arrived.__traceback__ is None and arrived.__cause__ is None and arrived.__context__ is None


@pytest.mark.parametrize("packed", [b"", b"garbage", b"\x80\x04N.", b"cno_such_module\nX\n."])
def test_an_unreadable_error_is_still_an_error(packed: bytes) -> None:
    assert type(unpack_error(packed)) is CheckpointError


def test_long_texts_are_cut() -> None:
    arrived = unpack_error(pack_error(raised(ValueError("x" * 10_000_000)), rank=0, step=1, phase="write"))
    assert len(str(arrived)) < 100_000
