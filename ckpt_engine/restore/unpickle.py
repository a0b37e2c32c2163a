"""Unpickles ``.metadata`` without letting it run code.

Stock DCP writes ``.metadata`` as a plain pickle, and a plain pickle can call anything when it is loaded. Only what such
a file has reason to hold is let through: data classes and enumerations of ``torch.distributed.checkpoint`` (and of the
places where older versions of torch, and Megatron-Core, keep theirs), torch's dtypes, layouts and sizes, containers and
paths. Any other name is refused, and the error says which.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ckpt_engine.errors import CheckpointError, CorruptionError

_CLASS_HOMES = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "megatron.core.dist_checkpointing.",
)
_BUILTINS = (dict, list, set, frozenset, tuple, bytearray, bytes, str, int, float, bool, complex, slice)
_COLLECTIONS = (collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter)
_PATHS = {
    "Path": pathlib.PurePath,
    "PurePath": pathlib.PurePath,
    "PosixPath": pathlib.PurePosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}


class _Refused(pickle.UnpicklingError):
    """A name outside the list."""


def _enum_member(kind: Any, name: Any) -> Any:
    """Stands in for ``getattr``, with which some versions of Python pickle members of enumerations; gets only those."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind.__members__[name]
    raise _Refused(f"builtins.getattr for {name!r}")


def _layout(name: Any) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"there is no layout {name!r}")
    return found


def _table() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {("builtins", kind.__name__): kind for kind in _BUILTINS}
    table |= {("collections", kind.__name__): kind for kind in _COLLECTIONS}
    # Paths of the machine that saved are data here; pure ones can't touch a file. Python 3.13 keeps them elsewhere.
    table |= {(home, name): kind for name, kind in _PATHS.items() for home in ("pathlib", "pathlib._local")}
    table["builtins", "getattr"] = _enum_member
    table["torch", "Size"] = torch.Size
    table["torch", "device"] = torch.device
    table["torch.serialization", "_get_layout"] = _layout
    return table


_TABLE = _table()


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _TABLE.get((module, name))
        if found is not None:
            return found
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        # No dots: "metadata" + "os.system" would reach whatever a module has imported.
        if "." not in name and module.startswith(_CLASS_HOMES):
            try:
                found = super().find_class(module, name)
            except (ImportError, AttributeError) as error:
                raise _Refused(f"{module}.{name}, which can't be imported here ({error})") from error
            # Data classes and enumerations only: constructors of the others open files and process groups.
            if (
                isinstance(found, type)
                and found.__module__.startswith(_CLASS_HOMES)
                and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
            ):
                return found
        raise _Refused(f"{module}.{name}")


def load_metadata(data: bytes, *, path: str, step: int | None) -> Metadata:
    """The ``Metadata`` in the content of a ``.metadata`` file.

    Raises:
        CorruptionError: it is no pickle of that.
        CheckpointError: it names something that isn't let through.
    """
    try:
        found = _MetadataUnpickler(io.BytesIO(data)).load()
    except _Refused as error:
        raise CheckpointError(
            f".metadata refers to {error}; only DCP's data classes, torch dtypes, containers and paths are loaded",
            step=step,
            path=path,
            phase="restore",
            hint="import or install what defines it; if the name makes no sense, the file is damaged",
        ) from error
    except Exception as error:  # damaged pickles raise nearly everything
        raise _damaged(f"can't be unpickled ({type(error).__name__}: {str(error)[:200]})", path, step) from error
    if not isinstance(found, Metadata):
        raise _damaged(f"holds a {type(found).__name__}, expected Metadata", path, step)
    for field in ("state_dict_metadata", "storage_data"):
        value = getattr(found, field, None)
        if not isinstance(value, dict):
            raise _damaged(f"has {field} of type {type(value).__name__}, expected dict", path, step)
    return found


def _damaged(message: str, path: str, step: int | None) -> CorruptionError:
    return CorruptionError(
        f".metadata {message}",
        file=".metadata",
        step=step,
        path=path,
        phase="restore",
        hint="restore an older step; engine.verify(step) tells which ones are whole",
    )
