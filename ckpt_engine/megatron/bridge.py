"""Short name of :mod:`ckpt_engine.integrations.megatron.bridge`."""

from ckpt_engine.integrations.megatron.bridge import ThreadedCheckpointManager

__all__ = ["ThreadedCheckpointManager"]
