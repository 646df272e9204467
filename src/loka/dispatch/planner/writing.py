"""What was decided, as the plan's words: choices, rejections, and what the plan should give."""

from __future__ import annotations

import math

from loka.artifacts.plan import Choice, Predicted, Rejected
from loka.dispatch.planner.by_time import Picks, site_time
from loka.dispatch.planner.facts import Facts
from loka.dispatch.planner.reasons import Verdict, bf16_reason, chosen_reason, rejected_reason
from loka.kernels import HIGH_PRECISION, kernel
from loka.vocab import Pass, Site

__all__ = ["choice_of", "predicted", "rejected_of"]


def choice_of(verdict: Verdict) -> Choice:
    """The choice of a pass, with its reason."""
    pick = verdict.pick
    if pick is None:
        bf16 = kernel(HIGH_PRECISION)
        spec_a, spec_b = bf16.operands(verdict.site.problem(verdict.pass_))
        reason = bf16_reason(verdict)
        return Choice(m_below=None, kernel=bf16.name, spec_a=spec_a, spec_b=spec_b, reason=reason)
    return Choice(
        m_below=None,
        kernel=pick.kernel.name,
        spec_a=pick.spec_a,
        spec_b=pick.spec_b,
        reason=chosen_reason(verdict, pick),
    )


def rejected_of(verdict: Verdict) -> list[Rejected]:
    """Every other candidate of the pass, each with its reason."""
    return [
        Rejected(
            site=verdict.site.name,
            pass_=verdict.pass_,
            kernel=c.kernel.name,
            spec_a=c.spec_a.recipe_key,
            spec_b=c.spec_b.recipe_key,
            reason=rejected_reason(verdict, c),
        )
        for c in verdict.candidates
        if c is not verdict.pick
    ]


def predicted(final: list[tuple[Site, Picks]], facts: Facts, device_name: str) -> Predicted:
    """What the plan of these picks should save and cost, and what that rests on."""
    switched = [c for _, picks in final for c in picks if c is not None and c.is_quantized]
    notes: list[str] = []
    saved_us: float | None = None
    if facts.timed:
        times = [(site.calls, site_time(site, picks, facts)) for site, picks in final]
        saved_us = math.fsum(calls * (t.bf16_us - t.planned_us) for calls, t in times)
        unknown = sum(t.unknown for _, t in times)
        notes.append(f"median times on {device_name}, casts included")
        if unknown:
            notes.append(f"{unknown} pinned passes have no measured time and do not count")
    else:
        notes.append(
            f"by accuracy only: no times were measured on {device_name}, so min_speedup does not apply"
        )
    delta = se = None
    counted = [c for c in switched if c.problem.pass_ in facts.estimated]
    without = sum(c.loss is None for c in counted)
    if not facts.loss:
        notes.append("the loss was not estimated, so max_loss_increase does not apply")
    elif without:
        notes.append(f"the loss was not estimated for {without} passes")
    else:
        changes = [c.loss for c in counted if c.loss is not None]
        delta = math.fsum(change.delta_ne for change in changes)
        se = math.sqrt(math.fsum(change.se**2 for change in changes))
        notes.append("changes of the loss are added over passes")
    never = [pass_ for pass_ in Pass if pass_ not in facts.estimated]
    if facts.loss and never:
        notes.append(f"{', '.join(f'{pass_} not estimated' for pass_ in never)}: gated by error only")
    return Predicted(saved_us=saved_us, delta_ne=delta, se=se, note="; ".join(notes))
