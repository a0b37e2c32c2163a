"""``python -m benchmarks.save``: how long saves take here, against the other ways to save and against the disk itself.

All peers take turns in one run, several rounds of it, so that a disk or a machine that changes its speed changes it for
everyone. Before each save everything is written back, caches of earlier files are dropped, and freed memory is given
back; after it the files are measured and removed. Prints a table of medians per case and the project's goals with what
was measured; ``--json`` keeps every single sample.

What it doesn't do: measure restores, several ranks, or devices other than the CPU.
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

import torch
import torch.distributed as dist

from benchmarks import measure, report
from benchmarks.peers import PEERS, Peer, make_peer
from benchmarks.report import GIB, MIB, BusySample, CaseResult, Sample
from benchmarks.states import State, make_state

_DEFAULT_GIB = {"gpt": 2.0, "small": 0.25, "single": 4.0}

#: Frames, padding and manifests: what a staging budget must hold beyond the tensors for all of them to fit at once.
_FULL_SLACK_BYTES = 64 * MIB
_FULL_SLACK_PER_ITEM = 2048


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--case", action="append", choices=list(_DEFAULT_GIB), help="repeatable; default: all three")
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="repeatable; default: all")
    parser.add_argument("--size-gib", type=float, help="size of the state; default: gpt 2, small 0.25, single 4")
    parser.add_argument("--single-gib", type=float, help="size of the single tensor, whatever --size-gib says")
    parser.add_argument("--small-count", type=int, default=20_000, help="tensors in the case small")
    parser.add_argument("--repeats", type=int, default=4, help="rounds, the first included")
    parser.add_argument("--busy-repeats", type=int, default=2, help="rounds with a compute loop, for background peers")
    parser.add_argument(
        "--budget", default="full", help='staging budget of the engine: "full" (the state fits), "auto", or MiB'
    )
    parser.add_argument("--writers", type=int, help="writer threads of the engine; default: its own default")
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
    arguments.case = arguments.case or list(_DEFAULT_GIB)
    arguments.peer = arguments.peer or list(PEERS)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases; returns the exit status."""
    arguments = parse_arguments(argv)
    os.makedirs(arguments.dir, exist_ok=True)
    # async_save wants a group with a CPU backend; over loopback, whatever the host's name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, 1, True)  # type: ignore[attr-defined]  # a name of torch._C
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    environment = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    print(report.LEGEND, flush=True)
    results = []
    try:
        for case in arguments.case:
            size = int((arguments.size_gib or _DEFAULT_GIB[case]) * GIB)
            if case == "single" and arguments.single_gib:
                size = int(arguments.single_gib * GIB)
            lack = _lack(size, arguments.dir, asynchronous="dcp_async" in arguments.peer)
            if lack:
                print(f"\n== {case}: left out: {lack}; --size-gib makes it smaller", flush=True)
                continue
            result = _run_case(make_state(case, size, small_count=arguments.small_count), arguments)
            results.append(result)
            print("\n" + report.render(result), flush=True)
    finally:
        dist.destroy_process_group()
    print(f"\nload average after: {os.getloadavg()[0]:.2f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"environment": environment, "cases": [_as_json(result) for result in results]}, file, indent=1)
    missed = arguments.check and any(goal.met is False for result in results for goal in result.goals())
    return 1 if missed or not results or any(result.failures for result in results) else 0


def _lack(size: int, directory: str, *, asynchronous: bool) -> str:
    """What this machine lacks for a state of ``size`` bytes; empty if nothing."""
    free = shutil.disk_usage(directory).free
    need = int(1.25 * size) + 128 * MIB
    if free < need:
        return f"needs {need / GIB:.1f} GiB of disk, {free / GIB:.1f} GiB are free"
    # The state, the engine's pool, which stays, and async_save's copy of the state next to it.
    need = int((3.2 if asynchronous else 2.2) * size) + 512 * MIB
    with open("/proc/meminfo", encoding="ascii") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    if available < need:
        return f"needs {need / GIB:.1f} GiB of memory, {available / GIB:.1f} GiB are available"
    return ""


def _budget(option: str, state: State) -> int | None:
    if option == "auto":
        return None
    if option == "full":
        return -(-(state.bytes + state.items * _FULL_SLACK_PER_ITEM + _FULL_SLACK_BYTES) // MIB) * MIB
    return int(option) * MIB


# -- one case --------------------------------------------------------------------------------------------------------


def _run_case(state: State, arguments: argparse.Namespace) -> CaseResult:
    load = os.getloadavg()[0]
    directory = tempfile.mkdtemp(prefix=f"{state.case}-", dir=arguments.dir)
    result = CaseResult(
        case=state.case,
        bytes=state.bytes,
        items=state.items,
        budget=_budget(arguments.budget, state),
        samples={name: [] for name in arguments.peer},
        busy={},
        background=frozenset(),
        failures={},
        load_before=load,
    )
    peers: dict[str, Peer] = {}
    try:
        for name in arguments.peer:
            try:
                peers[name] = make_peer(name, os.path.join(directory, name), result.budget, arguments.writers)
            except Exception as error:  # the others' figures are still worth having
                result.failures[name] = f"{type(error).__name__}: {error}"
        result.background = frozenset(name for name, peer in peers.items() if peer.background)
        _rounds(state, peers, result, arguments)
    finally:
        for peer in peers.values():
            peer.close()
        shutil.rmtree(directory, ignore_errors=True)
    return result


def _rounds(state: State, peers: dict[str, Peer], result: CaseResult, arguments: argparse.Namespace) -> None:
    loop = measure.ComputeLoop()
    step = 0
    for number in range(arguments.repeats + arguments.busy_repeats):
        busy = number >= arguments.repeats
        copy = measure.plain_copy(state.tensors(), GIB)
        # A different one goes first each time: nobody always comes after the one that leaves most behind.
        order = list(peers)[number % len(peers) :] + list(peers)[: number % len(peers)] if peers else []
        for name in order:
            peer = peers[name]
            if name in result.failures or (busy and not peer.background):
                continue
            step += 1
            _progress(f"{state.case} round {number + 1}/{arguments.repeats + arguments.busy_repeats} {name}")
            measure.settle(arguments.pause)
            try:
                if busy:
                    result.busy.setdefault(name, []).append(_save_busy(peer, state, step, loop))
                else:
                    result.samples[name].append(_save_quiet(peer, state, step, number, copy))
            except Exception as error:
                result.failures[name] = f"{type(error).__name__} in round {number + 1}: {error}"
            finally:
                _remove_saves(peer)
    _progress("")


def _save_quiet(peer: Peer, state: State, step: int, number: int, copy: measure.Cost) -> Sample:
    with measure.RssSampler() as memory:
        machine = measure.machine_cpu_seconds()
        cpu, start = time.process_time(), time.perf_counter()
        pending = peer.save(state, step)
        returned = time.perf_counter()
        figures = pending.result()
        durable = time.perf_counter()
        used = time.process_time() - cpu
        machine = measure.machine_cpu_seconds() - machine
    files = list(measure.files_under(peer.root))
    written = sum(os.path.getsize(path) for path in files)
    if written < state.bytes:
        raise RuntimeError(f"{written} bytes are on disk after a save of {state.bytes}")
    return Sample(
        round=number,
        stall=returned - start,
        durable=durable - start,
        cpu=max(0.0, used - memory.cpu_seconds),
        copy_cpu=copy.cpu_seconds,
        copy_seconds=copy.seconds,
        other_cpu=max(0.0, machine - used),
        extra_rss=memory.extra,
        cached=sum(measure.cached_bytes(path) for path in files),
        written=written,
        figures=figures,
    )


def _save_busy(peer: Peer, state: State, step: int, loop: measure.ComputeLoop) -> BusySample:
    loop.calibrate()
    start = time.perf_counter()
    pending = peer.save(state, step)
    stall = time.perf_counter() - start
    run = loop.run_until(pending.done)
    durable = time.perf_counter() - start
    pending.result()
    return BusySample(stall, durable, run.slowdown, run.hiccup, run.alone, run.alone_hiccup)


def _remove_saves(peer: Peer) -> None:
    """Removes what the peer saved, but not the files that it keeps open directly below its root, such as a lock."""
    measure.drop_cache(measure.files_under(peer.root))
    for entry in os.scandir(peer.root):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def _as_json(result: CaseResult) -> dict[str, Any]:
    content = dataclasses.asdict(dataclasses.replace(result, background=frozenset()))
    content["background"] = sorted(result.background)
    content["rows"] = [dataclasses.asdict(row) for row in result.rows()]
    content["goals"] = [dataclasses.asdict(goal) for goal in result.goals()]
    return content


if __name__ == "__main__":
    sys.exit(main())
