"""Importing this installs the engine into Megatron if the environment says ``CKPT_ENGINE=threads``."""

from ckpt_engine.integrations.megatron import auto as auto
