"""Every knob of the engine, in one place, each with its reason."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ckpt_engine.errors import ConfigError

MIB = 1 << 20

#: Smallest extent. Below this the per-call cost of a write outweighs the bytes in it.
MIN_EXTENT_BYTES = 1 * MIB

#: Smallest staging budget: two extents of the smallest size, so that one can be filled while the other is written.
MIN_BUDGET_BYTES = 2 * MIN_EXTENT_BYTES


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of a :class:`ckpt_engine.CheckpointEngine`.

    Attributes:
        writers: threads that checksum and write, and shard files per rank. Two keep one device busy; network storage
            with many servers wants more.
        copy_threads: threads that copy tensors into the staging pool. They are the engine's own, since a trainer under
            Ray runs with ``OMP_NUM_THREADS=1``. 0 means "as many as cores, at most 4".
        staging_budget: bytes of host memory that the engine may hold, or ``"auto"``: derived from the memory limits of
            the machine, the container and Ray, at most 8 GiB. A state larger than the budget streams through it.
        extent_bytes: size of one piece of the staging pool and of one write, a multiple of 4096. Large enough for the
            device, small enough to overlap. Made smaller when the budget holds fewer than four.
        direct_io: ``True``: O_DIRECT or an error; ``False``: buffered; ``"auto"``: O_DIRECT where the file system takes it.
        checksum: store and fill in CRC-32 of every item. Off means that a flipped bit can't be found.
        keep_last: newest committed checkpoints to keep, or ``None`` for all.
        keep_every: steps that are multiples of this are kept for ever.
        max_in_flight: saves that may be on their way at once; ``save()`` waits for the oldest when there are more.
        commit_timeout: seconds that a rank waits for the others, at each agreement.
        on_error: ``"raise"``: a failed background save raises at the next ``poll``/``save``/``wait``/``close``;
            ``"warn"``: it is logged and training goes on.
        retries: times that a write is tried again after a transient error (EIO, EAGAIN, ESTALE, ETIMEDOUT …).
        populate: touch the whole pool when it is made, so that the first save is as fast as the others.
        verify_replicas: ranks hold copies of replicated values and one rank writes them. ``"values"`` compares the
            non-tensor ones and raises where they differ; ``"all"`` compares tensors too (costs one CRC over each);
            ``"off"`` compares nothing, and the rank that DCP's plan gives the key to wins, the same one every time.
        allow_pickle: on restore, unpickle values of types that ``torch.load(weights_only=True)`` refuses. A pickle can run
            any code: switch it off for checkpoints from somebody else.
    """

    writers: int = 2
    copy_threads: int = 0
    staging_budget: int | Literal["auto"] = "auto"
    extent_bytes: int = 16 * MIB
    direct_io: bool | Literal["auto"] = "auto"
    checksum: bool = True
    keep_last: int | None = None
    keep_every: int | None = None
    max_in_flight: int = 2
    commit_timeout: float = 600.0
    on_error: Literal["raise", "warn"] = "raise"
    retries: int = 3
    populate: bool = False
    verify_replicas: Literal["values", "all", "off"] = "values"
    allow_pickle: bool = True

    def __post_init__(self) -> None:
        def need(ok: bool, option: str, expected: str) -> None:
            if not ok:
                raise ConfigError(
                    f"EngineConfig.{option} is {getattr(self, option)!r}, expected {expected}", phase="config"
                )

        def whole(value: Any, low: int) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= low

        need(whole(self.writers, 1) and self.writers <= 256, "writers", "a whole number from 1 to 256")
        need(whole(self.copy_threads, 0) and self.copy_threads <= 256, "copy_threads", "a whole number from 0 to 256")
        need(
            self.staging_budget == "auto" or whole(self.staging_budget, MIN_BUDGET_BYTES),
            "staging_budget",
            f'"auto" or at least {MIN_BUDGET_BYTES} bytes (two extents of {MIN_EXTENT_BYTES} bytes)',
        )
        need(
            whole(self.extent_bytes, MIN_EXTENT_BYTES) and self.extent_bytes % 4096 == 0,
            "extent_bytes",
            f"a multiple of 4096 of at least {MIN_EXTENT_BYTES}",
        )
        need(self.direct_io in (True, False, "auto"), "direct_io", 'True, False or "auto"')
        need(isinstance(self.checksum, bool), "checksum", "True or False")
        need(self.keep_last is None or whole(self.keep_last, 1), "keep_last", "None or at least 1")
        need(self.keep_every is None or whole(self.keep_every, 1), "keep_every", "None or at least 1")
        need(whole(self.max_in_flight, 1), "max_in_flight", "at least 1")
        need(
            isinstance(self.commit_timeout, (int, float)) and 0 < self.commit_timeout < float("inf"),
            "commit_timeout",
            "a positive number of seconds",
        )
        need(self.on_error in ("raise", "warn"), "on_error", '"raise" or "warn"')
        need(whole(self.retries, 0), "retries", "0 or more")
        need(isinstance(self.populate, bool), "populate", "True or False")
        need(isinstance(self.allow_pickle, bool), "allow_pickle", "True or False")
        need(self.verify_replicas in ("values", "all", "off"), "verify_replicas", '"values", "all" or "off"')
