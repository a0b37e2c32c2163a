"""Short name of :mod:`ckpt_engine.integrations.megatron`."""

from ckpt_engine.integrations.megatron import (
    SelfCheck,
    add_arguments,
    config_from_args,
    install,
    install_from_args,
    self_check,
    uninstall,
)

__all__ = [
    "SelfCheck",
    "add_arguments",
    "config_from_args",
    "install",
    "install_from_args",
    "self_check",
    "uninstall",
]
