"""The site table of `loka probe`: every pass under its quadrant, with the reason in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from loka.artifacts import Profile
from loka.cli.output import cell
from loka.cli.profile_view import nonfinite_lines, overhead_text
from loka.cli.quadrants import Judgement, Quadrant, judge_passes
from loka.vocab import Requirement

__all__ = ["judged_parts", "limits_text", "quadrants_json", "quadrants_parts"]

_MEANS = {
    Quadrant.SAFE_FAST: "switch these",
    Quadrant.SAFE_SLOW: "FP8 keeps the numbers and gains nothing",
    Quadrant.UNSAFE_FAST: "would gain; what reaches them must change first, or the requirement",
    Quadrant.UNSAFE_SLOW: "leave these in bf16",
    Quadrant.SAFE: "kernels are timed on a GPU only",
    Quadrant.UNSAFE: "kernels are timed on a GPU only",
    Quadrant.NOT_JUDGED: "stay in bf16",
}


def quadrants_json(judgements: Sequence[Judgement]) -> dict[str, list[dict[str, Any]]]:
    """Quadrant to its passes, as plain values; a quadrant without any is an empty list."""
    return {str(quadrant): [_plain(j) for j in judgements if j.quadrant is quadrant] for quadrant in Quadrant}


def _plain(judgement: Judgement) -> dict[str, Any]:
    plain = dataclasses.asdict(judgement)
    del plain["quadrant"]
    return {("pass" if name == "pass_" else name): value for name, value in plain.items()}


def limits_text(requirement: Requirement) -> str:
    """By what was judged, in one line."""
    loss, speed = requirement.max_loss_increase, requirement.min_speedup
    parts = [
        f"SQNR >= {requirement.min_sqnr_db:g} dB",
        f"row error p99 <= {requirement.max_row_error_p99:g}",
        "any loss" if loss is None else f"loss <= {loss:+.1e} where estimated",
        f"{1.0 if speed is None else speed:g}x where timed",
    ]
    return f"judged by: {', '.join(parts)}; `loka plan` takes other limits"


def quadrants_parts(judgements: Sequence[Judgement]) -> list[Any]:
    """A heading and a table for each quadrant that has a pass in it.

    A site whose three passes fall into one quadrant for one reason (it cannot be planned) takes one line.
    """
    parts: list[Any] = []
    for quadrant in Quadrant:
        inside = [j for j in judgements if j.quadrant is quadrant]
        if inside:
            share = 100 * sum(j.flops_share for j in inside)
            count = f"{len(inside)} pass{'' if len(inside) == 1 else 'es'}"
            title = f"{quadrant}: {count}, {share:.1f} % of the FLOPs of all products ({_MEANS[quadrant]})"
            parts += [title, _table(inside), ""]
    return parts[:-1]


def judged_parts(profile: Profile, requirement: Requirement | None = None) -> list[Any]:
    """The site table by quadrant, by what it was judged, what observing cost, rows that were not finite."""
    wanted = requirement or Requirement()
    return [
        *quadrants_parts(judge_passes(profile, wanted)),
        "",
        limits_text(wanted),
        overhead_text(profile.overhead),
        *nonfinite_lines(profile),
    ]


def _table(judgements: Sequence[Judgement]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("site", overflow="fold")
    table.add_column("pass")
    table.add_column("FLOPs", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    last = ""
    for site, passes, share, reason in _lines(judgements):
        table.add_row("" if site == last else cell(site), passes, f"{100 * share:.1f} %", cell(reason))
        last = site
    return table


def _lines(judgements: Sequence[Judgement]) -> list[tuple[str, str, float, str]]:
    """(site, passes, share, reason): a site's passes stay together, equal reasons share a line."""
    sites: dict[str, dict[str, list[Judgement]]] = {}
    for j in judgements:
        sites.setdefault(j.site, {}).setdefault(j.reason, []).append(j)
    return [
        (site, " ".join(str(j.pass_) for j in group), sum(j.flops_share for j in group), reason)
        for site, reasons in sites.items()
        for reason, group in reasons.items()
    ]
