"""Takes values out of JSON that may be damaged or lying: of the type and range asked for, or an error names the file.

Shared by the readers of the commit record and of the part manifests. Nothing here knows what the records mean.
"""

from __future__ import annotations

import array
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ckpt_engine.errors import CheckpointError, CorruptionError

_LIMIT = 1 << 63  # no offset, size or step of a real file is as large
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HEX = re.compile(r"[0-9a-f]*")
_SAVE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


class JsonReader:
    """Takes values out of parsed JSON, or raises naming the file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def fail(self, message: str, *, tensor: str | None = None) -> NoReturn:
        name = os.path.basename(self.path)
        raise CorruptionError(
            f"{name} is damaged: {message}",
            file=name,
            tensor=tensor,
            path=self.path,
            phase="verify",
            hint="restore an older step; engine.verify(step) tells which ones are whole",
        )

    def load(self, data: bytes) -> Any:
        try:
            # Not json.loads(data): that guesses UTF-16 and UTF-32 too, so that damage could still parse.
            return json.loads(data.decode("ascii"), object_pairs_hook=_unique, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:  # also an integer with more digits than Python converts
            self.fail(f"it is no JSON that the engine writes ({type(error).__name__}: {str(error)[:200]})")

    def want(self, holder: Any, key: str, kind: type) -> Any:
        if type(holder) is not dict:
            self.fail(f"a {type(holder).__name__} stands where an object with {key!r} was expected")
        if key not in holder:
            self.fail(f"{key!r} is missing")
        value = holder[key]
        if type(value) is not kind:  # not isinstance: True is no step
            self.fail(f"{key!r} is a {type(value).__name__}, expected {kind.__name__}")
        return value

    def natural(self, holder: Any, key: str, *, low: int = 0) -> int:
        value: int = self.want(holder, key, int)
        if not low <= value < _LIMIT:
            self.fail(f"{key!r} is outside {low} ... 2**63-1")
        return value

    def digest(self, holder: Any, key: str) -> str:
        value: str = self.want(holder, key, str)
        if not _SHA256.fullmatch(value):
            self.fail(f"{key!r} is {value[:80]!r}, expected 64 hexadecimal digits")
        return value

    def save_id(self, holder: Any) -> str:
        value: str = self.want(holder, "save_id", str)
        if not _SAVE_ID.fullmatch(value):
            self.fail(f"'save_id' is {value[:80]!r}, expected at most 64 letters and digits")
        return value

    def one_of(self, holder: Any, key: str, known: str) -> str | None:
        """``known`` or null."""
        value = holder.get(key, 0) if type(holder) is dict else 0
        if value is not None and value != known:
            shown = repr(value[:80]) if type(value) is str else f"a {type(value).__name__}"
            self.fail(f"{key!r} is {shown}, expected {known!r} or null")
        return None if value is None else known

    def check_kind(self, holder: Any, kind: str, newest: int) -> None:
        found = self.natural(holder, "format")
        if found > newest:
            raise CheckpointError(
                f"{os.path.basename(self.path)} has format {found}, newer than {newest}, the newest that is known here",
                path=self.path,
                phase="verify",
                hint="upgrade ckpt-engine to the version that wrote it, or a later one",
            )
        named = self.want(holder, "kind", str)
        if found < 1 or named != kind:
            self.fail(f"it has format {found} and kind {named[:40]!r}, expected {newest} and {kind!r}")

    def check_name(self, name: str) -> None:
        # A record must not be able to point a reader or a clean-up at a file outside its directory.
        if name in ("", ".", "..") or "/" in name or "\0" in name or len(name) > 255:
            self.fail(f"it names the file {name[:80]!r}, expected a plain file name")

    def crcs(self, holder: Any, key: str, count: int, checksum: str | None) -> Sequence[int | None]:
        text: str = self.want(holder, key, str)
        expected = 0 if checksum is None else 8 * count
        if len(text) != expected or not _HEX.fullmatch(text):
            self.fail(f"{key!r} has {len(text)} characters, expected {expected} hexadecimal digits")
        if checksum is None:
            return [None] * count
        words = array.array("I", bytes.fromhex(text))
        if sys.byteorder == "little":
            words.byteswap()
        return words


def all_natural(values: list[Any]) -> bool:
    """Whether all are whole numbers that a file or tensor can have as offset or size."""
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < _LIMIT)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number that the engine writes")
