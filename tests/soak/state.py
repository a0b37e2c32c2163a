"""A state whose every byte is known at every step, with a size that changes from step to step.

It is compared with what it should hold piece by piece: a second copy would not fit where the soak runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

#: Parts of the full size, step by step. Two equal ones in a row, so that the engine's cached plan is used as well.
FRACTIONS = (1.0, 1.0, 0.55, 0.85, 0.3, 0.3, 0.95, 0.7)

#: Elements of the random tile that everything is made from. A length that is no multiple of a page: pieces that end up in
#: each other's place differ.
_TILE = (1 << 18) + 257

_LARGE, _SMALL, _SMALL_LENGTH = 6, 64, 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


class KnownState:
    """Up to ``size`` bytes of tensors, in memory that is allocated once and touched.

    Args:
        fixed: always the full size, and a storage of its own for each tensor: stock savers clone what is a slice of more.

    Attributes:
        bytes: the full size.
    """

    def __init__(self, size: int, *, fixed: bool = False) -> None:
        room = max(size // 4 - _SMALL * _SMALL_LENGTH, _LARGE) // _LARGE
        lengths = {f"w{number}": room for number in range(_LARGE)}
        lengths |= {f"m{number}": _SMALL_LENGTH for number in range(_SMALL)}
        if fixed:
            self._tensors = {key: torch.empty(length, dtype=torch.int32) for key, length in lengths.items()}
        else:
            pieces = torch.empty(sum(lengths.values()), dtype=torch.int32).split(list(lengths.values()))
            self._tensors = dict(zip(lengths, pieces, strict=True))
        self._fixed = fixed
        self._tile = torch.randint(-(2**31), 2**31, (_TILE,), generator=torch.Generator().manual_seed(1))
        self._tile = self._tile.to(torch.int32)
        self._scratch = torch.empty(_TILE, dtype=torch.int32)
        self.bytes = 4 * sum(lengths.values())
        self.fill(0, all_of_it=True)

    def tree(self, step: int) -> dict[str, Any]:
        """What is saved at this step: slices of the memory, and values that are made anew."""
        tree: dict[str, Any] = {"model": {}, "optim": {}}
        for number, (key, piece) in enumerate(self._pieces(step)):
            tree["model" if key.startswith("w") else "optim"][key] = piece.view(_DTYPES[number % len(_DTYPES)])
        return tree | self._values(step)

    def fill(self, step: int, *, all_of_it: bool = False) -> None:
        """A training step: every tensor gets the values of ``step``."""
        for number, (_, piece) in enumerate(self._pieces(0 if all_of_it else step)):
            for part, at in enumerate(range(0, piece.numel(), _TILE)):
                target = piece[at : at + _TILE]
                torch.add(self._tile[: target.numel()], _shift(step, number, part), out=target)

    def wrong(self, step: int, tree: dict[str, Any]) -> list[str]:
        """Keys that don't hold, to the bit, what belongs there at this step."""
        found = []
        for number, (key, piece) in enumerate(self._pieces(step)):
            for part, at in enumerate(range(0, piece.numel(), _TILE)):
                held = piece[at : at + _TILE]
                wanted = self._scratch[: held.numel()]
                torch.add(self._tile[: held.numel()], _shift(step, number, part), out=wanted)
                if not torch.equal(held, wanted):
                    found.append(f"{key}, from byte {4 * at}")
                    break
        wanted_values = self._values(step)
        return found + [key for key, value in wanted_values.items() if repr(tree[key]) != repr(value)]

    def _pieces(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        fraction = 1.0 if self._fixed else FRACTIONS[step % len(FRACTIONS)]
        for key, tensor in self._tensors.items():
            large = key.startswith("w") and fraction < 1
            yield key, tensor[: max(int(tensor.numel() * fraction), 1)] if large else tensor

    @staticmethod
    def _values(step: int) -> dict[str, Any]:
        generator = random.Random(step)
        return {
            "iteration": step,
            "beta": torch.tensor(float(step)),
            "rng": generator.randbytes(generator.randrange(64 << 10)),
        }


def _shift(step: int, number: int, part: int) -> int:
    return (step * 7_919 + number * 104_729 + part * 15_485_863) % (2**31)
