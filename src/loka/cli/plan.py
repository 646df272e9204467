"""`loka plan`: from a profile and a requirement to a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka.cli.grouped import grouped
from loka.cli.options import JsonFlag, RequirementOptions, TalkOptions
from loka.cli.talk import logger, set_level
from loka.errors import UsageError

__all__ = ["plan"]


@grouped
def plan(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile.json.", show_default=False)],
    requirement: RequirementOptions,
    talk: TalkOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="PLAN",
            help="File for the plan; without, it is only printed.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier plan there.")] = False,
    json: JsonFlag = False,
) -> None:
    """Choose a kernel for each pass of each site, with a reason for every kernel that was not taken.

    A plan that leaves everything in bf16, because nothing keeps the requirement, is a plan too: it says so,
    and the exit code is 0.
    """
    set_level(talk)
    from loka.artifacts import PLAN, body_text, plan_headline, read_plan, read_profile, write_plan
    from loka.cli.configs import requirement_of
    from loka.cli.output import print_tables
    from loka.cli.plan_view import is_all_bf16, predicted_text
    from loka.dispatch import make_plan
    from loka.dispatch.explain import render_plan

    wanted = requirement_of(requirement)
    measured = read_profile(profile)
    if out is not None and out.exists():
        read_plan(out)  # a file that is no plan is never replaced
        if not overwrite:
            raise UsageError(f"the plan `{out}` exists already", hint="add --overwrite, or name another file")
    made = make_plan(measured, wanted)
    if out is not None:
        write_plan(out, made)
    if json:
        typer.echo(body_text(PLAN, made).rstrip("\n"))
    else:
        print_tables(render_plan(made, profile=measured), predicted_text(made))
    if is_all_bf16(made):
        logger.warning("nothing keeps the requirement: the plan leaves every pass in bf16")
    if out is not None:
        logger.info("written: %s (%s)", out, plan_headline(made))
