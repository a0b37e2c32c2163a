"""What Megatron hands a save strategy, taken apart: chunks of tensors and pickled objects, without any planner of Megatron's.

A sharded state dict is a nest of mcore's ``ShardedTensor`` and ``ShardedObject``. A rank writes those of which it is the main
replica. Names, offsets and shapes are those that stock's strategy would put into ``.metadata``:

* a ``ShardedTensor`` is a chunk of the global tensor ``key``; ``prepend_axis_num`` axes of length 1 are put in front;
* one with a ``flattened_range`` (distributed optimizers before 0.16) is a chunk of a tensor of another shape: a grid of the
  local tensors, and their elements in a row. Loaders before 0.16 find the shape it came from in ``mcore_data``;
* ``ShardedObject`` s with the same ``unique_key`` are one pickled list.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ckpt_engine.coverage import Chunk
from ckpt_engine.errors import StateError
from ckpt_engine.spool import Pickled
from ckpt_engine.state import storage_problem
from ckpt_engine.values import pickle_value


@dataclasses.dataclass(eq=False)
class Content:
    """What this rank writes in one save.

    Attributes:
        chunks: tensors that are shape, dtype and bytes; ``tensors`` are parallel to them.
        odd: tensors of other kinds (quantized, sparse, of a subclass), which are pickled as stock does it.
        objects: unique keys of the objects.
        values: pickled: those of ``objects``, then those of ``odd``.
        originals: by key, the global shape of tensors that are saved flattened.
    """

    chunks: list[Chunk]
    tensors: list[torch.Tensor]
    odd: list[Chunk]
    objects: list[str]
    values: list[Pickled]
    originals: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, sharded_state_dict: Any, directory: str | None = None) -> Content:
        """Takes a state dict apart. Objects are pickled here, tensors stay where they are.

        Args:
            directory: where large objects may wait to be written.

        Raises:
            StateError: something can't be saved; names it.
        """
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

        found = cls([], [], [], [], [], {})
        objects: dict[str, list[Any]] = {}
        strange: list[torch.Tensor] = []
        for path, leaf in _leaves(sharded_state_dict, ()):
            if isinstance(leaf, ShardedTensor):
                if leaf.replica_id == 0 or is_main_replica(leaf.replica_id):
                    found._add(leaf, strange)
            elif isinstance(leaf, ShardedObject):
                if is_main_replica(leaf.replica_id):
                    objects.setdefault(leaf.unique_key, []).append(leaf.data)
            else:
                name = ".".join(map(str, path))
                raise StateError(
                    f"{name!r} is a {type(leaf).__name__}, expected a ShardedTensor or ShardedObject",
                    key=name,
                    phase="plan",
                    hint="save through megatron.core.dist_checkpointing.save, which applies factories and sorts out the rest",
                )
        found.objects = list(objects)
        found.values = [pickle_value(key, data, directory) for key, data in objects.items()]
        found.values += [_pickled(tensor) for tensor in strange]
        return found

    def _add(self, shard: Any, strange: list[torch.Tensor]) -> None:
        key, tensor, sizes = shard.key, shard.data, shard.local_shape
        if not isinstance(tensor, torch.Tensor):
            raise StateError(f"{key!r} has no data on this rank", key=key, phase="plan")
        if shard.flattened_range is not None:
            chunk = _flattened(shard)
            self.originals[key] = tuple(shard.global_shape)
        else:
            if tensor.shape != sizes and tensor.numel() != math.prod(sizes):
                raise StateError(
                    f"{key!r}: the tensor has the shape {tuple(tensor.shape)}, its description says {tuple(sizes)}",
                    key=key,
                    phase="plan",
                )
            sizes = (1,) * shard.prepend_axis_num + tuple(sizes)
            chunk = Chunk(key, tuple(shard.global_offset), sizes, tuple(shard.global_shape), tensor.dtype)
        if _is_plain(tensor):
            # Off-loaded weights have a storage that was given back: reading it would end the process.
            if (problem := storage_problem(tensor)) is not None:
                raise StateError(
                    f"{key!r} is {problem}; it can't be saved",
                    key=key,
                    phase="plan",
                    hint="put its data back before saving",
                )
            self.chunks.append(chunk)
            self.tensors.append(tensor.detach())
        else:
            self.odd.append(chunk)
            strange.append(tensor)


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        yield path, value
        return
    for key, part in parts:
        if isinstance(part, (dict, list, tuple, Mapping)):
            yield from _leaves(part, (*path, key))
        else:
            yield (*path, key), part


def _flattened(shard: Any) -> Chunk:
    grid = tuple(shard.local_chunk_offset_in_global())
    start, stop = shard.flattened_range.start, shard.flattened_range.stop
    return Chunk(
        shard.key,
        (*grid, start),
        (1,) * len(grid) + (stop - start,),
        (*shard.axis_fragmentations, math.prod(shard.local_shape)),
        shard.data.dtype,
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a record of shape, dtype and raw bytes is all there is to this tensor."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _pickled(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu(), buffer)
    return buffer.getvalue()
