"""ckpt_engine: asynchronous checkpoints for PyTorch training, written by threads of the trainer itself.

>>> from ckpt_engine import CheckpointEngine, TrainState
>>> with CheckpointEngine("checkpoints") as engine:                                   # doctest: +SKIP
...     engine.save({"model": model, "optim": optimizer}, step=100, train_state=TrainState(step=100))
"""

from ckpt_engine.config import EngineConfig
from ckpt_engine.engine import CheckpointEngine
from ckpt_engine.errors import (
    CheckpointError,
    CommitTimeoutError,
    ConfigError,
    CorruptionError,
    DirectoryBusyError,
    EngineClosedError,
    KeyMismatchError,
    MemoryBudgetError,
    NotCommittedError,
    StateError,
    StepExistsError,
    StorageError,
)
from ckpt_engine.preflight import SavePlanReport
from ckpt_engine.restore.verify import VerifyReport
from ckpt_engine.results import CheckpointInfo, Restored, RestoreReport, SaveHandle, SaveStats
from ckpt_engine.state import PerRank, RngState
from ckpt_engine.train_state import TrainState
from ckpt_engine.version import __version__

__all__ = [
    "CheckpointEngine",
    "CheckpointError",
    "CheckpointInfo",
    "CommitTimeoutError",
    "ConfigError",
    "CorruptionError",
    "DirectoryBusyError",
    "EngineClosedError",
    "EngineConfig",
    "KeyMismatchError",
    "MemoryBudgetError",
    "NotCommittedError",
    "PerRank",
    "RestoreReport",
    "Restored",
    "RngState",
    "SaveHandle",
    "SavePlanReport",
    "SaveStats",
    "StateError",
    "StepExistsError",
    "StorageError",
    "TrainState",
    "VerifyReport",
    "__version__",
]
