"""How a staging budget is cut up into extents, and for how many writers."""

from __future__ import annotations

import dataclasses

from ckpt_engine.config import MIB, MIN_BUDGET_BYTES, MIN_EXTENT_BYTES
from ckpt_engine.errors import ConfigError, MemoryBudgetError

#: What a pool holds on to under pressure: one extent can be filled while the other is written.
FLOOR_EXTENTS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """How a budget is cut up: ``extents`` pieces of ``extent_bytes``, filled and written by ``writers`` threads."""

    extent_bytes: int
    extents: int
    writers: int


def choose_geometry(budget: int, extent_bytes: int, writers: int) -> Geometry:
    """Cuts a budget so that every writer has two extents: one being written, one being filled.

    The extent is the configured size if that fits, else the largest power of two of MiB that does. Writers are given up
    only when even extents of 1 MiB don't give each of them two.

    Raises:
        MemoryBudgetError: the budget doesn't hold two extents of the smallest size.
        ConfigError: ``extent_bytes`` or ``writers`` can't be worked with.
    """
    if extent_bytes < MIN_EXTENT_BYTES or extent_bytes % 4096:
        raise ConfigError(
            f"extent_bytes is {extent_bytes}, expected a multiple of 4096 of at least {MIN_EXTENT_BYTES}",
            phase="config",
        )
    if writers < 1:
        raise ConfigError(f"writers is {writers}, expected at least 1", phase="config")
    if budget < MIN_BUDGET_BYTES:
        raise MemoryBudgetError(
            f"the staging budget is {budget} bytes, expected at least {MIN_BUDGET_BYTES} "
            f"(two extents of {MIN_EXTENT_BYTES} bytes for one writer)",
            phase="config",
            hint="raise staging_budget, or free host memory",
        )
    writers = min(writers, budget // (2 * MIN_EXTENT_BYTES))
    share = budget // (2 * writers)  # of one extent
    if extent_bytes > share:
        extent_bytes = MIB << ((share // MIB).bit_length() - 1)
    return Geometry(extent_bytes, budget // extent_bytes, writers)
