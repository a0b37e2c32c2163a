"""Promises of the errors: they travel between processes whole, and say whose they are."""

from __future__ import annotations

import inspect
import pickle

import pytest

import ckpt_engine.errors as errors
from ckpt_engine import CheckpointError

KINDS = [k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, CheckpointError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_pickles_with_all_its_fields(kind: type[CheckpointError]) -> None:
    error = kind("what went wrong", step=7, path="/x", rank=3, phase="write", hint="do this", errno=28)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) and repr(again) == repr(error)
    for field in ("message", "step", "path", "rank", "phase", "hint"):
        assert getattr(again, field) == getattr(error, field), field
    for part in ("what went wrong", "step 7", "rank 3", "write", "/x", "do this"):
        assert part in str(error)
    assert "CheckpointError" in repr(error) and kind.__name__ in repr(error)
