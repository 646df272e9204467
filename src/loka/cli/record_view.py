"""Read any record by the schema that it names, and show it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from loka.artifacts import BENCHMARK, PLAN, PROFILE, Benchmark, Envelope, Plan, Profile, Schema, read_envelope
from loka.artifacts.atomic import read_bytes
from loka.artifacts.records import RECORDS
from loka.cli.ceiling import ceiling_text
from loka.cli.output import cell
from loka.cli.plan_view import predicted_text
from loka.cli.profile_view import site_rows, sites_table
from loka.dispatch.explain import render_plan
from loka.dispatch.planner.checks import validate_plan
from loka.errors import ArtifactError, UsageError
from loka.recsys.evaluation.comparison import Comparison
from loka.recsys.evaluation.comparison_table import comparison_table
from loka.recsys.job.folder import COMPARISON_NAME, METRICS_NAME, PLAN_NAME, PROFILE_NAME, RUN_NAME

__all__ = ["Record", "files_to_show", "read_any", "record_parts"]

_ALL: tuple[Schema[Any], ...] = (PROFILE, PLAN, BENCHMARK, *RECORDS.values())
_SCHEMAS = {schema.name: schema for schema in _ALL}


@dataclass(frozen=True, slots=True)
class Record:
    """A file as read.

    Attributes:
        path: The file.
        envelope: Its content.
    """

    path: Path
    envelope: Envelope[Any]

    @property
    def kind(self) -> str:
        """`plan`, `profile`, ..."""
        return self.envelope.schema.removeprefix("loka.")

    @property
    def profile(self) -> Profile | None:
        """The body, where it is a profile."""
        return self.envelope.body if isinstance(self.envelope.body, Profile) else None

    @property
    def plan(self) -> Plan | None:
        """The body, where it is a plan."""
        return self.envelope.body if isinstance(self.envelope.body, Plan) else None

    @property
    def plain(self) -> dict[str, Any]:
        """The whole envelope as plain values."""
        envelope = self.envelope
        return {
            "schema": envelope.schema,
            "version": envelope.version,
            "producer": envelope.producer,
            "created": envelope.created,
            "environment": msgspec.to_builtins(envelope.environment),
            "body": msgspec.to_builtins(envelope.body),
        }


def files_to_show(path: Path, *, about_sites: bool = False) -> list[Path]:
    """The file itself; of a run's folder its most telling file, or those that speak of sites.

    Raises:
        UsageError: for a folder without such files.
    """
    if not path.is_dir():
        return [path]
    names = (PROFILE_NAME, PLAN_NAME) if about_sites else (RUN_NAME, PROFILE_NAME, PLAN_NAME, METRICS_NAME)
    names = names if about_sites else (*names, COMPARISON_NAME)
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        raise UsageError(f"the folder `{path}` has none of {', '.join(names)}", hint="name a file in it")
    return found


def read_any(path: Path) -> Record:
    """Read a record of any schema.

    Raises:
        ArtifactError: for a file that is missing, no JSON, of a schema that is not known, or damaged.
    """
    data = read_bytes(path, kind="record")
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(
            f"`{path}` is not a record of LoKA: it is not valid JSON",
            hint="`loka show` takes the .json files that LoKA writes",
        ) from error
    name = raw.get("schema") if isinstance(raw, dict) else None
    schema = _SCHEMAS.get(name) if isinstance(name, str) else None
    if schema is None:
        found = f"its schema is `{name}`" if isinstance(name, str) else "it names no schema"
        raise ArtifactError(
            f"`{path}` is not a record of LoKA: {found}", hint=f"known: {', '.join(_SCHEMAS)}"
        )
    envelope: Envelope[Any] = read_envelope(path, schema)
    if isinstance(envelope.body, Plan):
        validate_plan(envelope.body, where=str(path))
    return Record(path, envelope)


def record_parts(record: Record) -> list[Any]:
    """Renderables and lines: where the record comes from, then what it says."""
    envelope = record.envelope
    where = envelope.environment
    device = ", ".join(where.devices) or f"{where.cpu_count} CPUs"
    head = f"{record.kind} of {envelope.created} by {envelope.producer}, torch {where.torch}, {device}"
    if record.profile is not None:
        return [head, *_profile_parts(record.profile)]
    if record.plan is not None:
        return [head, render_plan(record.plan), predicted_text(record.plan)]
    if isinstance(envelope.body, Benchmark):
        return [head, _pairs_table("metrics", envelope.body.metrics)]
    if record.kind == "comparison":
        return [head, comparison_table(_comparison(record))]
    return [head, _pairs_table("run", envelope.body)]


def _comparison(record: Record) -> Comparison:
    try:
        return msgspec.convert(record.envelope.body, Comparison)
    except msgspec.ValidationError as error:
        reason, _, at = str(error).partition(" - at ")
        place = at.strip("`").replace("$", "$.body", 1) or "$.body"
        raise ArtifactError(
            f"`{record.path}` at `{place}`: {reason[:1].lower()}{reason[1:]}", hint="write the file anew"
        ) from error


def _profile_parts(profile: Profile) -> list[Any]:
    seen = f"{profile.steps_observed} of {profile.steps_seen} steps observed on {profile.device.name}"
    return [
        ceiling_text(profile.step),
        "",
        sites_table(site_rows(profile)),
        f"{seen}; {len(profile.errors)} errors, {len(profile.products)} times of products",
        *(f"note: {note}" for note in profile.notes),
    ]


def _pairs_table(title: str, values: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("name")
    table.add_column("value", justify="right" if title == "metrics" else "left")
    for name, value in values.items():
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        table.add_row(cell(name), cell(shown))
    return table
