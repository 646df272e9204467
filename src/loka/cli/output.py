"""What goes to stdout: tables for people, JSON for programs. Nothing else ever does."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["cell", "print_json", "print_tables"]

# Where nobody watches, a table is as wide as its content: a file or a pipe has no width to fit.
_UNBOUNDED = 10_000


def print_tables(*parts: Any) -> None:
    """Print rich renderables, or lines of plain text, to stdout."""
    from rich.console import Console
    from rich.text import Text

    watched = sys.stdout.isatty()
    console = Console(file=sys.stdout, highlight=False, width=None if watched else _UNBOUNDED)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part)


def print_json(value: Any) -> None:
    """Print one JSON document to stdout; what is not finite is null."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    sys.stdout.write(text + "\n")


def cell(text: str) -> str:
    """Text as a cell of a table: square brackets are markup to rich."""
    from rich.markup import escape

    return escape(text)
