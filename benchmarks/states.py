"""The states that are saved: three shapes of trouble, filled with bytes that don't compress.

``gpt``     a transformer in training: bf16 weights, fp32 master weights, Adam's two moments; large and small tensors.
``small``   20,000 tensors of about 13 KB: what costs is the work per item, not the bytes.
``single``  one large tensor: nothing to spread over the writers but the tensor itself.

The sizes are met to within a percent or two; :attr:`State.bytes` is the exact sum. Nothing here is trained or loaded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

GIB = 1 << 30

#: Bytes per parameter of mixed-precision Adam: bf16 weight, fp32 master copy, two fp32 moments.
_BYTES_PER_PARAMETER = 2 + 4 + 4 + 4

#: Random bytes that every tensor is filled from. A length that is no multiple of a page keeps equal pages rare, so that
#: neither a deduplicating disk nor one that skips zeros looks faster than it is.
_TILE_BYTES = (8 << 20) + 1031


@dataclasses.dataclass(frozen=True)
class State:
    """A state to save: ``tree`` as a trainer would hand it over, and what is in it."""

    case: str
    tree: dict[str, Any]
    bytes: int
    items: int

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors, in the order of the tree."""
        return _walk(self.tree)


def make_state(case: str, size: int, *, small_count: int = 20_000) -> State:
    """Makes the state of ``case`` with about ``size`` bytes.

    Args:
        case: ``gpt``, ``small`` or ``single``.
        size: bytes wanted.
        small_count: number of tensors of the case ``small``.
    """
    if case == "gpt":
        tree = _gpt(size)
    elif case == "small":
        length = max(1, size // small_count // 4)
        tree = {"model": {f"block.{i // 100}.item.{i % 100}": torch.empty(length) for i in range(small_count)}}
    elif case == "single":
        tree = {"model": {"weight": torch.empty(max(1, size // 4))}}
    else:
        raise ValueError(f"case is {case!r}, expected gpt, small or single")
    tensors = list(_walk(tree))
    _fill(tensors)
    return State(case, tree, sum(tensor.nbytes for tensor in tensors), len(tensors))


def _gpt(size: int) -> dict[str, Any]:
    budget = size // _BYTES_PER_PARAMETER
    # A width that gives about a dozen layers; the embedding takes what the layers leave.
    hidden = min(4096, max(16, 1 << round(math.log2(max(1.0, math.sqrt(budget / (12 * 13)))))))
    layer = {
        "input_layernorm.weight": (hidden,),
        "input_layernorm.bias": (hidden,),
        "self_attention.linear_qkv.weight": (3 * hidden, hidden),
        "self_attention.linear_qkv.bias": (3 * hidden,),
        "self_attention.linear_proj.weight": (hidden, hidden),
        "self_attention.linear_proj.bias": (hidden,),
        "pre_mlp_layernorm.weight": (hidden,),
        "pre_mlp_layernorm.bias": (hidden,),
        "mlp.linear_fc1.weight": (4 * hidden, hidden),
        "mlp.linear_fc1.bias": (4 * hidden,),
        "mlp.linear_fc2.weight": (hidden, 4 * hidden),
        "mlp.linear_fc2.bias": (hidden,),
    }
    per_layer = sum(math.prod(shape) for shape in layer.values())
    layers = max(1, int(0.9 * budget) // per_layer)
    rows = max(1, (budget - layers * per_layer) // hidden)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (rows, hidden)}
    for number in range(layers):
        shapes.update({f"decoder.layers.{number}.{name}": shape for name, shape in layer.items()})

    def group(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}

    return {
        "model": group(torch.bfloat16),
        "optimizer": {
            "fp32_param": group(torch.float32),
            "exp_avg": group(torch.float32),
            "exp_avg_sq": group(torch.float32),
        },
    }


def _walk(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _walk(value)


def _fill(tensors: list[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(20_240)
    tile = torch.randint(0, 256, (_TILE_BYTES,), dtype=torch.uint8, generator=generator)
    at = 0
    for tensor in tensors:
        flat = tensor.view(-1).view(torch.uint8)
        done = 0
        while done < flat.numel():
            part = min(flat.numel() - done, _TILE_BYTES - at)
            flat[done : done + part].copy_(tile[at : at + part])
            done += part
            at = (at + part) % _TILE_BYTES
