"""``strategies.base.async_calls``, the queue that frameworks written for megatron-core 0.16 schedule on, where later versions lack it.

SkyRL and verl import it. From 0.17 on the attribute is gone, from 0.19 on the module, and with it their asynchronous saves.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

_PACKAGE = "megatron.core.dist_checkpointing.strategies"
_NAME = f"{_PACKAGE}.base"

_added: list[str] = []


def add() -> None:
    """Puts the name where it is missing. Idempotent."""
    if _added:
        return
    if importlib.util.find_spec(_NAME) is not None:
        module: Any = importlib.import_module(_NAME)
        if not hasattr(module, "async_calls"):
            module.async_calls = _queue()
            _added.append("attribute")
        return
    module = types.ModuleType(_NAME, "Stands where megatron-core had the base classes of strategies until 0.18.")
    module.async_calls = _queue()
    sys.modules[_NAME] = module
    importlib.import_module(_PACKAGE).base = module  # type: ignore[attr-defined]
    _added.append("module")


def remove() -> None:
    """Takes :func:`add` back."""
    while _added:
        if _added.pop() == "module":
            sys.modules.pop(_NAME, None)
            vars(importlib.import_module(_PACKAGE)).pop("base", None)
        else:
            vars(importlib.import_module(_NAME)).pop("async_calls", None)


def _queue() -> Any:
    try:
        return importlib.import_module(f"{_PACKAGE}.async_utils").AsyncCallsQueue()
    except ImportError:
        from ckpt_engine.integrations.megatron.queues import ThreadAsyncCallsQueue

        return ThreadAsyncCallsQueue()
