"""`loka diff`: two plans, site by site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka.cli.grouped import grouped
from loka.cli.options import JsonFlag, TalkOptions
from loka.cli.talk import set_level

__all__ = ["diff"]


@grouped
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A plan.", show_default=False)],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another plan.", show_default=False)],
    talk: TalkOptions,
    json: JsonFlag = False,
) -> None:
    """Show what differs between two plans: machine, requirement, and the kernel of each site and pass.

    The exit code is 0 whether they differ or not.
    """
    set_level(talk)
    from loka.api import load_plan
    from loka.cli.output import print_json, print_tables
    from loka.dispatch.explain import plan_changes, render_diff

    before, after = load_plan(old), load_plan(new)
    if json:
        changes = plan_changes(before, after)
        print_json(
            [{"site": c.site, "pass": c.pass_, "old": c.old, "new": c.new, "why": c.why} for c in changes]
        )
    else:
        print_tables(render_diff(before, after))
