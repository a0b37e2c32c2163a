"""Short name of :mod:`ckpt_engine.integrations.megatron`."""

from ckpt_engine.integrations.megatron import SelfCheck, install, self_check, uninstall

__all__ = ["SelfCheck", "install", "self_check", "uninstall"]
