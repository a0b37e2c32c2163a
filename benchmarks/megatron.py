"""``python -m benchmarks.megatron``: stock megatron-core saves against the same saves with the engine installed.

Every way to save (version; stock or engine; synchronous or asynchronous) has processes of its own, one per rank, that stay from
the first save to the last. All of them take turns in one run, several rounds of it, with the raw writer as the limit. After
the timed rounds each saves once more while its memory is watched, since watching costs CPU. Prints a Markdown table of
medians per case and the project's goals with what was measured; ``--json`` keeps every single sample.

Megatron needs not be installed: see :mod:`benchmarks.megatron_versions`. What this doesn't do: load, save from a GPU, or run
stock's persistent queue, which needs one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from benchmarks import measure, megatron_report, megatron_versions
from benchmarks.megatron_peers import MegatronPeer, share
from benchmarks.megatron_report import CaseResult, PeerName, Sample
from benchmarks.peers import RawPeer
from benchmarks.report import GIB, MIB
from benchmarks.states import State, make_state

_VERSIONS = ("0.16.0", "0.19.2")
_DEFAULT_GIB = {"gpt": 2.0, "small": 0.25}
_MODES = {
    "stock_sync": (False, False),
    "stock_async": (False, True),
    "threads_sync": (True, False),
    "threads_async": (True, True),
}
_RAW = PeerName()

#: Frames, padding and manifests: what a staging budget must hold beyond the tensors for all of them to fit at once.
_SLACK_BYTES = 64 * MIB
_SLACK_PER_ITEM = 2048

#: A worker's interpreter with torch and Megatron, and stock's manager process.
_WORKER_BYTES = 450 * MIB


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.megatron", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--case", action="append", choices=list(_DEFAULT_GIB), help="repeatable; default: both")
    parser.add_argument(
        "--version", action="append", help=f"of megatron-core, repeatable; default: {' and '.join(_VERSIONS)}"
    )
    parser.add_argument("--peer", action="append", choices=["raw", *_MODES], help="repeatable; default: all")
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes that save together; each holds a part of the state"
    )
    parser.add_argument("--size-gib", type=float, help="size of the state; default: gpt 2, small 0.25")
    parser.add_argument("--small-count", type=int, default=20_000, help="tensors in the case small")
    parser.add_argument("--repeats", type=int, default=4, help="timed rounds, the first included")
    parser.add_argument("--no-memory", action="store_true", help="leave out the round in which memory is watched")
    parser.add_argument(
        "--budget", default="full", help='staging budget: "full" (the state fits), "auto", or MiB per rank'
    )
    parser.add_argument(
        "--wheels", metavar="DIR", help="unpacked wheels: megatron-core-<version>; default: the tests' cache"
    )
    parser.add_argument(
        "--dir", default=os.path.join("build", "benchmarks"), help="where to write: the disk to measure"
    )
    parser.add_argument("--pause", type=float, default=0.5, help="seconds of rest before each save")
    parser.add_argument("--json", metavar="FILE", help="write every sample there")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    arguments = parser.parse_args(argv)
    if arguments.budget not in ("full", "auto") and not arguments.budget.isdigit():
        parser.error(f'--budget is {arguments.budget!r}, expected "full", "auto" or a number of MiB')
    if arguments.repeats < 2:
        parser.error(f"--repeats is {arguments.repeats}, expected at least 2: a first save and a later one")
    if not 1 <= arguments.ranks <= 64:
        parser.error(f"--ranks is {arguments.ranks}, expected 1 to 64")
    arguments.case = arguments.case or list(_DEFAULT_GIB)
    arguments.version = arguments.version or list(_VERSIONS)
    arguments.peer = arguments.peer or ["raw", *_MODES]
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases; returns the exit status."""
    arguments = parse_arguments(argv)
    try:
        folders = {version: megatron_versions.folder(version, arguments.wheels) for version in arguments.version}
    except LookupError as error:
        print(error, file=sys.stderr)
        return 1
    os.makedirs(arguments.dir, exist_ok=True)
    environment = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
    }
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    print("\n" + megatron_report.LEGEND, flush=True)
    results = []
    for case in arguments.case:
        size = int((arguments.size_gib or _DEFAULT_GIB[case]) * GIB)
        lack = _lack(size, arguments)
        if lack:
            print(f"\n## {case}: left out: {lack}; --size-gib, --version and --peer make it smaller", flush=True)
            continue
        results.append(_run_case(case, size, folders, arguments))
        print("\n" + megatron_report.render(results[-1]), flush=True)
    print(f"\nload average after: {os.getloadavg()[0]:.2f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"environment": environment, "cases": [_as_json(result) for result in results]}, file, indent=1)
    missed = arguments.check and any(goal.met is False for result in results for goal in result.goals())
    return 1 if missed or not results or any(result.failures for result in results) else 0


def _lack(size: int, arguments: argparse.Namespace) -> str:
    """What this machine lacks for a state of ``size`` bytes; empty if nothing."""
    free, need = shutil.disk_usage(arguments.dir).free, int(1.25 * size) + 128 * MIB
    if free < need:
        return f"needs {need / GIB:.1f} GiB of disk, {free / GIB:.1f} GiB are free"
    modes = [mode for mode in arguments.peer if mode != "raw"]
    pools = len(arguments.version) * sum(mode.startswith("threads") for mode in modes)
    # While it is filled the state is there twice; later there are the pools, and the page cache that stock leaves.
    need = (
        int(size * (1 + max(1.0, 1.1 * pools))) + len(arguments.version) * len(modes) * arguments.ranks * _WORKER_BYTES
    )
    available = psutil.virtual_memory().available
    if available < need:
        return f"needs {need / GIB:.1f} GiB of memory, {available / GIB:.1f} GiB are available"
    return ""


# -- one case --------------------------------------------------------------------------------------------------------


def _run_case(case: str, size: int, folders: dict[str, str], arguments: argparse.Namespace) -> CaseResult:
    load = os.getloadavg()[0]
    state = make_state(case, size, small_count=arguments.small_count)
    names = [_RAW] if "raw" in arguments.peer else []
    names += [PeerName(version, *_MODES[mode]) for version in folders for mode in arguments.peer if mode != "raw"]
    shared = share(state, arguments.ranks)
    result = CaseResult(
        case=case,
        bytes=state.bytes,
        items=state.items,
        ranks=arguments.ranks,
        budget=_budget(arguments, state),
        samples={name: [] for name in names},
        memory={},
        failures={},
        load_before=load,
    )
    raw_state = State(case, {}, state.bytes, state.items)
    del state  # it lives on in shared memory
    directory = tempfile.mkdtemp(prefix=f"megatron-{case}-", dir=arguments.dir)
    peers: dict[PeerName, MegatronPeer] = {}
    try:
        for number, name in enumerate(names):
            if name != _RAW:
                root = os.path.join(directory, str(number))
                peers[name] = MegatronPeer(name, folders[name.version], shared, root)
        # Not one after the other: what processes share belongs to as many in each peer's memory before the first save.
        for started in (False, True):
            for name, peer in peers.items():
                if name in result.failures:
                    continue
                try:
                    if started:
                        peer.prepare(result.budget)
                    else:
                        peer.wait_until_started()
                except Exception as error:  # the others' figures are still worth having
                    result.failures[name] = f"{type(error).__name__} at the start: {error}"
        raw = RawPeer(os.path.join(directory, "raw")) if _RAW in names else None
        _rounds(result, peers, raw, raw_state, arguments)
    finally:
        for peer in peers.values():
            peer.close()
        os.close(shared.fd)
        shutil.rmtree(directory, ignore_errors=True)
    return result


def _budget(arguments: argparse.Namespace, state: State) -> int | None:
    if arguments.budget == "auto":
        return None
    if arguments.budget == "full":
        ranks: int = arguments.ranks
        part = -(-(state.bytes + state.items * _SLACK_PER_ITEM) // ranks)
        # A tensor belongs to one rank, whole: the parts are not quite equal.
        return -(-(part + part // 8 * (ranks > 1) + _SLACK_BYTES) // MIB) * MIB
    megabytes: str = arguments.budget
    return int(megabytes) * MIB


def _rounds(
    result: CaseResult,
    peers: dict[PeerName, MegatronPeer],
    raw: RawPeer | None,
    raw_state: State,
    arguments: argparse.Namespace,
) -> None:
    names, step = list(result.samples), 0
    for number in range(arguments.repeats + (not arguments.no_memory)):
        watched = number == arguments.repeats
        # A different one goes first each time: nobody always comes after the one that leaves most behind.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in result.failures or (watched and name == _RAW):
                continue
            step += 1
            _progress(f"{result.case} {'memory' if watched else f'round {number + 1}/{arguments.repeats}'} {name}")
            measure.settle(arguments.pause)
            peer = peers.get(name)
            root = os.path.join(peer.root, "saves") if peer else raw.root if raw else ""

            try:
                if watched and peer:
                    result.memory[name] = peer.peak_memory(step)
                else:
                    answers = peer.save(step) if peer else [_raw_save(raw, raw_state, step)]
                    result.samples[name].append(_sample(number, answers, root, result.bytes))
            except Exception as error:  # the others' figures are still worth having
                result.failures[name] = f"{type(error).__name__} in round {number + 1}: {error}"
            measure.drop_cache(measure.files_under(root))
            for entry in os.scandir(root):
                shutil.rmtree(entry.path)
    _progress("")


def _raw_save(raw: RawPeer | None, state: State, step: int) -> dict[str, Any]:
    if raw is None:
        raise RuntimeError("the raw writer was not asked for")
    machine, cpu, start = measure.machine_cpu_seconds(), time.process_time(), time.perf_counter()
    raw.save(state, step).result()
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    machine = measure.machine_cpu_seconds() - machine
    return {"stall": seconds, "durable": seconds, "cpu": used, "machine_cpu": machine, "processes": 0}


def _sample(number: int, answers: Sequence[dict[str, Any]], root: str, size: int) -> Sample:
    files = list(measure.files_under(root))
    written = sum(os.path.getsize(path) for path in files)
    if written < size:
        raise RuntimeError(f"{written} bytes are on disk after a save of {size}")
    cpu = sum(answer["cpu"] for answer in answers)
    return Sample(
        round=number,
        stall=max(answer["stall"] for answer in answers),
        durable=max(answer["durable"] for answer in answers),
        cpu=cpu,
        other_cpu=max(0.0, answers[0]["machine_cpu"] - cpu),
        processes=sum(answer["processes"] for answer in answers),
        cached=sum(measure.cached_bytes(path) for path in files),
        written=written,
    )


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def _as_json(result: CaseResult) -> dict[str, Any]:
    return {
        "case": result.case,
        "bytes": result.bytes,
        "items": result.items,
        "ranks": result.ranks,
        "budget": result.budget,
        "load_before": result.load_before,
        "samples": {
            str(peer): [dataclasses.asdict(sample) for sample in mine] for peer, mine in result.samples.items()
        },
        "memory": {str(peer): peak for peer, peak in result.memory.items()},
        "failures": {str(peer): message for peer, message in result.failures.items()},
        "rows": [dataclasses.asdict(row) for row in result.rows()],
        "goals": [dataclasses.asdict(goal) for goal in result.goals()],
    }


if __name__ == "__main__":
    sys.exit(main())
