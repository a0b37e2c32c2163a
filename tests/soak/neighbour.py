"""Grows, reads files, shrinks, and again, until its standard input ends: what else runs on a training node.

    python -m tests.soak.neighbour GROUP BYTES SECONDS DIRECTORY

It enters the group (and is idle if BYTES is 0), touches BYTES in pieces of a MiB over SECONDS, stays for a while, reads what
lies in DIRECTORY with plain buffered reads (the pages become file cache of the group), and gives all of it back. Given ``hold``
as a fifth argument it grows once and stays.
"""

from __future__ import annotations

import mmap
import os
import select
import sys

MIB = 1 << 20


def told_to_stop(seconds: float) -> bool:
    """Waits; whether nobody is there any more."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) and not os.read(0, 1 << 16)


def read_all(directory: str) -> None:
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                with open(os.path.join(folder, name), "rb") as file:
                    while file.read(MIB // 4):
                        pass
            except OSError:
                pass  # retention removed it


def main() -> None:
    group, size, seconds, directory, *options = sys.argv[1:]
    with open(os.path.join(group, "cgroup.procs"), "w") as procs:
        procs.write(str(os.getpid()))
    print("up", flush=True)
    if not sys.stdin.readline():
        return
    count = int(size) // MIB
    blocks: list[mmap.mmap] = []
    while not count:
        if told_to_stop(60.0):
            return
    while True:
        for _ in range(count):
            blocks.append(mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            blocks[-1].write(b"x" * MIB)
            if told_to_stop(float(seconds) / max(count, 1)):
                return
        if "hold" in options:
            print("grown", flush=True)
            while not told_to_stop(60.0):
                pass
            return
        read_all(directory)
        if told_to_stop(float(seconds) / 2):
            return
        while blocks:
            blocks.pop().close()
            if told_to_stop(float(seconds) / max(count, 1) / 4):
                return
        if told_to_stop(float(seconds) / 2):
            return


if __name__ == "__main__":
    main()
