"""The structure of a state: what has to be the same for a plan to be used again.

Nothing here reads tensor contents or keeps a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ckpt_engine.errors import StateError
from ckpt_engine.state import FlatState, check_tensor


def structure(flat: FlatState) -> Iterator[Any]:
    """Structure of a state on this rank, piece by piece: names, types, shapes, dtypes, placements, and which tensors are the same memory.

    Shapes and placements are in it, addresses are not: a plan never outlives a structure, and never holds on to a storage.
    It is compared as it is made (:func:`matches`): tens of thousands of tuples kept for a comparison would set off the
    garbage collector in the trainer, which costs more than the comparison.
    """
    yield frozenset(flat.int_keys)
    same = SameMemory()
    for number, (key, value) in enumerate(flat.values.items()):
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if isinstance(value, DTensor):
                local = local_of(key, value)
                yield (key, kind, value.dtype, value.shape, value.placements, value.device_mesh, local.shape)
                value = local
            else:
                check_tensor(key, value)
                yield (key, kind, value.dtype, value.shape)
            other = same.seen(number, value)
            if other is not None:
                yield (other, number)
        elif isinstance(value, ShardedTensor):
            check_shards(key, value)
            yield (key, kind, value.dtype, value.size(), repr(value.metadata().shards_metadata))
        else:
            yield (key, None)
    yield flat.paths
    yield flat.empties


def local_of(key: str, value: DTensor) -> torch.Tensor:
    """This rank's shard, detached.

    Raises:
        StateError: it isn't a part of the value (a pending reduction), or it can't be saved exactly.
    """
    for placement in value.placements:
        if placement.is_partial():
            raise StateError(
                f"{key!r} is a DTensor with the placement {placement}: no rank has its value before it is reduced",
                key=key,
                phase="plan",
                hint="redistribute() it to Replicate() or Shard() first",
            )
    local = value.to_local().detach()
    check_tensor(key, local)
    return local


def check_shards(key: str, value: ShardedTensor) -> None:
    for shard in value.local_shards():
        check_tensor(key, shard.tensor)


def matches(known: Sequence[Any], flat: FlatState) -> bool:
    """Whether ``known`` is the structure of ``flat``. Looks at every tensor of ``flat`` that can be compared, mismatch or not."""
    equal, count = True, 0
    for piece, other in zip(structure(flat), itertools.chain(known, itertools.repeat(None)), strict=False):
        equal = equal and piece == other
        count += 1
    return equal and count == len(known)


class SameMemory:
    """Finds tensors that show exactly the same bytes as an earlier one (tied weights)."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def seen(self, number: int, tensor: torch.Tensor) -> int | None:
        """The number of the earlier tensor, or ``None``; ``tensor`` is remembered as ``number``."""
        address = tensor.data_ptr()
        if address == 0 or tensor.numel() == 0:
            return None
        other = self._first.setdefault(address, number)
        if other == number:
            self._tensors[address] = tensor
            return None
        return other if _view_of(self._tensors[address]) == _view_of(tensor) else None


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
