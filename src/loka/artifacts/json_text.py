"""JSON that people review: one line a column, one line a small record, the same bytes for the same values."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from loka.errors import ArtifactError

__all__ = ["check_finite", "json_text"]

_CONTAINERS = (dict, list, tuple)
_RECORD_FIELDS = 8  # objects of scalars up to this many fields stay on one line


def json_text(value: Any) -> str:
    """`value` (plain dicts, lists and scalars) as indented JSON with a final newline."""
    return _text(value, "") + "\n"


def _text(value: Any, indent: str) -> str:
    if isinstance(value, dict) and value:
        nested = any(isinstance(item, _CONTAINERS) and item for item in value.values())
        flat = len(value) <= _RECORD_FIELDS and not nested
        inner = "" if flat else indent + "  "
        parts = [f"{_scalar(key)}: {_text(item, inner)}" for key, item in value.items()]
        return "{" + ", ".join(parts) + "}" if flat else _block("{", parts, "}", indent)
    if isinstance(value, list | tuple) and any(isinstance(item, _CONTAINERS) for item in value):
        return _block("[", [_text(item, indent + "  ") for item in value], "]", indent)
    return _scalar(value)


def _block(opening: str, parts: list[str], closing: str, indent: str) -> str:
    inside = f",\n{indent}  ".join(parts)
    return f"{opening}\n{indent}  {inside}\n{indent}{closing}"


def _scalar(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def check_finite(value: Any, *, path: str, where: str) -> None:
    """Refuse the first NaN or infinity in `value` (plain dicts, lists and scalars).

    Args:
        value: What is checked.
        path: JSON path of `value`: `$.body`.
        where: The file, for the message.

    Raises:
        ArtifactError: naming the path and the value.
    """
    found = _first_nonfinite(value, path)
    if found is not None:
        at, number = found
        raise ArtifactError(
            f"`{where}` at `{at}`: {number} is not a finite number",
            hint="files hold finite numbers only: leave the entry out, or use null where it may be absent",
        )


def _first_nonfinite(value: Any, path: str) -> tuple[str, float] | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else (path, value)
    if isinstance(value, dict):
        children = ((f"{path}.{key}", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        children = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    else:
        return None
    for at, item in children:
        if isinstance(item, (float, *_CONTAINERS)) and (found := _first_nonfinite(item, at)):
            return found
    return None
