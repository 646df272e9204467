"""`loka show`: any file that LoKA wrote, or the folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka.cli.grouped import grouped
from loka.cli.options import JsonFlag, TalkOptions
from loka.cli.talk import set_level
from loka.errors import UsageError

__all__ = ["show"]


@grouped
def show(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A profile, plan, benchmark, comparison or run record; or a run's folder.",
            show_default=False,
        ),
    ],
    talk: TalkOptions,
    site: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Distributions, every kernel's error, the loss, and every choice with why not the others, "
            "at these sites.",
            show_default=False,
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show a file by what it says it is. A run's folder shows its comparison, or with --site its sites."""
    set_level(talk)
    from loka.cli.output import print_json, print_tables
    from loka.cli.quadrant_view import judged_parts
    from loka.cli.record_view import files_to_show, read_any, record_parts

    if site is not None:
        _show_sites(site, path, json=json)
        return
    record = read_any(files_to_show(path)[-1])
    if json:
        print_json(record.plain)
        return
    print_tables(*record_parts(record))
    if record.profile is not None:
        print_tables("", *judged_parts(record.profile))


def _show_sites(pattern: str, path: Path, *, json: bool) -> None:
    from loka.artifacts import read_statistics
    from loka.cli.output import print_json, print_tables
    from loka.cli.record_view import files_to_show, read_any
    from loka.cli.site_view import Known, site_json, site_parts
    from loka.recsys.job.folder import STATISTICS_NAME

    records = [read_any(file) for file in files_to_show(path, about_sites=True)]
    learned = path / STATISTICS_NAME
    known = Known(
        profile=next((r.profile for r in records if r.profile is not None), None),
        plan=next((r.plan for r in records if r.plan is not None), None),
        statistics=read_statistics(learned)[0] if learned.is_file() else None,
    )
    if known.profile is None and known.plan is None:
        raise UsageError(
            f"`{path}` is a {records[0].kind}, which says nothing of sites",
            hint="--site takes a profile, a plan, or a run's folder",
        )
    if json:
        print_json(site_json(pattern, known))
    else:
        print_tables(*site_parts(pattern, known))
