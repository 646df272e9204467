"""Profile + Requirement -> Plan: a pure function, the same bytes for the same inputs, on any machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from loka.artifacts.plan import Choice, Override, Plan, Rejected, SitePlan
from loka.artifacts.profile import Profile
from loka.artifacts.records import check_columns
from loka.dispatch.planner.budget import Grant, Option, Selection, select, spent
from loka.dispatch.planner.by_time import CastCosts, Picks, time_options
from loka.dispatch.planner.candidates import (
    Candidate,
    Candidates,
    coarseness,
    narrow_reason,
    pass_problem,
)
from loka.dispatch.planner.facts import Facts
from loka.dispatch.planner.pins import Pin, Pins, resolve_pins
from loka.dispatch.planner.reasons import Verdict
from loka.dispatch.planner.writing import choice_of, predicted, rejected_of
from loka.kernels import check_patterns
from loka.vocab import Pass, Requirement, Site

__all__ = ["make_plan"]

Key = tuple[str, Pass]


def make_plan(profile: Profile, requirement: Requirement | None = None) -> Plan:
    """Choose a kernel for each pass of each site.

    Candidates are every kernel that supports the product at the median M, with E4M3 or (for a gradient) E5M2.
    They are judged by the measured error of their recipe, and by their changes of the loss: over the kinds of
    pass for which the profile holds estimates these add up to a sum that stays, with its margin, within
    `max_loss_increase` and is spent where it brings most. With times of the profile's device the fastest
    combination of a site's passes is taken, casts included and shared; without, the coarsest recipe that
    passes. Nothing here touches a device or a clock.

    Args:
        profile: What was measured.
        requirement: What the plan must keep; the defaults when None.

    Returns:
        The plan, with a reason for every candidate that was not taken.

    Raises:
        UnknownNameError: for a pattern of kernels or sites that matches nothing.
        NoKernelError: for a pinned kernel that cannot run.
        ArtifactError: for a profile whose columns have unequal lengths.
    """
    requirement = requirement or Requirement()
    check_columns(profile, "profile")
    check_patterns((*requirement.allow, *requirement.deny))
    planning = _Planning(profile, Facts.of(profile), requirement)
    pins = resolve_pins(requirement.pin, planning.facts.sites, profile.device)
    plan = planning.plan(pins)
    if not pins:
        return plan
    return _with_overrides(plan, planning.plan({}), pins)


def _with_overrides(plan: Plan, unpinned: Plan, pins: Pins) -> Plan:
    before = {site.name: site for site in unpinned.sites}
    overrides = tuple(
        Override(
            site=site.name,
            pass_=pass_,
            kernel=site.choices(pass_)[0].kernel,
            instead_of=before[site.name].choices(pass_)[0].kernel,
            by=f"pin `{pins[site.name, pass_].pattern}`",
        )
        for site in plan.sites
        for pass_ in Pass
        if (site.name, pass_) in pins
    )
    return Plan(**{f: getattr(plan, f) for f in plan.__struct_fields__} | {"overrides": overrides})


@dataclass(slots=True)
class _SitePlanning:
    """The candidates of one site and what was fixed before choosing."""

    site: Site
    candidates: dict[Pass, list[Candidate]]
    pinned: dict[Pass, Candidate | None]
    narrow: str
    pins: dict[Pass, Pin]


class _Planning:
    """One run of the planner."""

    def __init__(self, profile: Profile, facts: Facts, requirement: Requirement) -> None:
        self.profile = profile
        self.facts = facts
        self.requirement = requirement
        self.sites = [site for site in facts.sites if site.plannable]
        # Without an estimate the loss cannot gate: it is reported as "not estimated".
        self.limit = requirement.max_loss_increase if facts.loss else None
        self.estimated = facts.estimated
        self.casts = CastCosts(facts)
        self.made = Candidates(facts, profile.device, requirement)
        self.candidates = {
            (site.name, pass_): self.made.of(site, pass_) for site in self.sites for pass_ in Pass
        }

    def plan(self, pins: Pins) -> Plan:
        sites = [self._site_planning(site, pins) for site in self.sites]
        base = _spent_by([c for s in sites for c in s.pinned.values() if c is not None])
        units, owners = self._units(sites)
        selection = select(units, limit=self.limit, base=base)
        picks: dict[Key, Candidate] = {}
        granted: dict[Key, Grant | None] = {}
        for number, (owner, passes) in enumerate(owners):
            option = selection.taken[number]
            for pass_ in passes:
                granted[owner.site.name, pass_] = _grant(selection, number)
            for pick in option.picks if option is not None else ():
                picks[owner.site.name, pick.problem.pass_] = pick
        return self._written(sites, picks, granted)

    def _site_planning(self, site: Site, pins: Pins) -> _SitePlanning:
        mine = {pass_: pins[site.name, pass_] for pass_ in Pass if (site.name, pass_) in pins}
        candidates = {pass_: self.candidates[site.name, pass_] for pass_ in Pass}
        pinned = {pass_: self._pinned(site, pass_, candidates[pass_], pin) for pass_, pin in mine.items()}
        return _SitePlanning(site, candidates, pinned, narrow_reason(site), mine)

    def _pinned(self, site: Site, pass_: Pass, candidates: list[Candidate], pin: Pin) -> Candidate | None:
        """The candidate of a pin: of two gradient formats the one that passes, else the better measured."""
        if pin.is_bf16:
            return None
        if not pin.kernel.operands(pass_problem(site, pass_))[0].is_quantized:
            return self.made.pinned_plain(site, pass_, pin.kernel)
        usable = [
            c for c in candidates if c.kernel.name == pin.kernel.name and c.spec_a.format in pin.a_formats
        ]
        return max(usable, key=lambda c: (c.passes, -math.inf if c.error is None else c.error.sqnr_db_low))

    def _units(
        self, sites: list[_SitePlanning]
    ) -> tuple[list[list[Option]], list[tuple[_SitePlanning, tuple[Pass, ...]]]]:
        units: list[list[Option]] = []
        owners: list[tuple[_SitePlanning, tuple[Pass, ...]]] = []
        for planning in sites:
            if self.facts.timed:
                units.append(self._by_time(planning))
                owners.append((planning, tuple(Pass)))
                continue
            for pass_ in Pass:
                units.append(self._by_accuracy(planning, pass_))
                owners.append((planning, (pass_,)))
        return units, owners

    def _usable(self, planning: _SitePlanning, pass_: Pass) -> list[Candidate]:
        """What may enter the sequence: facts speak for it, and its loss is known where the loss decides.

        The budget is one over the kinds of pass whose loss was estimated. A kind of which the profile holds
        no estimate at all spends nothing and is left to the gates on the error; the plan says so.
        """
        if planning.narrow:
            return []
        needed = self.limit is not None and pass_ in self.estimated
        return [c for c in planning.candidates[pass_] if not c.fault and not (needed and c.loss is None)]

    def _by_accuracy(self, planning: _SitePlanning, pass_: Pass) -> list[Option]:
        if pass_ in planning.pins:
            return []
        emulate = self.profile.device.type == "cpu"
        ranked = sorted(self._usable(planning, pass_), key=lambda c: coarseness(c, prefer_emulated=emulate))
        flops = float(planning.site.flops)
        return [
            Option((c,), flops, delta, se, c.passes)
            for c in ranked
            if flops > 0
            for delta, se in [spent(c.loss)]
        ]

    def _by_time(self, planning: _SitePlanning) -> list[Option]:
        choices: list[list[Candidate | None]] = []
        for pass_ in Pass:
            if pass_ in planning.pins:
                choices.append([planning.pinned[pass_]])
            else:
                choices.append([None, *self._usable(planning, pass_)])
        return time_options(
            planning.site,
            choices,
            facts=self.facts,
            casts=self.casts,
            min_speedup=self.requirement.min_speedup,
            gated_only=self.limit is None,
        )

    def _written(
        self,
        sites: list[_SitePlanning],
        picks: dict[Key, Candidate],
        granted: dict[Key, Grant | None],
    ) -> Plan:
        emulate = self.profile.device.type == "cpu"
        rejected: list[Rejected] = []
        written: list[SitePlan] = []
        final: list[tuple[Site, Picks]] = []
        for planning in sites:
            site = planning.site
            chosen = [planning.pinned[p] if p in planning.pins else picks.get((site.name, p)) for p in Pass]
            all_picks: Picks = (chosen[0], chosen[1], chosen[2])
            final.append((site, all_picks))
            choices: list[Choice] = []
            for pass_, pick in zip(Pass, chosen, strict=True):
                verdict = Verdict(
                    site=site,
                    pass_=pass_,
                    candidates=tuple(planning.candidates[pass_]),
                    pick=pick,
                    picks=all_picks,
                    grant=granted.get((site.name, pass_)),
                    limit=self.limit,
                    pin=planning.pins.get(pass_),
                    narrow=planning.narrow,
                    facts=self.facts,
                    requirement=self.requirement,
                    prefer_emulated=emulate,
                )
                choices.append(choice_of(verdict))
                rejected += rejected_of(verdict)
            written.append(
                SitePlan(
                    name=site.name,
                    n=site.n,
                    k=site.k,
                    bias=site.bias,
                    fwd=(choices[0],),
                    dgrad=(choices[1],),
                    wgrad=(choices[2],),
                )
            )
        return Plan(
            requirement=replace(self.requirement, pin=dict(self.requirement.pin)),
            basis="time" if self.facts.timed else "accuracy",
            device=self.profile.device,
            model=self.profile.model,
            sites=tuple(written),
            unplanned={s.name: s.not_planned for s in self.facts.sites if not s.plannable},
            rejected=tuple(rejected),
            predicted=predicted(final, self.facts, self.profile.device.name),
            history=(
                f"made from a profile of {self.profile.steps_observed} observed steps "
                f"out of {self.profile.steps_seen}",
            ),
        )


def _spent_by(pinned: list[Candidate]) -> Grant:
    changes = [spent(c.loss) for c in pinned]
    return math.fsum(delta for delta, _ in changes), math.sqrt(math.fsum(se**2 for _, se in changes))


def _grant(selection: Selection, unit: int) -> Grant | None:
    return None if selection.grants is None else selection.grants[unit]
