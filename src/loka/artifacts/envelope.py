"""One JSON envelope for every record: {schema, version, producer, created, environment, body}.

A schema has its own version. The reader takes the current version N, and N - 1 through the schema's upgrade.
Decoding is strict, so that a plan or profile from a stranger is data and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec

import loka
from loka.artifacts.atomic import read_bytes, write_atomically
from loka.artifacts.decoding import convert_strictly, shown
from loka.artifacts.environment import Environment, describe_environment
from loka.artifacts.json_text import check_finite, json_text
from loka.errors import ArtifactError

__all__ = ["Envelope", "Schema", "body_text", "read_envelope", "write_envelope"]

T = TypeVar("T")
_FIELDS = ("schema", "version", "producer", "created", "environment", "body")


@dataclass(frozen=True, slots=True)
class Schema(Generic[T]):
    """One kind of record.

    Attributes:
        name: `loka.plan`.
        version: The version that is written.
        body: The type of the body.
        upgrade: Turns a body of version - 1 (plain dicts and lists) into one of `version`; None where no
            older version is readable.
        check: Raises ArtifactError for a body that the types cannot refuse. Gets the body and the file.
    """

    name: str
    version: int
    body: type[T]
    upgrade: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    check: Callable[[T, str], None] | None = None

    @property
    def kind(self) -> str:
        """The short word of messages: `plan`."""
        return self.name.removeprefix("loka.")

    def decode_body(self, raw: Any, version: int, *, where: str) -> T:
        """The body of a file of any readable version.

        Raises:
            ArtifactError: for a version that cannot be read, or a body that is not what it should be.
        """
        if version > self.version:
            raise ArtifactError(
                f"`{where}` is a {self.kind} of version {version}, this LoKA reads up to {self.version}",
                hint=f"upgrade LoKA (this is {loka.__version__})",
            )
        if version < self.version:
            raw = self._upgraded(raw, version, where=where)
        check_finite(raw, path="$.body", where=where)
        body = convert_strictly(raw, self.body, path="$.body", where=where)
        if self.check is not None:
            self.check(body, where)
        return body

    def _upgraded(self, raw: Any, version: int, *, where: str) -> dict[str, Any]:
        if self.upgrade is None or version != self.version - 1:
            oldest = self.version if self.upgrade is None else self.version - 1
            raise ArtifactError(
                f"`{where}` is a {self.kind} of version {version}, this LoKA reads from {oldest} on",
                hint="make the file anew, or rewrite it with an older LoKA first",
            )
        if not isinstance(raw, dict):
            raise ArtifactError(f"`{where}` at `$.body`: expected an object, got {shown(raw)}")
        return self.upgrade(raw)


@dataclass(frozen=True, slots=True)
class Envelope(Generic[T]):
    """A record as read.

    Attributes:
        schema: `loka.plan`.
        version: The version of the file, before any upgrade.
        producer: What wrote it: `loka 0.1.0`.
        created: When, in ISO 8601 with the time zone.
        environment: Where.
        body: What it says.
    """

    schema: str
    version: int
    producer: str
    created: str
    environment: Environment
    body: T


def body_text(schema: Schema[T], body: T, *, where: str = "body") -> str:
    """The body as JSON text; equal bodies give equal bytes.

    Raises:
        ArtifactError: for a NaN or infinity, or a body the schema's check refuses.
    """
    return json_text(_plain_body(schema, body, where=where))


def _plain_body(schema: Schema[T], body: T, *, where: str) -> Any:
    if schema.check is not None:
        schema.check(body, where)
    plain = msgspec.to_builtins(body)
    check_finite(plain, path="$.body", where=where)
    return plain


def write_envelope(
    path: str | os.PathLike[str], schema: Schema[T], body: T, *, environment: Environment | None = None
) -> None:
    """Write a record, whole or not at all.

    Args:
        path: The file; its folder must exist.
        schema: What is written.
        body: The content.
        environment: Where it was made; this process when None.

    Raises:
        ArtifactError: for numbers that are not finite, a body its check refuses, or an unwritable file.
    """
    plain = {
        "schema": schema.name,
        "version": schema.version,
        "producer": f"loka {loka.__version__}",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": msgspec.to_builtins(environment or describe_environment()),
        "body": _plain_body(schema, body, where=os.fspath(path)),
    }
    write_atomically(path, json_text(plain).encode())


def read_envelope(path: str | os.PathLike[str], schema: Schema[T]) -> Envelope[T]:
    """Read a record.

    Raises:
        ArtifactError: one sentence with the file, the JSON path and the value, for a file that is missing,
            empty, cut off, of another schema or version, or not what its schema says.
    """
    where = os.fspath(path)
    raw = _decode_json(read_bytes(path, kind=schema.kind), schema, where)
    if not isinstance(raw, dict):
        raise ArtifactError(f"`{where}` is not a {schema.kind}: expected an object, got {shown(raw)}")
    if "schema" not in raw:
        raise ArtifactError(
            f"`{where}` at `$`: field `schema` is missing, a {schema.kind} is needed",
            hint=f"a {schema.kind} written by LoKA says `{schema.name}` there",
        )
    if raw["schema"] != schema.name:
        raise ArtifactError(
            f"`{where}` is a {_kind_found(raw['schema'])}, a {schema.kind} is needed",
            hint=f"give a file with schema `{schema.name}`",
        )
    for field in (*_FIELDS, *raw):
        if field not in raw:
            raise ArtifactError(f"`{where}` at `$`: field `{field}` is missing", hint="write the file anew")
        if field not in _FIELDS:
            raise ArtifactError(
                f"`{where}` at `$`: unknown field `{field}`", hint=f"known: {', '.join(_FIELDS)}"
            )
    version = raw["version"]
    if type(version) is not int or version < 1:
        raise ArtifactError(f"`{where}` at `$.version`: expected an integer from 1 on, got {shown(version)}")
    return Envelope(
        schema=schema.name,
        version=version,
        producer=convert_strictly(raw["producer"], str, path="$.producer", where=where),
        created=convert_strictly(raw["created"], str, path="$.created", where=where),
        environment=convert_strictly(raw["environment"], Environment, path="$.environment", where=where),
        body=schema.decode_body(raw["body"], version, where=where),
    )


def _kind_found(name: Any) -> str:
    return name.removeprefix("loka.") if isinstance(name, str) and name else f"record of schema {shown(name)}"


def _decode_json(data: bytes, schema: Schema[Any], where: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = "it is cut off" if "truncated" in str(error) else _decapitalized(str(error))
        raise ArtifactError(
            f"`{where}` is not a {schema.kind}: it is not valid JSON ({reason})",
            hint="write the file anew, or undo the last edit by hand",
        ) from error
    except RecursionError as error:
        raise ArtifactError(f"`{where}` is not a {schema.kind}: it is nested too deeply") from error


def _decapitalized(text: str) -> str:
    return text[:1].lower() + text[1:]
