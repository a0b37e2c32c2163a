"""Promises of ``ckpt-engine plan``: exit statuses that a script can go by, JSON that parses, no code run, nothing left behind."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_engine import CheckpointEngine, EngineConfig, TrainState
from ckpt_engine.cli import output
from ckpt_engine.cli.main import main, make_parser

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    try:
        status = main(list(arguments))
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, _ = run(capsys, "plan", *arguments, "--json")
    found: dict[str, Any] = json.loads(out)
    assert {"fits": 0, "fits by streaming": 1, "does not fit": 2}[found["verdict"]] == status
    return found


def save(directory: Path, state: dict[str, Any], step: int = 3) -> dict[str, int]:
    """Makes a checkpoint of ours; the sizes of its shard files."""
    with CheckpointEngine(directory, EngineConfig(staging_budget=16 * MIB)) as engine:
        path = engine.save(state, step, TrainState(step=step)).result(20).path
    return {name: os.path.getsize(os.path.join(path, name)) for name in os.listdir(path) if name.endswith(".distcp")}


def state() -> dict[str, Any]:
    tied = torch.randn(300, 200)
    return {
        "model": {"a": tied, "b": tied, "c": torch.randn(1001, 33).to(torch.bfloat16), "n": torch.tensor(1)},
        "optim": [{"m": torch.randn(2 * MIB), "step": 5}],
        "lr": 1e-3,
    }


# -- verdict and exit status -----------------------------------------------------------------------------------------------


def test_the_exit_status_tells_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--bytes", "24M", "--tensors", "20"]
    assert run(capsys, "plan", str(tmp_path), *size, "--staging-budget", "64M")[0] == 0
    assert run(capsys, "plan", str(tmp_path), *size, "--staging-budget", "8M")[0] == 1
    status, out, _ = run(capsys, "plan", str(tmp_path), "--bytes", "900P", "--tensors", "8", "--no-probe")
    assert status == 2 and "problem" in out and "missing" in out
    assert os.listdir(tmp_path) == []


def test_the_size_asked_for_is_the_size_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, str(tmp_path), "--bytes", "64MiB", "--tensors", "10", "--ranks", "4", "--local-ranks", "2")
    assert 64 * MIB < found["bytes"] < 65 * MIB and len(found["ranks"]) == 4
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert found["ranks"][3]["files"][0]["name"] == "__3_0.distcp" and found["ranks"][3]["tensors"] == 10
    assert found["ranks"][0]["memory"]["local_ranks"] == 2
    assert found["stall_seconds"] > 0 and found["durable_seconds"] > 0
    assert any("2 nodes" in note for note in found["notes"])


def test_retention_is_in_the_disk_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = planned(capsys, str(tmp_path), "--bytes", "10M", "--no-probe")["disk"]
    five = planned(capsys, str(tmp_path), "--bytes", "10M", "--no-probe", "--keep-last", "4")["disk"]
    assert one["held"] is None and one["needed"] == one["checkpoint"]
    assert five["held"] == 5 and five["needed"] == 5 * five["checkpoint"]


def test_a_directory_that_does_not_exist_yet_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, str(tmp_path / "new" / "place"), "--bytes", "10M")
    assert found["disk"]["path"] == str(tmp_path) and found["durable_seconds"] > 0
    assert any("does not exist yet" in note for note in found["notes"]) and os.listdir(tmp_path) == []


def test_no_probe_writes_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", None)
    found = planned(capsys, str(tmp_path), "--bytes", "10M", "--no-probe")
    assert found["verdict"] == "fits" and found["stall_seconds"] is found["durable_seconds"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "DIR"],
        ["plan", "DIR", "--bytes", "lots"],
        ["plan", "DIR", "--bytes", "1M", "--like", "DIR"],
        ["plan", "DIR", "--bytes", "1M", "--ranks", "0"],
        ["plan", "DIR", "--bytes", "1M", "--ranks", "2", "--local-ranks", "3"],
        ["plan", "DIR", "--bytes", "1M", "--staging-budget", "1K"],
        ["plan", "DIR", "--bytes", "1M", "--writers", "1000"],
        ["plan", "DIR", "--like", "DIR"],
        ["plan", "DIR", "--like", "DIR", "--tensors", "3"],
        ["plan", "FILE", "--bytes", "1M"],
        ["plan", "s3://bucket/x", "--bytes", "1M"],
        ["fly", "DIR"],
        [],
    ],
)
def test_a_wrong_call_ends_with_64_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (tmp_path / "file").touch()
    places = {"DIR": str(tmp_path), "FILE": str(tmp_path / "file")}
    status, out, err = run(capsys, *[places.get(argument, argument) for argument in arguments])
    assert status == 64 and out == "" and err and "Traceback" not in err
    assert os.listdir(tmp_path) == ["file"]


def test_a_failure_ends_with_70_and_never_with_a_status_of_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("ckpt_engine.cli.plan.estimate", fail)
    status, out, err = run(capsys, "plan", str(tmp_path), "--bytes", "1M")
    assert status == 70 and out == "" and "broken" in err


def test_the_command_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpt_engine", "plan", str(tmp_path), "--bytes", "24M", "--staging-budget", "8M"]
    done = subprocess.run([*command, "--json"], capture_output=True, timeout=50, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdict"] == "fits by streaming"


# -- like a checkpoint that exists -----------------------------------------------------------------------------------------


def test_like_a_checkpoint_of_ours_gives_its_files_to_the_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = save(tmp_path / "old", state())
    for path in (tmp_path / "old", tmp_path / "old" / "iter_0000003"):
        found = planned(capsys, str(tmp_path / "new"), "--like", str(path), "--no-probe")
        assert {file["name"]: file["bytes"] for rank in found["ranks"] for file in rank["files"]} == sizes
    assert sorted(os.listdir(tmp_path)) == ["old"]


def test_like_takes_the_newest_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, {"w": torch.zeros(MIB)}, 1)
    save(tmp_path, {"w": torch.zeros(3 * MIB)}, 2)
    assert planned(capsys, str(tmp_path), "--like", str(tmp_path), "--no-probe")["bytes"] > 12 * MIB


def test_like_a_checkpoint_of_stock_dcp_or_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's is DCP's, with common.pt next to it and a tracker above."""
    step = tmp_path / "iter_0000020"
    dcp.save({"w": torch.zeros(1000, 700), "note": ["x"] * 100}, checkpoint_id=step, no_dist=True)
    for shard in step.glob("*.distcp"):
        shard.unlink()  # the metadata is enough
    bare = planned(capsys, str(tmp_path), "--like", str(step), "--no-probe")
    assert bare["bytes"] > 2_800_000 and (bare["ranks"][0]["tensors"], bare["ranks"][0]["values"]) == (1, 1)
    (step / "common.pt").write_bytes(bytes(5 * MIB))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    megatron = planned(capsys, str(tmp_path), "--like", str(tmp_path), "--no-probe")
    assert megatron["bytes"] >= bare["bytes"] + 5 * MIB and megatron["ranks"][0]["values"] == 2


def test_like_with_other_ranks_splits_every_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = save(tmp_path / "old", state())
    found = planned(capsys, str(tmp_path / "new"), "--like", str(tmp_path / "old"), "--ranks", "8", "--no-probe")
    ranks = found["ranks"]
    assert len(ranks) == 8 and len({rank["tensors"] for rank in ranks}) == 1
    assert [rank["values"] > 0 for rank in ranks] == [True] + [False] * 7
    assert sum(sizes.values()) * 0.9 < found["bytes"] < sum(sizes.values()) * 1.2


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def test_like_runs_no_code_from_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil(str(tmp_path / "ran"))))
    status, out, err = run(capsys, "plan", str(tmp_path), "--like", str(tmp_path))
    assert status == 70 and out == "" and "mkdir" in err and "Traceback" not in err
    assert os.listdir(tmp_path) == [".metadata"]


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1})])
def test_like_damaged_metadata_is_a_failure_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    status, _, err = run(capsys, "plan", str(tmp_path), "--like", str(tmp_path))
    assert status == 70 and ".metadata" in err and len(err.splitlines()) == 1


def test_like_metadata_with_absurd_sizes_is_refused_or_planned_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save({"w": torch.zeros(10), "v": ["x"]}, checkpoint_id=tmp_path / "old", no_dist=True)
    name = tmp_path / "old" / ".metadata"
    metadata = pickle.loads(name.read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn == "v":
            place.length = 10**15
    name.write_bytes(pickle.dumps(metadata))
    assert planned(capsys, str(tmp_path), "--like", str(tmp_path / "old"), "--no-probe")["verdict"] == "does not fit"
    for index, place in metadata.storage_data.items():
        if index.fqn == "v":
            place.length = -1
    name.write_bytes(pickle.dumps(metadata))
    assert run(capsys, "plan", str(tmp_path), "--like", str(tmp_path / "old"))[0] == 70


# -- what it prints ----------------------------------------------------------------------------------------------------------


def test_the_table_is_the_same_in_a_pipe_with_and_without_rich(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, err = run(capsys, "plan", str(tmp_path), "--bytes", "10M", "--no-probe")
    lines = out.splitlines()
    assert lines[0] == f"save to {tmp_path}: fits" and err == ""
    assert [line.split("  ")[1] for line in lines[1:7]] == [
        "checkpoint",
        "largest rank",
        "largest file",
        "host memory",
        "disk",
        "time",
    ]


def test_a_terminal_without_rich_gets_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_on_terminal", lambda: True)
    for name in ("rich", "rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)
    output.show_rows("title: fits", [("a", "[bold]1[/bold]"), ("long name", "2")])
    assert capsys.readouterr().out == "title: fits\n  a          [bold]1[/bold]\n  long name  2\n"


@pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="rich is not installed")
def test_rich_draws_the_same_words_and_takes_no_markup_from_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_on_terminal", lambda: True)
    output.show_rows("save to /a[b]: fits", [("note", "a key [bold]w[/bold]")])
    out = capsys.readouterr().out
    assert "save to /a[b]: fits" in out and "[bold]w[/bold]" in out


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpt_engine", "plan", str(tmp_path), "--bytes", "1M", "--no-probe"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=50, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 141 and done.stderr == b""


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1024", 1024),
        ("40G", 40 << 30),
        ("1.5T", 3 << 39),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("40GB", 40 * 10**9),
        ("1 KB", 1000),
        ("7B", 7),
        ("9P", 9 << 50),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert output.byte_count(text) == count


@pytest.mark.parametrize("text", ["", "G", "-1G", "1e3", "4 apples", "1GG", "0x10", "1,5G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        output.byte_count(text)


def test_help_has_examples_that_parse_and_says_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", "--help")
    assert status == 0 and "exit status:" in out
    examples = [line.split() for line in out.splitlines() if line.startswith("  ckpt-engine plan ")]
    assert len(examples) >= 3
    for example in examples:
        assert make_parser().parse_args(example[1:]).run is not None


def test_every_subcommand_is_a_module_with_the_two_functions() -> None:
    from ckpt_engine.cli.main import COMMANDS

    for name in COMMANDS:
        module: types.ModuleType = importlib.import_module(f"ckpt_engine.cli.{name}")
        assert callable(module.add_parser) and callable(module.run)
