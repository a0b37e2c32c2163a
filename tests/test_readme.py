"""Promise: the README's Python snippets run as they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

README = Path(__file__).parent.parent / "README.md"


def snippet(heading: str) -> str:
    return README.read_text().split(heading)[1].split("```python\n")[1].split("```")[0]


def test_the_python_example_trains_saves_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    trained: list[int] = []

    def train_one_step() -> None:
        optimizer.zero_grad()
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        trained.append(1)

    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "train_one_step": train_one_step,
        "batch": 2,
    }
    for total, steps in ((300, 300), (500, 200)):
        trained.clear()
        exec(snippet("### 1. From Python"), {**names, "total_steps": total})
        assert len(trained) == steps
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("iter_*")) == [
        f"iter_000{n}00" for n in ("03", "04", "05")
    ]


def test_the_dcp_example_saves_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(snippet("### 2. Through"), {"state_dict": {"w": torch.ones(3), "n": 1}})
    assert (tmp_path / "checkpoint" / ".metadata").exists()
