"""Short name of :mod:`ckpt_engine.integrations.megatron`."""

from typing import TYPE_CHECKING, Any

from ckpt_engine.integrations import megatron
from ckpt_engine.integrations.megatron import (
    SelfCheck,
    ThreadAsyncCallsQueue,
    add_arguments,
    check,
    config_from_args,
    install,
    install_from_args,
    self_check,
    uninstall,
)

if TYPE_CHECKING:
    from ckpt_engine.integrations.megatron.strategy import ThreadedSaveStrategy

__all__ = [
    "SelfCheck",
    "ThreadAsyncCallsQueue",
    "ThreadedSaveStrategy",
    "add_arguments",
    "check",
    "config_from_args",
    "install",
    "install_from_args",
    "self_check",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    return getattr(megatron, name)
