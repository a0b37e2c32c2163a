"""What the subcommands print: tables for people, JSON for programs, and sizes that people type.

Tables are drawn by ``rich`` on a terminal if it is installed; everywhere else they are plain lines, one per row, so that a
pipe gets the same text with and without it. JSON is one object, and nothing else is written to standard output with it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?)(i?B)?", re.IGNORECASE)

#: Colours of the first cell of a row, by its text, and of a title, by how it ends.
_STYLES = {"problem": "bold red", "note": "yellow"}
_TITLE_STYLES = (("does not fit", "bold red"), ("fits by streaming", "bold yellow"), ("fits", "bold green"))


def plain(text: str, stream: TextIO | None = None) -> None:
    """A line of text."""
    (stream or sys.stdout).write(text + "\n")


def show_json(value: Mapping[str, Any]) -> None:
    """One object. A value that JSON doesn't have is an error, not ``NaN``."""
    plain(json.dumps(value, indent=2, allow_nan=False))


def show_rows(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A title, and a table of two columns."""
    if not _on_terminal() or not _draw_rows(title, rows):
        width = max((len(name) for name, _ in rows), default=0)
        plain("\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)]))


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _draw_rows(title: str, rows: Sequence[tuple[str, str]]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    style = next((style for end, style in _TITLE_STYLES if title.endswith(end)), "bold")
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:  # Text: a "[" in a path or key is no markup
        table.add_row(Text(name, style=_STYLES.get(name, "cyan")), Text(text))
    console = Console(file=sys.stdout, highlight=False)
    console.print(Text(title, style=style))
    console.print(table)
    return True


def byte_count(text: str) -> int:
    """A size as people type it, for ``type=`` of an argument: ``40G``, ``512MiB``, ``1.5T`` are powers of 1024, ``40GB`` of 1000."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, expected something like 40G, 512MiB or 1.5T")
    number, unit, suffix = match[1], match[2].upper(), (match[3] or "").lower()
    scale = 1000 ** "KMGTP".index(unit) * 1000 if unit and suffix == "b" else _UNITS[unit]
    return int(float(number) * scale) if "." in number else int(number) * scale


def positive(text: str) -> int:
    """A whole number from 1, for ``type=`` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
