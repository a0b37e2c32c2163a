"""What the tests of ``engine.plan`` share."""

from __future__ import annotations

import os
from typing import Any

from ckpt_engine import EngineConfig
from ckpt_engine.preflight import SavePlanReport

MIB = 1 << 20


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"staging_budget": 16 * MIB, "extent_bytes": MIB, "commit_timeout": 20.0, **options})


def file_sizes(path: str) -> dict[str, int]:
    return {name: os.stat(os.path.join(path, name)).st_size for name in os.listdir(path) if name.endswith(".distcp")}


def planned_sizes(report: SavePlanReport) -> dict[str, int]:
    return {file.name: file.bytes for rank in report.ranks for file in rank.files}
