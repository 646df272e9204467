"""Safe or not, fast or not: each pass of each site judged by one requirement. A pure function of a profile.

A pass is *safe* where a recipe that a kernel can run here keeps the requirement's gates and, where the change
of the loss was estimated, its limit by this one switch alone. It is *fast* where that kernel, its casts
included and shared with nothing, is as much faster than bf16 as the requirement asks. Of a safe pass the
fastest safe kernel is meant: a fast kernel that ruins the product helps nobody. Of an unsafe pass it is the
fastest of all, since that is what a safer operand could gain. A plan may do better: passes share casts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from loka.artifacts import Profile
from loka.dispatch.planner.budget import MARGIN
from loka.dispatch.planner.by_time import alone_us
from loka.dispatch.planner.candidates import Candidate, Candidates, coarseness, narrow_reason
from loka.dispatch.planner.facts import Facts
from loka.vocab import Pass, Requirement, Site

__all__ = ["Judgement", "Quadrant", "judge_passes"]


class Quadrant(StrEnum):
    """Where a pass falls, in the order in which they are shown."""

    SAFE_FAST = "safe and fast"
    SAFE_SLOW = "safe and slow"
    UNSAFE_FAST = "unsafe and fast"
    UNSAFE_SLOW = "unsafe and slow"
    SAFE = "safe, not timed"
    UNSAFE = "unsafe, not timed"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One pass of one site.

    Attributes:
        site: Its name.
        pass_: The pass.
        quadrant: Where it falls.
        reason: Which kernel, which gate, which number, in words.
        flops_share: Share of the pass in the FLOPs of all products, 0 to 1.
        kernel: The kernel whose error is given: of a safe pass the one to take, else the most exact one.
        sqnr_db: Its mean SQNR.
        row_p99: Its 99th percentile of the row error.
        source: `live` or `sampled` error.
        delta_ne: Relative change of the loss when this pass alone is switched; None where not estimated.
        se: Standard error of it.
        fastest: The kernel whose speed is given.
        speedup: bf16 time over its time, casts included; None where not timed.
    """

    site: str
    pass_: Pass
    quadrant: Quadrant
    reason: str
    flops_share: float
    kernel: str | None = None
    sqnr_db: float | None = None
    row_p99: float | None = None
    source: str | None = None
    delta_ne: float | None = None
    se: float | None = None
    fastest: str | None = None
    speedup: float | None = None


def judge_passes(profile: Profile, requirement: Requirement | None = None) -> list[Judgement]:
    """Every pass of every site, by quadrant and then by FLOPs.

    Args:
        profile: What was measured.
        requirement: The gates, the limit on the loss and the least speed-up (None there: 1); the defaults
            when None. Its pins are left out: they override the gates.

    Returns:
        Three judgements a site, those of products that cannot be planned included as `NOT_JUDGED`.
    """
    judge = _Judge(profile, requirement or Requirement())
    found = [judge.of(site, pass_) for site in judge.facts.sites for pass_ in Pass]
    order = list(Quadrant)
    return sorted(found, key=lambda j: (order.index(j.quadrant), -j.flops_share))


@dataclass(frozen=True, slots=True)
class _Seen:
    """A usable candidate with what was found against it and how fast it is."""

    candidate: Candidate
    against: str
    speedup: float | None

    @property
    def name(self) -> str:
        return self.candidate.label


class _Judge:
    def __init__(self, profile: Profile, requirement: Requirement) -> None:
        self.facts = Facts.of(profile)
        self.requirement = requirement
        self.wanted = 1.0 if requirement.min_speedup is None else requirement.min_speedup
        self._emulate = profile.device.type == "cpu"
        untimed = replace(self.facts, products={})
        self._candidates = Candidates(self.facts, profile.device, requirement)
        self._by_error_alone = Candidates(untimed, profile.device, requirement)
        self._flops = sum(site.flops for site in self.facts.sites) * len(Pass) or 1

    def of(self, site: Site, pass_: Pass) -> Judgement:
        reason = self._left_out(site)
        if reason:
            return self._judgement(site, pass_, Quadrant.NOT_JUDGED, reason)
        candidates = self._candidates.of(site, pass_)
        seen = self._usable(site, pass_, candidates)
        if not seen:  # kernels that were tried but not timed at this shape
            seen = self._usable(site, pass_, self._by_error_alone.of(site, pass_))
        if not seen:
            return self._judgement(site, pass_, Quadrant.NOT_JUDGED, _why_none(candidates))
        safe = [s for s in seen if not s.against]
        return self._safe(site, pass_, seen, safe) if safe else self._unsafe(site, pass_, seen)

    def _left_out(self, site: Site) -> str:
        if not site.plannable:
            return site.not_planned
        if not site.rows:
            return "never reached in an observed step"
        return narrow_reason(site)

    def _usable(self, site: Site, pass_: Pass, candidates: list[Candidate]) -> list[_Seen]:
        return [
            _Seen(c, c.gate or self._loss_gate(c), self._speedup(site, pass_, c))
            for c in candidates
            if not c.fault
        ]

    def _loss_gate(self, candidate: Candidate) -> str:
        limit, loss = self.requirement.max_loss_increase, candidate.loss
        if limit is None or loss is None or max(0.0, loss.delta_ne) + MARGIN * loss.se <= limit:
            return ""
        if loss.delta_ne <= limit:
            return f"{_loss_text(candidate)} is too uncertain for {limit:.1e}: take more held-out rows"
        return f"{_loss_text(candidate)} > {limit:.1e}"

    def _speedup(self, site: Site, pass_: Pass, candidate: Candidate) -> float | None:
        if candidate.product_us is None:
            return None
        return alone_us(site, pass_, candidate, self.facts).speedup

    def _safe(self, site: Site, pass_: Pass, seen: list[_Seen], safe: list[_Seen]) -> Judgement:
        fastest = _fastest(safe)
        if fastest is None:
            best = min(safe, key=lambda s: coarseness(s.candidate, prefer_emulated=self._emulate))
            reason = f"{best.name}: {_error_text(best.candidate)}"
            return self._judgement(site, pass_, Quadrant.SAFE, reason, best)
        numbers = _error_text(fastest.candidate)
        if (fastest.speedup or 0.0) >= self.wanted:
            reason = f"{fastest.name}: {fastest.speedup:.2f}x with casts; {numbers}"
            return self._judgement(site, pass_, Quadrant.SAFE_FAST, reason, fastest, fastest)
        reason = f"fastest safe {fastest.name}: {self._too_slow(fastest)} with casts; {numbers}"
        unsafe = _fastest([s for s in seen if s.against])
        if unsafe is not None and (unsafe.speedup or 0.0) >= self.wanted:
            reason += f"; {unsafe.name} has {unsafe.speedup:.2f}x, but {unsafe.against}"
        return self._judgement(site, pass_, Quadrant.SAFE_SLOW, reason, fastest, fastest)

    def _unsafe(self, site: Site, pass_: Pass, seen: list[_Seen]) -> Judgement:
        best = max(seen, key=_exactness)
        fastest = _fastest(seen)
        reason = f"best {best.name}: {best.against}"
        if fastest is None:
            return self._judgement(site, pass_, Quadrant.UNSAFE, reason, best)
        if (fastest.speedup or 0.0) < self.wanted:
            reason += f"; fastest {fastest.name}: {self._too_slow(fastest)} with casts"
            return self._judgement(site, pass_, Quadrant.UNSAFE_SLOW, reason, best, fastest)
        if fastest is best:
            reason += f", at {fastest.speedup:.2f}x with casts"
        else:
            reason += f"; {fastest.name} has {fastest.speedup:.2f}x, but {fastest.against}"
        return self._judgement(site, pass_, Quadrant.UNSAFE_FAST, reason, best, fastest)

    def _too_slow(self, seen: _Seen) -> str:
        return f"{seen.speedup:.2f}x < {self.wanted:.2f}"

    def _judgement(
        self,
        site: Site,
        pass_: Pass,
        quadrant: Quadrant,
        reason: str,
        shown: _Seen | None = None,
        fastest: _Seen | None = None,
    ) -> Judgement:
        error = None if shown is None else shown.candidate.error
        loss = None if shown is None else shown.candidate.loss
        return Judgement(
            site=site.name,
            pass_=pass_,
            quadrant=quadrant,
            reason=reason,
            flops_share=site.flops / self._flops,
            kernel=None if shown is None else shown.name,
            sqnr_db=None if error is None else error.sqnr_db,
            row_p99=None if error is None else error.row_p99,
            source=None if error is None else error.source,
            delta_ne=None if loss is None else loss.delta_ne,
            se=None if loss is None else loss.se,
            fastest=None if fastest is None else fastest.name,
            speedup=None if fastest is None else fastest.speedup,
        )


def _fastest(seen: list[_Seen]) -> _Seen | None:
    timed = [s for s in seen if s.speedup is not None]
    return max(timed, key=lambda s: s.speedup or 0.0) if timed else None


def _exactness(seen: _Seen) -> tuple[bool, float]:
    """Of two kernels the one that only the loss speaks against, else the one with the higher SQNR."""
    error = seen.candidate.error
    return not seen.candidate.gate, float("-inf") if error is None else error.sqnr_db_low


def _loss_text(candidate: Candidate) -> str:
    if candidate.loss is None:
        return "loss not estimated"
    return f"loss {candidate.loss.delta_ne:+.1e} (se {candidate.loss.se:.1e})"


def _error_text(candidate: Candidate) -> str:
    loss = _loss_text(candidate)
    if candidate.error is None:
        return loss
    e = candidate.error
    return f"{e.sqnr_db:.1f} dB, row error p99 {e.row_p99:.3g} ({e.source}), {loss}"


def _why_none(candidates: list[Candidate]) -> str:
    """The fault that says most: what was not measured before what cannot run."""
    faults = [c.fault for c in candidates]
    if "no measured error" in faults:
        return "no error was measured: the pass ran in no observed step"
    for start in ("no measured", "its output was not vetted", "unverified: "):
        for fault in faults:
            if fault.startswith(start):
                return fault
    return f"no kernel runs here: {faults[0]}" if faults else "no FP8 kernel exists"
