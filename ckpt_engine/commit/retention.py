"""What may be removed from a checkpoint directory, and how: old checkpoints, and what a killed run left behind.

Nothing is ever deleted under a name that readers look at. A checkpoint to remove is first renamed to a passing name
(``iter_N.deleting-...``), which is made durable, and its files are removed after that: a kill in between leaves a
folder that no reader takes for a checkpoint, never a checkpoint with half of its files.

Only directories with a valid commit record of ours are ever retired. Uncommitted, foreign, unreadable and linked ones,
and those of a newer engine, stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid

from ckpt_engine.commit import listing
from ckpt_engine.commit.manifest import COMMIT_NAME
from ckpt_engine.commit.names import PART_DIRECTORY, PROBE_PREFIX, Leftover, aside_name, parse_leftover, step_name
from ckpt_engine.errors import CheckpointError
from ckpt_engine.storage import fs

log = logging.getLogger("ckpt_engine")


def retire(root: str, committed_step: int, tracked: int | None, keep_last: int, keep_every: int | None) -> list[str]:
    """Renames the checkpoints that retention doesn't keep, newest first, and makes that durable.

    Only steps up to ``committed_step`` are looked at: a newer number is another run's, or one that a rollback left. The
    newest ``keep_last`` of them that are complete stay, and ``committed_step``, ``tracked`` and the multiples of
    ``keep_every``. Newest is what was committed last, or a branch that a rollback abandoned would be kept instead of the
    live one. One that is committed but lacks bytes doesn't count as kept, or a single damaged checkpoint would cost the
    last good one.

    Returns:
        The paths that are to be removed now.
    """
    own = os.path.join(root, step_name(committed_step))
    if listing.commit_or_warn(own, committed_step) is None:
        log.warning("nothing is retired: step %d is not committed in %s", committed_step, root)
        return []
    candidates = [step for step, real in listing.step_entries(root) if real and step <= committed_step]
    kept = 0
    aside: list[str] = []
    for step, record in listing.newest_first(root, candidates):
        path = os.path.join(root, step_name(step))
        protected = step in (committed_step, tracked) or (keep_every is not None and step % keep_every == 0)
        if protected and kept >= keep_last:
            continue
        if kept < keep_last:
            lacking = listing.shortage(path, record)
            if lacking is None:
                kept += 1
            else:
                log.warning("step %d is damaged and neither counted as kept nor removed: %s", step, lacking)
        elif (name := _set_aside(root, path, step)) is not None:
            aside.append(name)
    if aside:
        # Not before this is on disk may files go: after a power cut the old name could be back, with files missing.
        fs.fsync_dir(root)
    return aside


def clear_leftovers(root: str, *, exclusive: bool) -> list[str]:
    """Removes the directories of saves and removals that were cut off; touches nothing with another name.

    A replace that was cut off between its two renames has left the earlier checkpoint under an ``.old-`` name and none
    under the step's own: that one is put back instead.

    Args:
        root: the checkpoint directory, locked.
        exclusive: whether the lock means something. If not, another engine may be at work, and nothing is touched.

    Returns:
        The removed paths.
    """
    found = _leftovers(root)
    if found and not exclusive:
        names = [os.path.basename(path) for path, _ in found]
        log.warning("%s: left-overs stay, since this file system has no locks: %s", root, names)
        return []
    removed = []
    for path, leftover in found:
        if leftover.kind == "old" and _put_back(root, path, leftover.step):
            continue
        if listing.remove_quietly(path):
            removed.append(path)
    return removed + [path for path in _temporary_files(root) if exclusive and _unlinked(path)]


def _leftovers(root: str) -> list[tuple[str, Leftover]]:
    """Newest first, so that of several earlier checkpoints of one step the newest is put back."""
    found = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                leftover = parse_leftover(entry.name)
                if leftover is not None and entry.is_dir(follow_symlinks=False):
                    found.append((_commit_time(entry.path), entry.path, leftover))
    except OSError as error:  # the save that is about to begin will say so, if it matters
        log.warning("left-overs can't be looked for in %s: %s", root, error)
    return [(path, leftover) for _, path, leftover in sorted(found, reverse=True)]


def _temporary_files(root: str) -> list[str]:
    """Half-written trackers and probes of a run that was killed in just that moment."""
    prefixes = (fs.TEMP_PREFIX, PROBE_PREFIX)
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        return [e.path for e in entries if e.name.startswith(prefixes) and e.is_file(follow_symlinks=False)]
    return []


def _unlinked(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError as error:
        log.warning("the left-over %s can't be removed: %s", path, error)
        return False
    return True


def _commit_time(path: str) -> int:
    try:
        return os.stat(os.path.join(path, PART_DIRECTORY, COMMIT_NAME)).st_mtime_ns
    except OSError:
        return 0


def _put_back(root: str, path: str, step: int) -> bool:
    """Gives the replaced checkpoint ``path`` its name back if the step has none. ``True``: don't remove it."""
    final = os.path.join(root, step_name(step))
    try:
        if listing.read_commit(path, step) is None or listing.read_commit(final, step) is not None:
            return False
        if (reason := listing.foreign(final, step)) is not None:
            log.warning("%s is left as it is: %s %s", path, final, reason)
            return True
        blocking = _set_aside(root, final, step) if os.path.lexists(final) else None
        os.rename(path, final)
        fs.fsync_dir(root)
    except (OSError, CheckpointError) as error:  # not understood, hence not ours to remove
        log.warning("%s is left as it is: %s", path, error)
        return True
    if blocking is not None:
        listing.remove_quietly(blocking)
    log.warning("step %d is back: a save that was replacing it was cut off", step)
    return True


def _set_aside(root: str, path: str, step: int) -> str | None:
    name = os.path.join(root, aside_name(step, "deleting", uuid.uuid4().hex))
    try:
        os.rename(path, name)
    except OSError as error:
        log.warning("step %d can't be renamed now: %s", step, error)
        return None
    return name
