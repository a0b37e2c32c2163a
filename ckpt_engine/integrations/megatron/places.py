"""Which place a checkpoint directory of Megatron is: a directory, or a prefix in an object store (``--enable-msc``, ``msc://...``)."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from ckpt_engine.commit.names import absolute_directory
from ckpt_engine.storage import msc
from ckpt_engine.storage.place import LocalPlace, Place

log = logging.getLogger("ckpt_engine")

_STORAGE = "megatron.core.msc_utils"


def place_of(directory: Any) -> Place:
    """The place of a checkpoint directory, or of one that holds them.

    Megatron with MSC sends plain paths through it, too, which its configuration may map to a profile: they go there as well.

    Raises:
        ConfigError: it is neither a path nor a URL that can be used here.
    """
    text = str(directory) if isinstance(directory, os.PathLike) else directory
    if isinstance(text, str):
        if msc.is_url(text):
            return msc.object_place(text)
        if _is_mapped(text):
            return msc.object_place(text)
    return LocalPlace(absolute_directory(directory))


def _is_mapped(path: str) -> bool:
    feature = getattr(sys.modules.get(_STORAGE), "MultiStorageClientFeature", None)
    if feature is None or not feature.is_enabled():
        return False
    try:
        client, _ = feature.import_package().resolve_storage_client(path)
        return not client.is_default_profile()
    except Exception as error:
        log.debug("%s is taken for a path of a file system: %s", path, error)
        return False
