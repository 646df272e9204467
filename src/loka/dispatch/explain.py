"""Plans for people: a table of a plan, what changed between two, and how much work is in FP8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from loka.artifacts.plan import Plan, SitePlan
from loka.artifacts.plan_text import choices_text, plan_headline
from loka.artifacts.profile import Profile
from loka.dispatch.planner.facts import Facts
from loka.kernels import kernel
from loka.vocab import Pass, Requirement, Site

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FlopShares", "PlanChange", "plan_changes", "plan_flop_shares", "render_diff", "render_plan"]


@dataclass(frozen=True, slots=True)
class FlopShares:
    """How much of a model's GEMM work a plan puts in FP8.

    Attributes:
        shares: Pass to the share of its FLOPs in FP8, 0 to 1.
        sites_fp8: Pass to the number of sites in FP8.
        sites_planned: Number of sites with at least one pass in FP8.
        sites: Number of all sites that were counted.
    """

    shares: dict[Pass, float]
    sites_fp8: dict[Pass, int]
    sites_planned: int
    sites: int


def plan_flop_shares(plan: Plan, sites: Sequence[Site] | None = None) -> FlopShares:
    """The share of GEMM FLOPs in FP8, per pass.

    A pass whose kernel changes with M counts by the kernel for the site's M; without sites, by its last one.

    Args:
        plan: The plan.
        sites: The model's sites with their rows, calls and those that cannot be planned, which then count
            in the whole. None: only the plan's sites count, all with the same number of rows.
    """
    by_name = {site.name: site for site in plan.sites}
    work: list[tuple[SitePlan | None, float, int | None]]
    if sites is None:
        work = [(s, float(s.n * s.k), None) for s in plan.sites]
    else:
        work = [(by_name.get(s.name), float(s.flops), s.rows) for s in sites]
    total = sum(flops for _, flops, _ in work)
    shares: dict[Pass, float] = {}
    counts: dict[Pass, int] = {}
    for pass_ in Pass:
        inside = [flops for site, flops, rows in work if site is not None and _is_fp8(site, pass_, rows)]
        shares[pass_] = sum(inside) / total if total else 0.0
        counts[pass_] = len(inside)
    planned = sum(s is not None and any(_is_fp8(s, p, rows) for p in Pass) for s, _, rows in work)
    return FlopShares(shares, counts, planned, len(work))


def _is_fp8(site: SitePlan, pass_: Pass, rows: int | None) -> bool:
    choices = site.choices(pass_)
    chosen = choices[-1]
    if rows is not None:
        chosen = next(c for c in choices if c.m_below is None or rows < c.m_below)
    return chosen.spec_a.is_quantized


def render_plan(plan: Plan, *, profile: Profile | None = None, rejected: bool = False) -> Table:
    """A table with one line a pass: site, pass, kernel, recipe, dB (with a profile), reason.

    Args:
        plan: The plan.
        profile: The profile it was made from; gives the measured dB of what was chosen.
        rejected: Also list every rejected candidate below its pass.
    """
    facts = None if profile is None else Facts.of(profile)
    from rich.table import Table  # only what prints needs it

    table = Table(title=plan_headline(plan), title_justify="left")
    for column in ("site", "pass", "kernel", "recipe"):
        table.add_column(column, no_wrap=column != "recipe")
    if profile is not None:
        table.add_column("dB", justify="right")
    table.add_column("reason")
    counts = Counter((r.site, r.pass_) for r in plan.rejected)
    no_level = () if profile is None else ("",)
    for site in plan.sites:
        for pass_ in Pass:
            chosen = site.choices(pass_)[-1]
            recipe = f"{chosen.spec_a.recipe_key} x {chosen.spec_b.recipe_key}"
            reason = chosen.reason
            if not rejected and counts[site.name, pass_]:
                reason += f" [{counts[site.name, pass_]} others rejected]"
            kernels = choices_text(site.choices(pass_))
            style = None if chosen.spec_a.is_quantized else "dim"
            level = () if facts is None else (_level(facts, site, pass_),)
            table.add_row(site.name, str(pass_), kernels, recipe, *level, _plain(reason), style=style)
            for r in plan.rejected if rejected else ():
                if r.site == site.name and r.pass_ is pass_:
                    recipe = f"{r.spec_a} x {r.spec_b}"
                    table.add_row("", "", f"not {r.kernel}", recipe, *no_level, _plain(r.reason), style="dim")
    for name, reason in plan.unplanned.items():
        table.add_row(name, "", "not planned", "", *no_level, _plain(reason), style="dim")
    return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)  # square brackets are markup to rich


def _level(facts: Facts, site: SitePlan, pass_: Pass) -> str:
    chosen = site.choices(pass_)[-1]
    if not chosen.spec_a.is_quantized:
        return ""
    accumulation = kernel(chosen.kernel).accumulation
    specs = chosen.spec_a, chosen.spec_b
    found = facts.error(site.name, pass_, *specs, accumulation, kernel=chosen.kernel)
    return "" if found is None else f"{found.sqnr_db:.1f}"


@dataclass(frozen=True, slots=True)
class PlanChange:
    """One difference between two plans; empty text where a side has nothing."""

    site: str
    pass_: str
    old: str
    new: str
    why: str


def plan_changes(old: Plan, new: Plan) -> list[PlanChange]:
    """What differs: basis, device, model, requirement, then sites and passes in the new plan's order."""
    changes = [
        PlanChange("", name, str(a), str(b), "")
        for name, a, b in (
            ("basis", old.basis, new.basis),
            ("device", old.device.name, new.device.name),
            ("model", old.model.sites[:12], new.model.sites[:12]),
            *(
                (f"requirement: {f.name}", getattr(old.requirement, f.name), getattr(new.requirement, f.name))
                for f in fields(Requirement)
            ),
        )
        if a != b
    ]
    before = {site.name: site for site in old.sites}
    after = {site.name for site in new.sites}
    for site in new.sites:
        was = before.get(site.name)
        if was is None:
            changes.append(PlanChange(site.name, "", "", "planned", "the old plan has no such site"))
            continue
        for pass_ in Pass:
            a, b = was.choices(pass_), site.choices(pass_)
            parts = [(c.m_below, c.kernel, c.spec_a, c.spec_b) for c in a]
            if parts != [(c.m_below, c.kernel, c.spec_a, c.spec_b) for c in b]:
                old_text, new_text = _with_recipe(was, pass_), _with_recipe(site, pass_)
                changes.append(PlanChange(site.name, str(pass_), old_text, new_text, b[-1].reason))
    for site in old.sites:
        if site.name not in after:
            changes.append(PlanChange(site.name, "", "planned", "", "the new plan has no such site"))
    return changes


def _with_recipe(site: SitePlan, pass_: Pass) -> str:
    last = site.choices(pass_)[-1]
    return f"{choices_text(site.choices(pass_))} ({last.spec_a.recipe_key} x {last.spec_b.recipe_key})"


def render_diff(old: Plan, new: Plan) -> Table:
    """A table of `plan_changes`; its title counts them."""
    changes = plan_changes(old, new)
    title = f"{len(changes)} difference{'' if len(changes) == 1 else 's'}" if changes else "no difference"
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("site", "pass", "old", "new", "why"):
        table.add_column(column)
    for c in changes:
        table.add_row(c.site, c.pass_, _plain(c.old), _plain(c.new), _plain(c.why))
    return table
