"""A plan as plain text: what `print(plan)` shows."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from loka.vocab import Pass

if TYPE_CHECKING:
    from loka.artifacts.plan import Choice, Plan

__all__ = ["choices_text", "plan_headline", "plan_text"]


def choices_text(choices: tuple[Choice, ...]) -> str:
    """The kernels of one pass: `torch.rowwise`, or `torch.rowwise below M=4096, then high_precision.bf16`."""
    parts = [c.kernel + (f" below M={c.m_below}" if c.m_below is not None else "") for c in choices]
    return ", then ".join(parts)


def plan_headline(plan: Plan) -> str:
    """One line: for which machine, on which basis, how much is in FP8."""
    passes = [(s, p) for s in plan.sites for p in Pass]
    fp8 = sum(any(c.spec_a.is_quantized for c in s.choices(p)) for s, p in passes)
    sites = sum(any(c.spec_a.is_quantized for p in Pass for c in s.choices(p)) for s in plan.sites)
    basis = "by measured time" if plan.basis == "time" else "by accuracy only"
    return (
        f"plan for {plan.device.name}, {basis}: {fp8} of {len(passes)} passes in FP8, "
        f"at {sites} of {len(plan.sites)} sites"
    )


def plan_text(plan: Plan) -> str:
    """The whole plan: headline, a line a pass, what is not planned, what is predicted.

    Rejected candidates are counted in the column `others`; their reasons are in the plan.
    """
    counts = Counter((r.site, r.pass_) for r in plan.rejected)
    rows = [("site", "pass", "kernel", "others", "reason")]
    for site in plan.sites:
        for pass_ in Pass:
            choices = site.choices(pass_)
            others = f"{counts[site.name, pass_]} rejected"
            rows.append((site.name, str(pass_), choices_text(choices), others, choices[-1].reason))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [plan_headline(plan), ""]
    lines += ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
    lines += [f"not planned: {name}: {reason}" for name, reason in plan.unplanned.items()]
    lines += [
        f"override: {o.site} {o.pass_}: {o.kernel}, not {o.instead_of} ({o.by})"
        for o in plan.overrides
        if o.kernel != o.instead_of
    ]
    lines += ["", f"predicted: {_predicted(plan)}"]
    if plan.rejected:
        lines.append(
            f"{len(plan.rejected)} candidates were rejected; `loka show PLAN --site '*'` gives each reason"
        )
    return "\n".join(lines)


def _predicted(plan: Plan) -> str:
    predicted = plan.predicted
    time = "time not measured" if predicted.saved_us is None else f"{predicted.saved_us:.1f} us saved a step"
    loss = "loss not estimated"
    if predicted.delta_ne is not None:
        loss = f"loss {predicted.delta_ne:+.1e} relative"
        loss += f" (se {predicted.se:.1e})" if predicted.se is not None else ""
    return f"{time}, {loss} ({predicted.note})"
