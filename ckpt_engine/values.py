"""Values that aren't tensors: the record of one, and a digest that tells whether two ranks have the same.

A record is what stock DCP writes, ``torch.save`` of the object, except that a tensor inside of it (in a tuple, in an object)
takes the bytes that it shows and not those of the storage that it is a view of: ten floats out of a large buffer are not a
large record. Tensors that show the same memory are one tensor in the record, too; ones that overlap otherwise are copied.

The digest doesn't depend on identities, hash seeds or strides for plain values: numbers, strings, tensors, and lists,
tuples, dicts and sets of them. Of anything else it takes the pickle.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import pickle
import types
from typing import Any

import torch

from ckpt_engine.errors import StateError
from ckpt_engine.spool import Pickled, Spool
from ckpt_engine.state import storage_problem

#: Records of small constants (hyper-parameters in param_groups): torch.save takes 140 us for each, every time.
_PICKLED: dict[Any, bytes] = {}

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


class _CompactPickler(pickle.Pickler):
    """A pickler that replaces tensors whose storage is larger than they are by copies of what they show."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._copies: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not _has_strides(obj) or obj._backward_hooks:
            return NotImplemented
        problem = storage_problem(obj)
        if problem is not None:
            raise ValueError(f"it holds {problem}")
        if obj.untyped_storage().nbytes() <= obj.numel() * obj.element_size():
            return NotImplemented
        view = (obj.device, obj.data_ptr(), obj.dtype, obj.shape, obj.stride(), obj.is_conj(), obj.is_neg())
        if view not in self._copies:
            self._copies[view] = obj.detach().clone(), obj  # while it lives nothing else gets its address
        small = self._copies[view][0].detach().requires_grad_(obj.requires_grad)
        small.__dict__.update(obj.__dict__)
        return small.__reduce_ex__(2)  # type: ignore[no-untyped-call]


#: What ``torch.save`` takes for the pickle module.
_COMPACT = types.SimpleNamespace(__name__="pickle", Pickler=_CompactPickler)


def _has_strides(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized and not tensor.is_meta


def pickle_value(key: str, value: Any, directory: str | None = None) -> Pickled:
    """The record of a non-tensor value, as stock DCP writes it (``torch.save`` of the object).

    Args:
        directory: where large ones may wait to be written (:mod:`ckpt_engine.spool`).

    Raises:
        StateError: it can't be pickled; names the key.
    """
    small = type(value) in (bool, int, float, str, type(None))
    token = (type(value), repr(value)) if small else None
    if token in _PICKLED:
        return _PICKLED[token]
    spool = Spool(directory)
    try:
        torch.save(value, spool, pickle_module=_COMPACT)  # type: ignore[arg-type]
        data = spool.take()
    except Exception as error:  # a __reduce__ may raise anything
        raise StateError(
            f"{key!r} ({type(value).__name__}) can't be pickled: {type(error).__name__}: {error}",
            key=key,
            phase="plan",
            hint="leave it out of the state, or give it state_dict() and load_state_dict()",
        ) from error
    finally:
        spool.close()
    if token is not None and isinstance(data, bytes) and len(data) < 4096:
        if len(_PICKLED) >= 512:
            _PICKLED.clear()
        _PICKLED[token] = data
    return data


def value_digest(value: Any, pickled: Pickled) -> str:
    """Digest that is equal for equal plain values even where their pickles aren't (pickle depends on object identity)."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        _visit(digest, value, pickled)
    except Exception:  # it contains itself, or a part can't be pickled alone; the whole could be
        digest = hashlib.blake2b(pickled, digest_size=8)
    return digest.hexdigest()


def _visit(digest: Any, item: Any, pickled: Pickled | None = None) -> None:
    kind = type(item)
    digest.update(kind.__qualname__.encode())
    if kind in _PLAIN:
        digest.update(repr(item).encode())
    elif kind in (list, tuple) or (isinstance(item, tuple) and hasattr(item, "_fields")):
        digest.update(str(len(item)).encode())
        for part in item:
            _visit(digest, part)
    elif kind is dict:
        digest.update(str(len(item)).encode())
        for key, part in item.items():
            _visit(digest, key)
            _visit(digest, part)
    elif kind in (set, frozenset):
        parts = []
        for part in item:
            own = hashlib.blake2b(digest_size=8)
            _visit(own, part)
            parts.append(own.digest())
        digest.update(str(len(item)).encode() + b"".join(sorted(parts)))
    elif kind in (torch.Tensor, torch.nn.Parameter) and _has_strides(item):
        digest.update(f"{item.dtype}{tuple(item.shape)}".encode())
        flat = item.detach().cpu().resolve_conj().resolve_neg().contiguous()
        size = flat.numel() * flat.element_size()
        if size:
            digest.update((ctypes.c_char * size).from_address(flat.data_ptr()))
    elif pickled is not None:
        digest.update(pickled)
    else:
        buffer = io.BytesIO()
        _CompactPickler(buffer, protocol=2).dump(item)
        digest.update(buffer.getvalue())
