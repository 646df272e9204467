"""Options of one site by measured time: combinations over its three passes, each shared cast counted once.

Three tensors are cast: x for fwd and wgrad, w for fwd and dgrad, g for dgrad and wgrad. Two uses with an
equal spec share one cast, and a set of specs made in one call may be cheaper than the sum. Autocast's own
cast of a weight to bf16 is not credited to FP8, so a saving is never overstated by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loka.dispatch.planner.budget import Option, spent
from loka.dispatch.planner.candidates import Candidate, operand_tensors, pass_problem
from loka.dispatch.planner.facts import Facts
from loka.vocab import OperandSpec, Pass, Site

__all__ = ["CastCosts", "SiteTime", "alone_us", "site_time", "time_options"]

Picks = tuple[Candidate | None, Candidate | None, Candidate | None]


@dataclass(frozen=True, slots=True)
class SiteTime:
    """What the switched passes of a site take, once.

    Attributes:
        bf16_us: In bf16.
        planned_us: As picked, casts included.
        unknown: Switched passes without a measured time; they count on neither side.
    """

    bf16_us: float
    planned_us: float
    unknown: int

    @property
    def speedup(self) -> float:
        """bf16 over planned; infinite where the plan takes no measured time."""
        return self.bf16_us / self.planned_us if self.planned_us > 0 else math.inf


def site_time(site: Site, picks: Picks, facts: Facts) -> SiteTime:
    """Time of the picked passes of a site; None picks stay in bf16 and do not count."""
    bf16 = planned = 0.0
    unknown = 0
    specs: dict[tuple[str, tuple[int, int], bool], set[OperandSpec]] = {}
    for pass_, pick in zip(Pass, picks, strict=True):
        if pick is None:
            continue
        base = facts.bf16_us(pick.problem)
        if base is None or pick.product_us is None:
            unknown += 1
            continue
        bf16 += base
        planned += pick.product_us
        for key, spec in _tensors(site, pass_, pick):
            specs.setdefault(key, set()).add(spec)
    for (_, shape, weight), wanted in specs.items():
        cast_us = facts.casts.time_us(*shape, frozenset(wanted), weight=weight)
        planned += cast_us or 0.0
    return SiteTime(bf16, planned, unknown)


_TENSOR_NAMES = {Pass.FWD: ("x", "w"), Pass.DGRAD: ("g", "w"), Pass.WGRAD: ("g", "x")}


def _tensors(
    site: Site, pass_: Pass, pick: Candidate
) -> list[tuple[tuple[str, tuple[int, int], bool], OperandSpec]]:
    found = operand_tensors(site, pass_, pick.spec_a, pick.spec_b)
    names = _TENSOR_NAMES[pass_]
    # The name keeps x apart from g where N = K, and from w where M = N.
    return [
        ((name, shape, weight), spec)
        for name, (spec, shape, weight) in zip(names, found, strict=True)
        if spec.is_quantized
    ]


def alone_us(site: Site, pass_: Pass, candidate: Candidate, facts: Facts) -> SiteTime:
    """The time of one candidate when nothing shares its casts."""
    picks = tuple(candidate if p is pass_ else None for p in Pass)
    return site_time(site, (picks[0], picks[1], picks[2]), facts)


def time_options(
    site: Site,
    choices: Sequence[Sequence[Candidate | None]],
    *,
    facts: Facts,
    casts: CastCosts,
    min_speedup: float | None,
    gated_only: bool,
) -> list[Option]:
    """Every combination that can be taken, the preferred first.

    With `min_speedup`, value is the time saved over the combination in which only pinned passes are switched.
    Without, FP8 was asked for by accuracy alone: value is the FLOPs in FP8, and time decides between equals.

    Args:
        site: The site.
        choices: For each pass what may run: candidates and None for bf16; one entry where it is pinned.
        facts: The profile.
        casts: Times of casts, remembered over sites.
        min_speedup: Least bf16 time over planned time of what is switched, casts included.
        gated_only: Leave out what the gates refuse (when no limit on the loss needs the whole sequence).
    """
    pinned = [options[0] if len(options) == 1 else None for options in choices]
    base = site_time(site, (pinned[0], pinned[1], pinned[2]), facts)
    lists = [_fastest(options, gated_only) if len(options) > 1 else list(options) for options in choices]
    fwd, dgrad, wgrad = (
        [_part(site, pass_, c, facts, fixed=c is not None and c is p) for c in options]
        for pass_, options, p in zip(Pass, lists, pinned, strict=True)
    )
    x_us, w_us, g_us = (
        casts.table(site, "x", fwd, wgrad),
        casts.table(site, "w", fwd, dgrad),
        casts.table(site, "g", dgrad, wgrad),
    )
    flops = float(site.flops)
    ranked: list[tuple[float, float, int, Option]] = []
    for i, f in enumerate(fwd):
        for j, d in enumerate(dgrad):
            for n, w in enumerate(wgrad):
                free = f.free + d.free + w.free
                if not free:
                    continue
                over = f.us + d.us + w.us + w_us[i][j] + x_us[i][n] + g_us[j][n] - base.planned_us
                before = f.bf16_us + d.bf16_us + w.bf16_us
                saving = (before - over) * site.calls
                value = saving if min_speedup is not None else flops * len(free)
                if not value > 0:
                    continue
                fast_enough = min_speedup is None or before >= min_speedup * over
                option = Option(
                    picks=free,
                    value=value,
                    delta=f.delta + d.delta + w.delta,
                    se=math.sqrt(f.variance + d.variance + w.variance),
                    allowed=fast_enough and f.passes and d.passes and w.passes,
                )
                ranked.append((-value, over, len(ranked), option))
    ranked.sort(key=lambda item: item[:3])
    return [item[3] for item in ranked]


@dataclass(frozen=True, slots=True)
class _Part:
    """One choice for one pass, as the sums over a site's passes need it."""

    candidate: Candidate | None
    free: tuple[Candidate, ...] = ()
    us: float = 0.0
    bf16_us: float = 0.0
    delta: float = 0.0
    variance: float = 0.0
    passes: bool = True


def _part(site: Site, pass_: Pass, candidate: Candidate | None, facts: Facts, *, fixed: bool) -> _Part:
    if candidate is None or fixed:
        return _Part(candidate, us=0.0 if candidate is None else candidate.product_us or 0.0)
    delta, se = spent(candidate.loss)
    return _Part(
        candidate,
        free=(candidate,),
        us=candidate.product_us or 0.0,
        bf16_us=facts.bf16_us(pass_problem(site, pass_)) or 0.0,
        delta=delta,
        variance=se**2,
        passes=candidate.passes,
    )


def _fastest(options: Sequence[Candidate | None], gated_only: bool) -> list[Candidate | None]:
    """None, and for each pair of specs the fastest candidate of all and the fastest that passes.

    Equal specs have equal casts and an equal change of the loss, so no other one can be better.
    """
    best: dict[tuple[OperandSpec, OperandSpec, bool], Candidate] = {}
    for candidate in options:
        if candidate is None or candidate.fault or candidate.product_us is None:
            continue
        for passing in (False, True):
            if (passing and not candidate.passes) or (gated_only and not passing):
                continue
            key = (candidate.spec_a, candidate.spec_b, passing)
            if key not in best or candidate.product_us < (best[key].product_us or 0.0):
                best[key] = candidate
    unique = {id(c): c for c in best.values()}
    return [None, *unique.values()]


class CastCosts:
    """Time of casting one tensor for two passes, for every pair of choices; shared by sites of one shape."""

    def __init__(self, facts: Facts) -> None:
        self._casts = facts.casts
        # By identity: sites of one shape share their spec objects, and hashing a spec costs more than
        # all else here. The specs are kept beside the time, so that no identity is used twice.
        self._known: dict[tuple[int, int, bool, int, int], tuple[float, _Pair]] = {}

    def table(
        self, site: Site, tensor: str, first: Sequence[_Part], second: Sequence[_Part]
    ) -> list[list[float]]:
        """Microseconds [first, second]."""
        rows, columns = {"x": (site.rows, site.k), "w": (site.n, site.k), "g": (site.rows, site.n)}[tensor]
        specs = [_spec_of(tensor, part.candidate) for part in second]
        return [
            [self._cost(rows, columns, tensor == "w", (spec_a, spec_b)) for spec_b in specs]
            for spec_a in (_spec_of(tensor, part.candidate) for part in first)
        ]

    def _cost(self, rows: int, columns: int, weight: bool, pair: _Pair) -> float:
        key = (rows, columns, weight, id(pair[0]), id(pair[1]))
        known = self._known.get(key)
        if known is None:
            specs = frozenset(spec for spec in pair if spec is not None)
            known = (self._casts.time_us(rows, columns, specs, weight=weight) or 0.0, pair)
            self._known[key] = known
        return known[0]


_Pair = tuple[OperandSpec | None, OperandSpec | None]


def _spec_of(tensor: str, candidate: Candidate | None) -> OperandSpec | None:
    # A pinned candidate without a measured time counts on neither side, its casts included. One that is not
    # quantized has none.
    if candidate is None or candidate.product_us is None or not candidate.is_quantized:
        return None
    names = _TENSOR_NAMES[candidate.problem.pass_]
    return candidate.spec_a if tensor == names[0] else candidate.spec_b
