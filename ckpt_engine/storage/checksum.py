"""CRC-32 with the polynomial of zlib and zip, from the fastest library that is installed.

Holds :func:`crc32`, :func:`crc32_combine` and :data:`BACKEND`, the name of the library that computes them: ``isal``,
else ``zlib_ng``, else the standard library's ``zlib``. All give the same numbers. Promises: large input is read outside
the GIL; the sum of two parts put together can be had from the sums of the parts, without their bytes, whichever library
is in use. It is a guard against accidents, not against people: who can change the bytes can change the sum.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Crc = Callable[["Buffer", int], int]
_Combine = Callable[[int, int, int], int]

#: Name of the backend and module that it lives in, fastest first. The last one is always there.
_MODULES = {"isal": "isal.isal_zlib", "zlib_ng": "zlib_ng.zlib_ng", "zlib": "zlib"}

_MASK = 0xFFFFFFFF

#: CRC-32's polynomial without its x^32, bit-reversed like all words here: the top bit is the coefficient of x^0.
_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials over GF(2), modulo CRC-32's."""
    product = 0
    for place in range(31, -1, -1):
        if a >> place & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=4096)  # lengths repeat from save to save, and from layer to layer
def _shift(length: int) -> int:
    """x to the power of 8 * length: what ``length`` more bytes multiply a sum by."""
    result, factor = _ONE, _ONE >> 8  # x^0 and x^8: one byte
    while length:
        if length & 1:
            result = _multiply(result, factor)
        factor = _multiply(factor, factor)
        length >>= 1
    return result


def _combine(crc1: int, crc2: int, len2: int) -> int:
    """:func:`crc32_combine` for libraries that have none."""
    return _multiply(_shift(len2), crc1) ^ crc2


def _load(name: str) -> tuple[_Crc, _Combine]:
    """The two functions of a backend. ImportError if it isn't installed."""
    module = importlib.import_module(_MODULES[name])
    # Old isal and every stdlib zlib before Python 3.15 can't combine.
    return module.crc32, getattr(module, "crc32_combine", _combine)


def _choose() -> tuple[str, _Crc, _Combine]:
    for name in _MODULES:
        try:
            return name, *_load(name)
        except ImportError:  # also a wheel whose shared object doesn't load on this machine
            continue
    raise ImportError("no module with a CRC-32, not even zlib: this Python was built without it")


BACKEND, _crc, _combine_fast = _choose()


def crc32(data: Buffer, value: int = 0) -> int:
    """CRC-32 of any contiguous buffer, carried on from ``value``, the sum of what came before it."""
    return _crc(data, value)


def crc32_combine(crc1: int, crc2: int, len2: int) -> int:
    """CRC-32 of two parts put together, from the sum of each and the length in bytes of the second."""
    if len2 < 0:  # zlib-ng loops for ever on a negative length
        raise ValueError(f"length of the second part is {len2}, expected 0 or more")
    return _combine_fast(crc1 & _MASK, crc2 & _MASK, len2)
