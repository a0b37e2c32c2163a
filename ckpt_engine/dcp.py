"""Storage writer and reader for ``torch.distributed.checkpoint``; see :mod:`ckpt_engine.integrations.dcp`."""

from ckpt_engine.integrations.dcp import EngineStorageReader, EngineStorageWriter

__all__ = ["EngineStorageReader", "EngineStorageWriter"]
