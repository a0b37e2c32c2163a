"""Megatron-LM's tracker, ``latest_checkpointed_iteration.txt``, replaced in one durable step.

Stock opens it, which empties it, and then writes: a crash in between leaves an empty tracker, and the next run finds no
checkpoint at all. Here the old one stays whole until the new one is on the device. Only the opening of that one file for
writing is changed; all else, and object storage, is the opener's own business.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from ckpt_engine.storage.fs import write_atomic

log = logging.getLogger("ckpt_engine")

NAME = "latest_checkpointed_iteration.txt"

_STORAGE = "megatron.core.msc_utils"


def opener(original: Callable[..., Any]) -> Callable[..., Any]:
    """An ``open`` that gives a :class:`Replacement` for a tracker that is to be written."""

    @functools.wraps(original)
    def open_(*arguments: Any, **options: Any) -> Any:
        file = options.get("file", arguments[0] if arguments else None)
        mode = options.get("mode", arguments[1] if len(arguments) > 1 else "r")
        if mode in ("w", "wt") and isinstance(file, (str, os.PathLike)):
            path = os.fspath(file)
            if os.path.basename(path) == NAME and not _object_storage(path):
                return Replacement(path)
        return original(*arguments, **options)

    return open_


def _object_storage(path: str) -> bool:
    """Whether a path leads to object storage. With multi-storage-client even one that looks local may: it maps paths."""
    feature = getattr(sys.modules.get(_STORAGE), "MultiStorageClientFeature", None)
    if feature is None or not feature.is_enabled():
        return False
    try:
        client, _ = feature.import_package().resolve_storage_client(path)
        return not client.is_default_profile()
    except Exception as error:  # an older or a newer one: better a tracker in place than one in the wrong place
        log.debug("%s is left to multi-storage-client: %s", path, error)
        return True


class Storage:
    """Megatron-LM's ``maybe_msc`` with another ``open``."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        return opener(value) if name == "open" else value


class Replacement:
    """A text file that is open for writing and takes its name when it is closed, unless an error closes it."""

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path)  # stock writes through a link
        self._text: list[str] | None = []

    def write(self, text: str) -> int:
        if self._text is None:
            raise ValueError("I/O operation on closed file")
        self._text.append(text)
        return len(text)

    def flush(self) -> None:
        """Does nothing: half a tracker is of no use to anybody."""

    def close(self) -> None:
        text, self._text = self._text, None
        if text is not None:
            write_atomic(self._path, "".join(text).encode())

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self._text = None
        self.close()
