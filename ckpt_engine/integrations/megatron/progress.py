"""``train_state.pt`` next to the weights of a Megatron-LM save: taken when the save is scheduled, written when it commits.

Megatron-LM keeps its progress in ``args``, which go on counting while an asynchronous save is on its way. The snapshot is
bytes, so nothing can change it. Saves without ``args`` in their state are left alone: Bridge writes a file of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from ckpt_engine.commit.names import parse_step
from ckpt_engine.errors import ConfigError
from ckpt_engine.storage.fs import write_atomic
from ckpt_engine.train_state import TrainState

log = logging.getLogger("ckpt_engine")

NAME = "train_state.pt"
_LATEST = "latest_train_state.pt"


def snapshot(state: Any) -> bytes | None:
    """The content of ``train_state.pt`` for a state dict of Megatron-LM, or ``None`` for any other. Never raises."""
    if not isinstance(state, Mapping) or "args" not in state or "iteration" not in state:
        return None
    try:
        overrides = {"step": state["iteration"]}
        flops = state.get("num_floating_point_operations_so_far")
        if flops is not None:
            overrides["floating_point_operations_so_far"] = flops
        return TrainState.from_args(state["args"], **overrides).to_bytes()
    except ConfigError as error:  # the checkpoint itself is as good without
        log.warning("no %s is written: %s", NAME, error)
        return None


def advance(directory: str, data: bytes) -> None:
    """Points ``latest_train_state.pt`` next to an ``iter_*`` directory to it: before Megatron advances its own tracker."""
    if parse_step(os.path.basename(directory)) is not None:
        write_atomic(os.path.join(os.path.dirname(directory), _LATEST), data)
