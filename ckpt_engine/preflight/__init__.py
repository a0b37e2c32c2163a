"""Before step 0: what will a save of this state take, and will it work?

``CheckpointEngine.plan(state)`` rehearses a save with all ranks and writes nothing that stays (:mod:`.rounds`);
``ckpt-engine plan`` asks the same for a size or for a checkpoint that exists (:mod:`.estimate`). Both give a
:class:`SavePlanReport`.
"""

from ckpt_engine.preflight.report import (
    DiskNeeds,
    FileNeeds,
    MemoryNeeds,
    Problem,
    ProcessLimits,
    RankNeeds,
    SavePlanReport,
    Speeds,
)
from ckpt_engine.preflight.rounds import Preflight

__all__ = [
    "DiskNeeds",
    "FileNeeds",
    "MemoryNeeds",
    "Preflight",
    "Problem",
    "ProcessLimits",
    "RankNeeds",
    "SavePlanReport",
    "Speeds",
]
