"""What a plan says at some sites, and in one line."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from rich.table import Table

from loka.artifacts import Plan
from loka.cli.output import cell
from loka.vocab import Pass

__all__ = ["is_all_bf16", "plan_rows", "plan_table_at", "predicted_text"]


def is_all_bf16(plan: Plan) -> bool:
    """True where no pass of any site is in FP8."""
    return not any(c.spec_a.is_quantized for s in plan.sites for p in Pass for c in s.choices(p))


def predicted_text(plan: Plan) -> str:
    """What the plan should give."""
    predicted = plan.predicted
    parts = []
    if predicted.saved_us is not None:
        parts.append(f"{predicted.saved_us:.1f} us saved a step")
    if predicted.delta_ne is not None:
        error = "" if predicted.se is None else f" (se {predicted.se:.1e})"
        parts.append(f"loss {predicted.delta_ne:+.1e} relative{error}")
    return f"predicted: {', '.join([*parts, predicted.note])}"


def plan_rows(plan: Plan, names: Collection[str]) -> list[dict[str, Any]]:
    """What was chosen and what was rejected at these sites, as plain values."""
    rows: list[dict[str, Any]] = []
    for site in plan.sites:
        if site.name not in names:
            continue
        for pass_ in Pass:
            rejected = [r for r in plan.rejected if r.site == site.name and r.pass_ is pass_]
            rows.append(
                {
                    "site": site.name,
                    "pass": str(pass_),
                    "choices": [msgspec.to_builtins(c) for c in site.choices(pass_)],
                    "rejected": [
                        {k: v for k, v in msgspec.to_builtins(r).items() if k not in ("site", "pass")}
                        for r in rejected
                    ],
                }
            )
    rows += [
        {"site": name, "not_planned": reason} for name, reason in plan.unplanned.items() if name in names
    ]
    return rows


def plan_table_at(plan: Plan, name: str) -> Table:
    """The choices of one site, each with the candidates that were not taken and why."""
    table = Table(title=f"plan at {name}", title_justify="left")
    for column in ("pass", "kernel", "recipe", "reason"):
        table.add_column(column)
    site = plan.site(name)
    if site is None:
        table.add_row("", "not planned", "", cell(plan.unplanned.get(name, "the plan has no such site")))
        return table
    for pass_ in Pass:
        for c in site.choices(pass_):
            below = "" if c.m_below is None else f" below M={c.m_below}"
            recipe = f"{c.spec_a.recipe_key} x {c.spec_b.recipe_key}"
            table.add_row(str(pass_), c.kernel + below, recipe, cell(c.reason))
        for r in plan.rejected:
            if r.site == name and r.pass_ is pass_:
                table.add_row("", f"not {r.kernel}", f"{r.spec_a} x {r.spec_b}", cell(r.reason))
    return table
