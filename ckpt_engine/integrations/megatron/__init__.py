"""Megatron saves on threads of the trainer: ``install()`` changes megatron-core (and NVRx's queue) in place.

>>> import ckpt_engine.megatron as m
>>> m.install()                                                                       # doctest: +SKIP

or, with nothing changed, objects for those who make theirs: :class:`ThreadedSaveStrategy`, :class:`ThreadAsyncCallsQueue`, and
:mod:`.bridge` for Megatron-Bridge.

From then on every ``dist_checkpointing.save`` of this process, synchronous or asynchronous, through whatever framework and
queue, goes through the engine: staged into a pool of bounded size on the caller's thread, written with O_DIRECT and
checksums by threads, reported and finalised on Megatron's own sequence of collectives. Stock loaders read the result; on top
of stock's files it has part manifests and a commit record, written last (:mod:`.verdict`).

Object stores are reached through multi-storage-client, as Megatron does it (``--enable-msc``, ``msc://profile/path``).

Not here: local checkpoints and formats other than ``torch_dist``, which go stock's way.
"""

from __future__ import annotations

import atexit
import logging
from typing import TYPE_CHECKING, Any

from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import ConfigError
from ckpt_engine.integrations.megatron import flags, seams, session, training
from ckpt_engine.integrations.megatron.flags import add_arguments, config_from_args
from ckpt_engine.integrations.megatron.queues import ThreadAsyncCallsQueue
from ckpt_engine.integrations.megatron.seams import SelfCheck
from ckpt_engine.integrations.megatron.write import unfinished

if TYPE_CHECKING:
    from ckpt_engine.integrations.megatron.strategy import ThreadedSaveStrategy

__all__ = [
    "SelfCheck",
    "ThreadAsyncCallsQueue",
    "ThreadedSaveStrategy",
    "add_arguments",
    "check",
    "config_from_args",
    "install",
    "install_from_args",
    "install_from_environment",
    "self_check",
    "uninstall",
]

log = logging.getLogger("ckpt_engine")


def __getattr__(name: str) -> Any:
    if name == "ThreadedSaveStrategy":  # a subclass of one of Megatron's: importing this package imports no Megatron
        from ckpt_engine.integrations.megatron.strategy import ThreadedSaveStrategy

        return ThreadedSaveStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def self_check() -> tuple[SelfCheck, ...]:
    """What of megatron-core and nvidia-resiliency-ext is there, and whether it is as needed. Changes nothing."""
    return tuple(seams.look(target) for target in seams.TARGETS if target not in seams.applied())


def install(config: EngineConfig | None = None) -> tuple[SelfCheck, ...]:
    """Makes all Megatron saves of this process go through the engine. Call it on every rank, with the same settings.

    Idempotent; may run before or after frameworks import Megatron. A second call takes over a new ``config`` and packages that
    have become importable since.

    Args:
        config: settings; ``keep_last``, ``keep_every``, ``max_in_flight`` and ``on_error`` are the framework's business here.

    Returns:
        What was found of each package.

    Raises:
        ConfigError: megatron-core isn't there, or not as this engine needs it. Nothing was changed then.
    """
    checks = self_check()
    for check in checks:
        log.log(logging.WARNING if check.missing else logging.INFO, "%s", check)
    # An NVRx that is not as expected (older ones keep other files) stays as it is: its queues refuse our saves, loudly.
    broken = [check for check in checks if check.missing and check.target == seams.REQUIRED]
    if broken:
        raise ConfigError(
            "this Megatron can't be changed, its own savers stay in use:\n" + "\n".join(map(str, broken)),
            phase="config",
            hint="use a version that the README lists, or report what is missing",
        )
    if any(check.target == seams.REQUIRED and not check.present for check in checks):
        raise ConfigError(
            "there is no Megatron to install into: " + "; ".join(map(str, checks)),
            phase="config",
            hint="pip install megatron-core",
        )
    if config is not None or not seams.applied():
        session.configure(config if config is not None else EngineConfig(), unfinished=len(unfinished))
    for check in checks:
        if check.present and not check.missing:
            seams.apply(check.target)
    training.watch()
    return checks


def check(sharded_state_dict: Any) -> None:
    """Tells before step 0 what a save of this sharded state dict would refuse. Collective; writes nothing, installs nothing.

    Raises:
        StateError: shards that leave something out, overlap or lie beyond the edge, objects that lack a shard or can't be
            pickled: a line for each, with the boxes and the ranks, the same on every rank.
    """
    from ckpt_engine.integrations.megatron.planning import check_state

    check_state(session.core().session(), sharded_state_dict)


def install_from_args(args: Any) -> bool:
    """Installs if ``--ckpt-engine threads`` (or ``CKPT_ENGINE``) says so; see :mod:`.flags`. Returns whether it does."""
    if not flags.wanted(args):
        return False
    install(config_from_args(args))
    return True


def install_from_environment() -> bool:
    """The same, for processes without arguments of their own."""
    return install_from_args(None)


def uninstall() -> None:
    """Takes all changes back. Idempotent.

    Waits until what is staged is written. A save that is still to be finalised ends as it began.
    """
    if unfinished:
        log.warning(
            "%d saves are not finalised yet; call their finalize functions: %s", len(unfinished), list(unfinished)
        )
    training.restore()
    seams.restore()
    session.reset(unfinished=len(unfinished))


@atexit.register
def _say_what_is_lost() -> None:
    for write in list(unfinished):
        log.error("%r was never finalised: the checkpoint is not complete", write)
