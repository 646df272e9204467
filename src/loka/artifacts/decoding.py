"""Plain JSON values to typed ones, strictly, with messages that name file, path and value."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from loka.errors import ArtifactError

__all__ = ["convert_strictly", "shown"]

T = TypeVar("T")
_AT = re.compile(r" - at `\$(?P<path>.*)`$", re.DOTALL)
_TOKEN = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]|(?P<other>.)")
_MISSING = object()


def shown(value: Any, *, width: int = 60) -> str:
    """A value as JSON, cut to `width` characters."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= width else text[: width - 3] + "..."


def convert_strictly(raw: Any, type_: type[T], *, path: str, where: str) -> T:
    """`raw` as `type_`; nothing is coerced, nothing unknown is dropped.

    Args:
        raw: Plain dicts, lists and scalars.
        type_: A msgspec Struct, or anything msgspec can convert to.
        path: JSON path of `raw`: `$.body`.
        where: The file, for messages.

    Raises:
        ArtifactError: one sentence with file, path and value.
    """
    try:
        value = msgspec.convert(raw, type_, strict=True)
    except msgspec.ValidationError as error:
        raise _explained(error, raw, path=path, where=where) from error
    # msgspec refuses unknown fields of its Structs but drops those of dataclasses (OperandSpec, Requirement).
    unknown = _first_unknown(raw, msgspec.to_builtins(value), path)
    if unknown is not None:
        at, name, known = unknown
        raise ArtifactError(f"`{where}` at `{at}`: unknown field `{name}`", hint=f"known: {', '.join(known)}")
    return value


def _explained(error: msgspec.ValidationError, raw: Any, *, path: str, where: str) -> ArtifactError:
    text = str(error)
    found = _AT.search(text)
    inner = found.group("path") if found else ""
    what = text[: found.start()] if found else text
    what, _, hint = what.partition("\n\nhint: ")
    value = _value_at(raw, inner)
    tail = "" if value is _MISSING or isinstance(value, dict | list) else f" (value {shown(value)})"
    return ArtifactError(
        f"`{where}` at `{path}{inner}`: {_as_clause(what)}{tail}",
        hint=hint or "docs/files.md lists every field with an example",
    )


def _as_clause(text: str) -> str:
    """The sentence without its capital, unless it opens with a name such as OperandSpec(...)."""
    first = text.split(" ", 1)[0]
    return text[:1].lower() + text[1:] if first.istitle() and first.isalpha() else text


def _value_at(raw: Any, path: str) -> Any:
    for token in _TOKEN.finditer(path):
        if token["name"] and isinstance(raw, dict) and token["name"] in raw:
            raw = raw[token["name"]]
        elif token["index"] and isinstance(raw, list) and int(token["index"]) < len(raw):
            raw = raw[int(token["index"])]
        else:
            return _MISSING  # the path goes through a key of a map, which msgspec writes as [...]
    return raw


def _first_unknown(raw: Any, typed: Any, path: str) -> tuple[str, str, list[str]] | None:
    if isinstance(raw, dict) and isinstance(typed, dict):
        for name in raw:
            if name not in typed:
                return path, name, list(typed)
        pairs = [(f"{path}.{name}", raw[name], typed[name]) for name in raw]
    elif isinstance(raw, list) and isinstance(typed, list | tuple):
        if not raw or not isinstance(raw[0], dict | list):
            return None
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(raw, typed, strict=True))]
    else:
        return None
    for at, a, b in pairs:
        if isinstance(a, dict | list) and (found := _first_unknown(a, b, at)):
            return found
    return None
