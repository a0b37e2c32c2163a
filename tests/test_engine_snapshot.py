"""Promise: when save() returns, the engine owns private copies of everything (design invariant 1)."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import CheckpointEngine, CheckpointError, EngineConfig, StateError, TrainState
from tests.sinks import blocked_writes, failing_writes
from tests.test_state import Wrapped

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


def small_config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"staging_budget": 64 * MIB, "commit_timeout": 30.0, **options})


def test_cpu_tensors_keep_the_value_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B001, B014, B043: CPU tensors, 0-d steps, views, containers and counters are those of the call."""
    base = torch.ones(1 << 18)
    state: dict[str, Any] = {
        "t": base,
        "view": base[::2],
        "step": torch.tensor(1.0),
        "list": [torch.ones(3), {"n": 1}],
        "config": {"lr": 0.5, "names": ["a"]},
    }
    with CheckpointEngine(tmp_path, small_config()) as engine:
        with blocked_writes(monkeypatch) as gate:
            handle = engine.save(state, 1, TrainState(step=1))
            base.fill_(7)
            state["step"] += 1
            state["list"][0].zero_()
            state["list"][1]["n"] = 9
            state["config"]["lr"] = 9.0
            state["config"]["names"].append("b")
            assert not handle.done()
            gate.open()
            handle.result(30)
        found: dict[str, Any] = {
            "t": torch.zeros(1 << 18),
            "view": torch.zeros(1 << 17),
            "step": torch.tensor(0.0),
            "list": [torch.zeros(3), {"n": 0}],
            "config": {"lr": 0.0, "names": []},
        }
        engine.restore(found)
    assert torch.equal(found["t"], torch.ones(1 << 18)) and torch.equal(found["view"], torch.ones(1 << 17))
    assert found["step"] == 1 and torch.equal(found["list"][0], torch.ones(3)) and found["list"][1] == {"n": 1}
    assert found["config"] == {"lr": 0.5, "names": ["a"]}


def test_optimizer_steps_do_not_leak_into_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B014: the 0-d step tensor said 2 where the moments were of step 1; and live tensors stay what they were."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()

    train()
    wanted = {k: v.clone() for k, v in model.state_dict().items()}
    with CheckpointEngine(tmp_path, small_config()) as engine:
        with blocked_writes(monkeypatch) as gate:
            engine.save({"model": model, "optim": optimizer}, 1)
            train()
            gate.open()
            engine.wait(30)
        assert not any(p.is_shared() for p in model.parameters())
        fresh = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        fresh_optimizer = torch.optim.AdamW(fresh.parameters())
        engine.restore({"model": fresh, "optim": fresh_optimizer})
    assert all(torch.equal(fresh.state_dict()[k], v) for k, v in wanted.items())
    assert [s["step"].item() for s in fresh_optimizer.state.values()] == [1.0] * 4


def test_source_memory_is_never_read_after_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B059: the pages are made unreadable; a later read by the engine would be a SIGSEGV."""
    memory = mmap.mmap(-1, MIB)
    tensor = torch.frombuffer(memory, dtype=torch.float32).fill_(3)
    libc = ctypes.CDLL(None, use_errno=True)
    with CheckpointEngine(tmp_path, small_config()) as engine:
        with blocked_writes(monkeypatch) as gate:
            handle = engine.save({"t": tensor}, 1)
            assert libc.mprotect(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(MIB), 0) == 0
            gate.open()
            handle.result(30)
        assert (
            libc.mprotect(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(MIB), mmap.PROT_READ | mmap.PROT_WRITE)
            == 0
        )
        found = {"t": torch.zeros(MIB // 4)}
        engine.restore(found)
    assert (found["t"] == 3).all()


def test_staging_memory_is_not_recycled_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B007, B055: two saves back to back with a slow disk and a small pool."""
    seen: list[tuple[bytes, bytes]] = []
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        first = bytes(data[:64])
        time.sleep(0.02)
        seen.append((first, bytes(data[:64])))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    state = {f"t{i}": torch.full((MIB // 4,), 1.0) for i in range(16)}
    with CheckpointEngine(tmp_path, small_config(staging_budget=8 * MIB)) as engine:
        engine.save(state, 1)
        for tensor in state.values():
            tensor.fill_(2)
        engine.save(state, 2)
        _ = [torch.full((MIB,), 9.0) for _ in range(16)]
        engine.wait(60)
        for step in (1, 2):
            found = {f"t{i}": torch.zeros(MIB // 4) for i in range(16)}
            engine.restore(found, step=step)
            assert all((t == step).all() for t in found.values())
    assert all(first == second for first, second in seen)


def test_train_state_tracker_and_directory_are_those_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B011, B047, B103: everything that names a step is frozen when save() is called."""

    class Live:
        step = 25
        consumed = 100

    live = Live()
    calls: list[tuple[int, str]] = []
    with CheckpointEngine(tmp_path, small_config()) as engine:
        engine.on_committed(lambda info: calls.append((info.step, info.path)))
        with blocked_writes(monkeypatch) as gate:
            engine.save(
                {"t": torch.ones(8)}, live.step, TrainState(step=live.step, consumed_train_samples=live.consumed)
            )
            live.step, live.consumed = 28, 112
            gate.open()
        engine.wait(30)
        restored = engine.restore({"t": torch.ones(8)})
    assert restored is not None and restored.train_state == TrainState(step=25, consumed_train_samples=100)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "25"
    assert calls == [(25, str(tmp_path / "iter_0000025"))]
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000025"]
    tracker = torch.load(tmp_path / "latest_train_state.pt", weights_only=True)
    assert tracker["step"] == 25 and tracker["consumed_train_samples"] == 100


def test_no_reference_to_sources_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B029, B062: neither after a good save nor after a failed one, and without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        with CheckpointEngine(tmp_path, small_config()) as engine:
            for step, fail in ((1, False), (2, True), (3, False)):
                state = {f"t{i}": torch.ones(1000 + i) for i in range(8)}
                dead = [weakref.ref(t.untyped_storage()) for t in state.values()] + [
                    weakref.ref(t) for t in state.values()
                ]
                if fail:
                    with failing_writes(monkeypatch, lambda: OSError(5, "Input/output error")):
                        handle = engine.save(state, step)
                        error = handle.exception(30)
                    assert isinstance(error, CheckpointError)
                else:
                    handle = engine.save(state, step)
                    handle.result(30)
                del state
                assert [ref() for ref in dead if ref() is not None] == []
    finally:
        gc.enable()


def test_what_cannot_be_saved_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    """B026, B085: the key is named, nothing is on disk, the engine goes on."""
    import threading

    odd: dict[str, Any] = {
        "wrapped": Wrapped(torch.ones(4, dtype=torch.uint8), 2.0),
        "lock": threading.Lock(),
        "generator": (n for n in range(3)),
        "lambda": lambda: 1,
    }
    with CheckpointEngine(tmp_path, small_config()) as engine:
        for key, value in odd.items():
            with pytest.raises(StateError, match=f"outer.{key}"):
                engine.save({"good": torch.ones(3), "outer": {key: value}}, 1)
            assert list(tmp_path.glob("iter_*")) == []
        engine.save({"good": torch.ones(3)}, 1).result(30)
        assert engine.steps() == [1]


def test_small_views_do_not_drag_their_storage_along(tmp_path: Path) -> None:
    """B056: 16 views of 1,000 elements of a 64 MiB buffer take less than 1 MiB."""
    base = torch.arange(16 * MIB, dtype=torch.float32)
    views = {f"v{i}": (base[i * 1000 : i * 1000 + 1000] if i % 2 else base[i : i + 2000 : 2]) for i in range(15)}
    views["transposed"] = base[:1000].view(10, 100).t()
    with CheckpointEngine(tmp_path, small_config()) as engine:
        info = engine.save(views, 1).result(30)
        assert info.stats.staged_bytes < MIB
        found = {k: torch.zeros_like(v, memory_format=torch.contiguous_format) for k, v in views.items()}
        engine.restore(found)
    assert all(torch.equal(found[k], v) for k, v in views.items())


def test_tied_parameters_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    """B095"""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(1000, 1024)
            self.head = torch.nn.Linear(1024, 1000, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    buffer = torch.arange(100.0)
    with CheckpointEngine(tmp_path, small_config()) as engine:
        info = engine.save({"model": model, "low": buffer[:60], "high": buffer[40:]}, 1).result(30)
        assert 4_000_000 < info.bytes < 5_000_000
        fresh = Tied()
        found: dict[str, Any] = {"model": fresh, "low": torch.zeros(60), "high": torch.zeros(60)}
        engine.restore(found)
    assert fresh.head.weight is fresh.embed.weight and torch.equal(fresh.embed.weight, model.embed.weight)
    assert torch.equal(found["low"], buffer[:60]) and torch.equal(found["high"], buffer[40:])


def test_a_new_object_or_shape_is_never_left_out_by_the_plan_cache(tmp_path: Path) -> None:
    """B023: shape, dtype, added, removed, retied: each save holds what its state held."""
    tensor = torch.arange(6.0)
    variants: list[dict[str, Any]] = [
        {"a": tensor},
        {"a": tensor, "extra": {"n": 1}},
        {"a": tensor.view(2, 3)},
        {"a": tensor.double()},
        {"b": tensor},
        {"a": tensor, "b": tensor},
        {"a": tensor, "b": tensor + 1},
        {"a": tensor, "b": tensor},
        {"a": {0: tensor}},
        {"a": [tensor]},
        {"a": tensor},
    ]
    with CheckpointEngine(tmp_path, small_config()) as engine:
        for step, variant in enumerate(variants):
            info = engine.save(variant, step).result(30)
            assert not info.stats.reused_plan
            found: dict[str, Any] = {}
            engine.restore(found, step=step)
            assert repr(found) == repr(variant)
        assert engine.save(variants[-1], 100).result(30).stats.reused_plan
