"""Why a pass runs what it runs, and why not each other candidate: the sentences of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loka.dispatch.planner.budget import MARGIN, Grant, spent
from loka.dispatch.planner.by_time import Picks, alone_us, site_time
from loka.dispatch.planner.candidates import Candidate, Coarseness, coarseness
from loka.dispatch.planner.facts import Facts
from loka.dispatch.planner.pins import Pin
from loka.vocab import Pass, Requirement, Site

__all__ = ["Verdict", "bf16_reason", "chosen_reason", "rejected_reason"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided for one pass, with what is needed to say why.

    Attributes:
        site: The site.
        pass_: The pass.
        candidates: Every FP8 candidate.
        pick: What was taken; None for bf16.
        picks: What was taken for each pass of the site.
        grant: The change of the loss (delta, se) that an option may have; None for any.
        limit: The limit on the loss; None where it does not apply.
        pin: The pin that fixed the pass.
        narrow: Why the whole site stays in bf16; empty where it need not.
        facts: The profile.
        requirement: The requirement.
        prefer_emulated: Whether emulated kernels are what the machine runs.
    """

    site: Site
    pass_: Pass
    candidates: tuple[Candidate, ...]
    pick: Candidate | None
    picks: Picks
    grant: Grant | None
    limit: float | None
    pin: Pin | None
    narrow: str
    facts: Facts
    requirement: Requirement
    prefer_emulated: bool

    @property
    def fp8_picks(self) -> Picks:
        """Those of the picks that run in FP8; a pin may also name a kernel that casts nothing."""
        fwd, dgrad, wgrad = (p if p is not None and p.is_quantized else None for p in self.picks)
        return fwd, dgrad, wgrad

    def coarseness(self, candidate: Candidate) -> Coarseness:
        """The order of preference by accuracy."""
        return coarseness(candidate, prefer_emulated=self.prefer_emulated)

    def over_budget(self, candidate: Candidate) -> str:
        """Why the limit on the loss refuses a candidate; empty where it does not."""
        if self.limit is None or self.pass_ not in self.facts.estimated:
            return ""
        if candidate.loss is None:
            return "no estimate of the loss"
        taken = spent(candidate.loss)
        if self.grant is None or (taken[0] <= self.grant[0] and taken[1] <= self.grant[1]):
            return ""
        delta, se = candidate.loss
        change, limit = f"loss {delta:+.1e} (se {se:.1e})", f"max_loss_increase={self.limit:.1e}"
        if taken[0] > self.limit:
            return f"{change} does not fit in {limit}"
        if taken[0] + MARGIN * taken[1] > self.limit:
            return f"{change} is too uncertain for {limit}: {MARGIN} se alone may be {MARGIN * taken[1]:.1e}"
        return f"{change} would go beyond {limit} with what else is switched"


def chosen_reason(verdict: Verdict, pick: Candidate) -> str:
    """Why this FP8 candidate runs."""
    error = _error_text(pick)
    if verdict.pin is not None:
        return f"pinned by `{verdict.pin.pattern}`" + (f": {error}" if pick.is_quantized else "")
    if not verdict.facts.timed:
        return f"coarsest recipe that keeps the requirement: {error}{_loss_text(verdict, pick)}"
    error += _loss_text(verdict, pick)
    time = site_time(verdict.site, verdict.fp8_picks, verdict.facts)
    times = f"{time.planned_us:.1f} us with casts, bf16 {time.bf16_us:.1f} us ({time.speedup:.2f}x)"
    if verdict.requirement.min_speedup is None:
        return f"fastest FP8, no min_speedup asked: the site's FP8 passes take {times}; {error}"
    return f"fastest: the site's FP8 passes take {times}; {error}"


def _loss_text(verdict: Verdict, pick: Candidate) -> str:
    """What the pick takes of the budget, where there is one."""
    if verdict.limit is None:
        return ""
    if pick.loss is None:
        return f"; loss of {verdict.pass_} not estimated"
    return f"; loss {pick.loss.delta_ne:+.1e} (se {pick.loss.se:.1e})"


def _error_text(candidate: Candidate) -> str:
    if candidate.error is None:
        return "no measured error"
    e = candidate.error
    return f"sqnr {e.sqnr_db_low:.1f} dB, row error p99 {e.row_p99:.3g} ({e.source})"


def bf16_reason(verdict: Verdict) -> str:
    """Why the pass stays in bf16."""
    if verdict.pin is not None:
        return f"pinned by `{verdict.pin.pattern}`"
    if verdict.narrow:
        return verdict.narrow
    usable = [c for c in verdict.candidates if not c.fault]
    if not usable:
        return _no_candidate(verdict)
    passing = [c for c in usable if not c.gate]
    if not passing:
        return _none_keeps(verdict, usable)
    affordable = [c for c in passing if not verdict.over_budget(c)]
    if not affordable:
        least = min(passing, key=lambda c: (c.loss is None, c.loss or (0.0, 0.0), verdict.coarseness(c)))
        return f"no recipe fits the loss: {least.label}: {verdict.over_budget(least)}"
    if not verdict.facts.timed:
        return "the product has no FLOPs"
    speedups = [(alone_us(verdict.site, verdict.pass_, c, verdict.facts).speedup, c) for c in affordable]
    speedup, best = min(speedups, key=lambda item: (-item[0], verdict.coarseness(item[1])))
    if any(pick is not None for pick in verdict.fp8_picks):
        return f"the site is faster with this pass in bf16: best {best.label} alone {speedup:.2f}x"
    return f"{_speed_gate(verdict)}: best {best.label} alone {speedup:.2f}x"


def _speed_gate(verdict: Verdict) -> str:
    least = verdict.requirement.min_speedup
    return "no FP8 kernel is faster" if least is None else f"no FP8 kernel reaches min_speedup={least:g}"


def _no_candidate(verdict: Verdict) -> str:
    """The fault that got furthest: an unmeasured kernel says more than one that cannot run."""
    faults = [c.fault for c in verdict.candidates]
    for start in ("no measured", "its output was not vetted", "unverified: "):
        found = [fault for fault in faults if fault.startswith(start)]
        if found:
            return f"nothing to choose from: {found[0]}"
    return f"no kernel runs here: {faults[0]}" if faults else "no FP8 kernel exists"


def _none_keeps(verdict: Verdict, usable: list[Candidate]) -> str:
    best = min(
        usable,
        key=lambda c: (-c.error.sqnr_db_low if c.error is not None else math.inf, verdict.coarseness(c)),
    )
    level = "" if best.error is None else f" at {best.error.sqnr_db_low:.1f} dB"
    # The gate adds something where it is not the dB that failed.
    gate = "" if best.gate.startswith("sqnr") else f" ({best.gate})"
    return f"no recipe keeps the requirement: best {best.label}{level}{gate}"


def rejected_reason(verdict: Verdict, candidate: Candidate) -> str:
    """Why a candidate was not taken."""
    if verdict.pin is not None:
        return f"pinned to {verdict.pin.kernel.name} by `{verdict.pin.pattern}`"
    if verdict.narrow:
        return verdict.narrow
    refused = candidate.fault or candidate.gate or verdict.over_budget(candidate)
    if refused:
        return refused
    if verdict.facts.timed:
        return _not_fastest(verdict, candidate)
    return _not_coarsest(verdict, candidate)


def _not_fastest(verdict: Verdict, candidate: Candidate) -> str:
    time = alone_us(verdict.site, verdict.pass_, candidate, verdict.facts)
    least = verdict.requirement.min_speedup
    if verdict.pick is not None:
        return f"the site is faster with {verdict.pick.label} (alone {time.planned_us:.1f} us with casts)"
    if least is not None and time.speedup < least:
        return f"speed-up {time.speedup:.2f} < {least:.2f}"
    return f"the site is faster with this pass in bf16 (alone {time.planned_us:.1f} us with casts)"


def _not_coarsest(verdict: Verdict, candidate: Candidate) -> str:
    pick = verdict.pick
    if pick is None:
        return "the product has no FLOPs"
    mine, taken = verdict.coarseness(candidate), verdict.coarseness(pick)
    if mine[:2] != taken[:2]:
        return "a coarser recipe passes"
    if mine[2] != taken[2]:
        return f"{pick.spec_a.format} passes with the same scales"
    if candidate.kernel.emulated is not pick.kernel.emulated:
        return f"{pick.kernel.name} has the same recipe and is what this machine is planned with"
    return f"{pick.kernel.name} has the same scales and is preferred"
