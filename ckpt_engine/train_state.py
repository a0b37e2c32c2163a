"""The progress counters of a training run, frozen together with the weights they belong to.

On disk (``train_state.pt``) this is a ``torch.save`` of eight 0-d CPU tensors, the schema of Megatron-Bridge's ``TrainState``:

===================================== ========
``step``                              int64
``consumed_train_samples``            int64
``skipped_train_samples``             int64
``consumed_valid_samples``            int64
``floating_point_operations_so_far``  float64
``do_train``, ``do_valid``, ``do_test`` bool
===================================== ========

Bridge itself rewrites the FLOPs as float32 when it saves; both are read.
"""

from __future__ import annotations

import dataclasses
import io
import operator
from collections.abc import Mapping
from typing import Any

import torch

from ckpt_engine.errors import ConfigError, CorruptionError

_COUNTERS = ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_FLOPS = "floating_point_operations_so_far"
_FLAGS = ("do_train", "do_valid", "do_test")

#: Where Megatron-LM keeps the same numbers in its ``args`` namespace (and, for ``iteration`` and the FLOPs, in the state dict).
_LEGACY = {
    "step": "iteration",
    "consumed_train_samples": "consumed_train_samples",
    "skipped_train_samples": "skipped_train_samples",
    "consumed_valid_samples": "consumed_valid_samples",
    _FLOPS: "num_floating_point_operations_so_far",
    "do_train": "do_train",
    "do_valid": "do_valid",
    "do_test": "do_test",
}


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Immutable progress of a run. Numbers given as tensors or numpy scalars are converted to Python's at construction."""

    step: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    floating_point_operations_so_far: float = 0.0
    do_train: bool = False
    do_valid: bool = False
    do_test: bool = False

    def __post_init__(self) -> None:
        # A 0-d tensor kept by reference would go on counting after the save: every field becomes a Python number here.
        for name in _COUNTERS:
            value = getattr(self, name)
            try:
                number = int(value.item()) if isinstance(value, torch.Tensor) else operator.index(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ConfigError(f"TrainState.{name} is {value!r}, expected a whole number", phase="config") from error
            if not 0 <= number < 2**63:
                raise ConfigError(f"TrainState.{name} is {number}, expected 0 to 2**63 - 1", phase="config")
            object.__setattr__(self, name, number)
        try:
            object.__setattr__(self, _FLOPS, float(getattr(self, _FLOPS)))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"TrainState.{_FLOPS} is {getattr(self, _FLOPS)!r}, expected a number", phase="config"
            ) from error
        for name in _FLAGS:
            object.__setattr__(self, name, bool(getattr(self, name)))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The eight fields as new 0-d CPU tensors, with the dtypes of the module's table."""
        values: dict[str, torch.Tensor] = {n: torch.tensor(getattr(self, n), dtype=torch.int64) for n in _COUNTERS}
        values[_FLOPS] = torch.tensor(getattr(self, _FLOPS), dtype=torch.float64)
        values.update({n: torch.tensor(getattr(self, n), dtype=torch.bool) for n in _FLAGS})
        return values

    @classmethod
    def from_state_dict(cls, values: Mapping[str, Any]) -> TrainState:
        """Reads the schema above; every field has to be there (KeyError names the one that isn't)."""
        return cls(**{f.name: values[f.name].item() for f in dataclasses.fields(cls)})

    def to_bytes(self) -> bytes:
        """Content of ``train_state.pt``."""
        buffer = io.BytesIO()
        torch.save(self.state_dict(), buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, *, path: str = "train_state.pt") -> TrainState:
        """Reads the content of ``train_state.pt``.

        Raises:
            CorruptionError: the bytes aren't a saved TrainState.
        """
        try:
            return cls.from_state_dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        except Exception as error:  # torch.load raises half a dozen unrelated types for damaged input
            raise CorruptionError(
                f"not a train state: {type(error).__name__}: {error}", path=path, file=path, phase="restore"
            ) from error

    @classmethod
    def from_args(cls, args: Any, **overrides: Any) -> TrainState:
        """From a Megatron-LM ``args`` namespace (or a mapping) with the legacy field names; absent ones are zero.

        Args:
            args: has ``iteration``, ``consumed_train_samples``, ``skipped_train_samples``, ``consumed_valid_samples``,
                ``num_floating_point_operations_so_far``, ``do_train``, ``do_valid``, ``do_test``, or some of them.
            overrides: fields of TrainState that win over ``args``.
        """
        get = args.get if isinstance(args, Mapping) else lambda name, default=None: getattr(args, name, default)
        found = {field: get(legacy, None) for field, legacy in _LEGACY.items()}
        return cls(**{**{k: v for k, v in found.items() if v is not None}, **overrides})

    def apply_to_args(self, args: Any) -> None:
        """Mirrors the fields back to a Megatron-LM ``args`` namespace (or a mutable mapping), under the legacy names."""
        for field, legacy in _LEGACY.items():
            if isinstance(args, dict):
                args[legacy] = getattr(self, field)
            else:
                setattr(args, legacy, getattr(self, field))
