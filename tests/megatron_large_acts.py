"""An act of :mod:`tests.megatron_acts` that takes many tensors."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron_ranks import published, queue, save


def act_many_tensors(rank: int, directory: str) -> Any:
    """B071: 5,000 shards (2,500 on each rank) with few descriptors, and no port."""
    import resource

    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def sockets() -> int:
        with open("/proc/self/net/tcp") as table:
            listening = {line.split()[9] for line in table.readlines()[1:] if line.split()[3] == "0A"}
        mine = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                mine.append(os.readlink(f"/proc/self/fd/{fd}"))
        return sum(f"socket:[{inode}]" in mine for inode in listening)

    world = dist.get_world_size()
    sharded = {
        f"t{n}": ShardedTensor.from_rank_offsets(f"t{n}", torch.full((7,), float(n)), (0, rank, world))
        for n in range(2500)
    }
    open_before, ports = len(os.listdir("/proc/self/fd")), sockets()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_before + 64, hard))
    seconds = []
    calls = queue()
    try:
        for number in range(3):
            start = time.perf_counter()
            request = save(dict(sharded), os.path.join(directory, str(number)), asynchronous=True)
            planned = time.perf_counter()
            calls.schedule_async_request(request)
            staged = time.perf_counter()
            calls.maybe_finalize_async_calls(blocking=True)
            seconds.append((planned - start, staged - planned, time.perf_counter() - staged))
        more_ports = sockets() - ports
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return {
        "published": [published(os.path.join(directory, str(n))) for n in range(3)],
        "ports": more_ports,
        "s": seconds,
    }
