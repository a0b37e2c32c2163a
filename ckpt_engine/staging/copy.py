"""Copies of tensor bytes into staging memory, by address where that is possible.

A *source* is a tensor together with where its payload lies in a file. For contiguous CPU tensors the copy is one
``memmove``: large ones through a call that releases the GIL, small ones through one that keeps it, because giving the GIL
up and getting it back costs more than copying a few kilobytes. All other tensors (strided, conjugated, on a device) go
through torch's own ``copy_``.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import torch

_libc = ctypes.CDLL(None)
_move_free = _libc.memmove  # releases the GIL
_move_free.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_free.restype = ctypes.c_void_p
_move_held = ctypes.PyDLL(None).memmove  # keeps the GIL
_move_held.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_held.restype = ctypes.c_void_p

#: Up to this size a copy keeps the GIL: 64 KiB take 10 us, about what two switches of the GIL cost.
_HELD_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """The tensors of one file, in file order, prepared for copying.

    Attributes:
        tensors: the tensors; they keep the memory alive until the copies are done.
        addresses: their data pointers, or 0 where ``copy_`` has to be used.
    """

    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Sources:
        return cls(tensors, [address_of(t) for t in tensors])


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor whose bytes in memory are its elements in order, else 0."""
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.data_ptr()
    return 0


def copy_part(
    tensor: torch.Tensor,
    address: int,
    start: int,
    stop: int,
    target_address: int,
    target: torch.Tensor,
    target_start: int,
) -> None:
    """Copies payload bytes ``[start, stop)`` of ``tensor`` to ``target_start`` of an extent.

    Args:
        tensor: source; ``start`` and ``stop`` count bytes of its elements in C order and fall on element borders.
        address: from :func:`address_of`.
        start, stop: part of the payload.
        target_address: address of the extent.
        target: uint8 tensor over the same extent.
        target_start: byte position in the extent, a multiple of the element size.
    """
    size = stop - start
    if address:
        (_move_held if size <= _HELD_BYTES else _move_free)(target_address + target_start, address + start, size)
        return
    width = tensor.element_size()
    flat = target[target_start : target_start + size].view(tensor.dtype)
    copy_range(tensor, start // width, stop // width, flat)


def copy_range(source: torch.Tensor, start: int, stop: int, flat: torch.Tensor) -> None:
    """Copies elements ``[start, stop)`` of ``source``, counted in C order, to the 1-D ``flat`` without a temporary of their size.

    Whole rows of the first dimension go in one ``copy_``; the parts of rows at both ends are split further.
    """
    if source.dim() == 0:
        flat.copy_(source.reshape(1))
        return
    row = source[0].numel() if source.dim() > 1 else 1
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        copy_range(source[last], start - last * row, stop - last * row, flat)
        return
    head = first * row - start
    if head:
        copy_range(source[first - 1], row - head, row, flat[:head])
    body = (last - first) * row
    if body:
        flat[head : head + body].view(last - first, *source.shape[1:]).copy_(source[first:last])
    if head + body < stop - start:
        copy_range(source[last], 0, stop - last * row, flat[head + body :])
