"""The records LoKA writes: profile, plan, benchmark, and the generic comparison and run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from loka.artifacts.envelope import Envelope, Schema, read_envelope, write_envelope
from loka.artifacts.environment import Environment
from loka.artifacts.plan import Plan
from loka.artifacts.profile import Profile
from loka.artifacts.profile_upgrade import upgrade_profile
from loka.errors import ArtifactError, UsageError, unknown_name

__all__ = [
    "BENCHMARK",
    "PLAN",
    "PROFILE",
    "RECORDS",
    "Benchmark",
    "check_columns",
    "read_benchmark",
    "read_plan",
    "read_profile",
    "read_record",
    "write_benchmark",
    "write_plan",
    "write_profile",
    "write_record",
]

Pathlike = str | os.PathLike[str]


class Benchmark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of a benchmark record.

    Attributes:
        metrics: Flat: name to number; units are in the names.
        details: Anything else that is JSON: tables, settings, samples.
    """

    metrics: dict[str, float]
    details: Any = None


def check_columns(profile: Profile, where: str) -> None:
    """Refuse a profile one of whose tables has columns of unequal length.

    Args:
        profile: The profile.
        where: The file, for the message.

    Raises:
        ArtifactError: naming the first column that differs and both lengths.
    """
    for table_name in ("sites", "errors", "products", "casts", "loss"):
        table = getattr(profile, table_name)
        fields = zip(table.__struct_fields__, table.__struct_encode_fields__, strict=True)
        lengths = {shown: len(getattr(table, field)) for field, shown in fields}
        first = next(iter(lengths))
        for column, length in lengths.items():
            if length != lengths[first]:
                raise ArtifactError(
                    f"`{where}` at `$.body.{table_name}.{column}`: the column has {length} entries, "
                    f"`{first}` has {lengths[first]}",
                    hint="all columns of a table have one entry a row",
                )


PROFILE: Schema[Profile] = Schema("loka.profile", 2, Profile, upgrade=upgrade_profile, check=check_columns)
PLAN: Schema[Plan] = Schema("loka.plan", 1, Plan)
BENCHMARK: Schema[Benchmark] = Schema("loka.benchmark", 1, Benchmark)
RECORDS: dict[str, Schema[dict[str, Any]]] = {
    name: Schema(name, 1, dict[str, Any]) for name in ("loka.comparison", "loka.run")
}


def write_profile(path: Pathlike, profile: Profile, *, environment: Environment | None = None) -> None:
    """Write `profile.json`, whole or not at all.

    Raises:
        ArtifactError: for numbers that are not finite, columns of unequal length, or an unwritable file.
    """
    write_envelope(path, PROFILE, profile, environment=environment)


def read_profile(path: Pathlike) -> Profile:
    """Read `profile.json`, of the current version or the one before.

    Raises:
        ArtifactError: one sentence with the file, the JSON path and the value.
    """
    return read_envelope(path, PROFILE).body


def write_plan(path: Pathlike, plan: Plan, *, environment: Environment | None = None) -> None:
    """Write `plan.json`, whole or not at all.

    Raises:
        ArtifactError: for numbers that are not finite, or an unwritable file.
    """
    write_envelope(path, PLAN, plan, environment=environment)


def read_plan(path: Pathlike) -> Plan:
    """Read `plan.json`. Kernels and specs are checked by `loka.dispatch.planner.checks.validate_plan`.

    Raises:
        ArtifactError: one sentence with the file, the JSON path and the value.
    """
    return read_envelope(path, PLAN).body


def write_benchmark(
    path: Pathlike,
    metrics: Mapping[str, float],
    details: Any = None,
    *,
    environment: Environment | None = None,
) -> None:
    """Write a benchmark record.

    Args:
        path: The file; its folder must exist.
        metrics: Name to number, flat.
        details: Anything that is JSON.
        environment: Where it was measured; this process when None.

    Raises:
        ArtifactError: for a metric that is not a finite number, details that are not JSON, or an
            unwritable file.
    """
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArtifactError(
                f"`{os.fspath(path)}` at `$.body.metrics.{name}`: expected a number, got {value!r}",
                hint="metrics is a flat map of name to number; put the rest in details",
            )
    numbers = {name: float(v) if isinstance(v, float) else int(v) for name, v in metrics.items()}
    body = Benchmark(metrics=numbers, details=_plain(details, path, "$.body.details"))
    write_envelope(path, BENCHMARK, body, environment=environment)


def read_benchmark(path: Pathlike) -> Benchmark:
    """Read a benchmark record.

    Raises:
        ArtifactError: one sentence with the file, the JSON path and the value.
    """
    return read_envelope(path, BENCHMARK).body


def write_record(
    path: Pathlike, schema: str, body: Mapping[str, Any], *, environment: Environment | None = None
) -> None:
    """Write a record whose body is a free JSON object.

    Args:
        path: The file; its folder must exist.
        schema: `loka.comparison` or `loka.run`.
        body: What it says.
        environment: Where it was made; this process when None.

    Raises:
        UnknownNameError: for another schema.
        ArtifactError: for numbers that are not finite, a body that is not JSON, an unwritable file.
    """
    plain = _plain(dict(body), path, "$.body")
    write_envelope(path, _generic(schema), plain, environment=environment)


def read_record(path: Pathlike, schema: str) -> Envelope[dict[str, Any]]:
    """Read what `write_record` wrote, with its envelope.

    Raises:
        UnknownNameError: for a schema that is not generic.
        ArtifactError: one sentence with the file, the JSON path and the value.
    """
    return read_envelope(path, _generic(schema))


def _generic(name: str) -> Schema[dict[str, Any]]:
    schema = RECORDS.get(name)
    if schema is None:
        raise unknown_name("record schema", name, list(RECORDS))
    return schema


def _plain(value: Any, path: Pathlike, at: str) -> Any:
    try:
        return msgspec.to_builtins(value, str_keys=True)
    except (TypeError, UsageError) as error:
        raise ArtifactError(
            f"`{os.fspath(path)}` at `{at}`: {str(error)[:1].lower()}{str(error)[1:]}",
            hint="use numbers, strings, lists and maps",
        ) from error
