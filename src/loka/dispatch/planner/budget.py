"""Which switches fit a limit on the loss: one sequence, a requirement takes the furthest prefix.

That is decision 10. A unit is what is switched together; each of its options has a predicted change of the
loss (delta, se) and a value (time saved, or FLOPs). The order in which budget is *granted* is built from
measured facts only, never from the requirement: best value per predicted loss first, along the concave hull
of each unit's options. A requirement then (1) gets the longest prefix of grants whose summed delta plus 1.64
combined standard errors stays within its limit and (2) takes, at each unit, its best option among those that
it allows and whose delta and se were granted. A lower limit gives a shorter prefix and a stricter gate fewer
options: both can only lower the value. That is why a stricter requirement never predicts a faster plan.

One switch larger than the whole limit would end the prefix at once. So the sequence is also built with only
the options below a cap, for every power of two that occurs, and the best of these plans is taken: each is
monotone in the requirement, hence so is their maximum.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from loka.dispatch.planner.candidates import Candidate
from loka.dispatch.planner.facts import LossChange

__all__ = ["MARGIN", "Grant", "Option", "Selection", "select", "spent"]

MARGIN = 1.64  # standard errors: the one-sided 95 % point of a normal distribution

Grant = tuple[float, float]  # largest delta and largest se an option may have


def spent(change: LossChange | None) -> Grant:
    """What a switch takes of the budget, as delta and se; nothing where no change was estimated.

    A gain counts as no change, its noise in full: of the several recipes that are tried at a site the
    luckiest looks like a gain, and it would be picked for that.
    """
    return (0.0, 0.0) if change is None else (max(0.0, change.delta_ne), change.se)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to switch a unit.

    Attributes:
        picks: The candidates it runs.
        value: What it brings, above 0.
        delta: Predicted relative change of the loss, as `spent` counts it.
        se: Its standard error, likewise.
        allowed: Whether the requirement's gates let it pass.
    """

    picks: tuple[Candidate, ...]
    value: float
    delta: float = 0.0
    se: float = 0.0
    allowed: bool = True

    @property
    def upper(self) -> float:
        """Delta plus its margin."""
        return self.delta + MARGIN * self.se


@dataclass(frozen=True, slots=True)
class Selection:
    """The option taken at each unit (None: stays as it is) and what was granted (None: everything)."""

    taken: tuple[Option | None, ...]
    grants: tuple[Grant, ...] | None


def select(units: Sequence[Sequence[Option]], *, limit: float | None, base: Grant = (0.0, 0.0)) -> Selection:
    """Take an option at each unit.

    Args:
        units: The options of each unit, the preferred first; a preferred one never has a lower value.
        limit: Largest predicted change of the loss with its margin; None for no limit.
        base: Delta and se that are spent already (pins).
    """
    if limit is None:
        return Selection(_taken(units, None), None)
    ledgers = [_Ledger.of(options) for options in units]
    everything = [ledger.largest(math.inf) for ledger in ledgers]
    if _bound(everything, base) <= limit:
        return Selection(_taken(units, None), None)
    best: Selection | None = None
    best_value = -1.0
    for cap in _caps(ledgers):
        grants = _prefix(ledgers, cap, limit, base)
        taken = _taken(units, grants)
        value = math.fsum(option.value for option in taken if option is not None)
        if value > best_value:
            best, best_value = Selection(taken, grants), value
    return best or Selection((None,) * len(units), ((-1.0, -1.0),) * len(units))


def _taken(units: Sequence[Sequence[Option]], grants: Sequence[Grant] | None) -> tuple[Option | None, ...]:
    if grants is None:
        return tuple(next((o for o in options if o.allowed), None) for options in units)
    return tuple(
        next((o for o in options if o.allowed and o.delta <= delta and o.se <= se), None)
        for options, (delta, se) in zip(units, grants, strict=True)
    )


def _bound(grants: Sequence[Grant], base: Grant) -> float:
    spent = [base, *grants]
    delta = math.fsum(max(0.0, d) for d, _ in spent)
    return delta + MARGIN * math.sqrt(math.fsum(max(0.0, se) ** 2 for _, se in spent))


@dataclass(frozen=True, slots=True)
class _Ledger:
    """The options of a unit by rising upper bound, with running maxima; and their efficient frontier."""

    uppers: tuple[float, ...]
    running: tuple[Grant, ...]
    frontier: tuple[Option, ...]

    @classmethod
    def of(cls, options: Sequence[Option]) -> _Ledger:
        ranked = sorted(options, key=lambda o: (o.upper, -o.value, o.delta))
        running = accumulate(((o.delta, o.se) for o in ranked), _larger)
        frontier: list[Option] = []
        for option in ranked:
            if not frontier or option.value > frontier[-1].value:
                frontier.append(option)
        return cls(tuple(o.upper for o in ranked), tuple(running), tuple(frontier))

    def largest(self, cap: float) -> Grant:
        """The grant that covers every option with an upper bound up to `cap`."""
        count = bisect_right(self.uppers, cap)
        return self.running[count - 1] if count else (-1.0, -1.0)


def _larger(a: Grant, b: Grant) -> Grant:
    return max(a[0], b[0]), max(a[1], b[1])


def _caps(ledgers: Sequence[_Ledger]) -> list[float]:
    exponents = {math.frexp(upper)[1] for ledger in ledgers for upper in ledger.uppers if upper > 0}
    return [math.inf, *(2.0**e for e in sorted(exponents, reverse=True)), 0.0]


def _hull(frontier: Sequence[Option], cap: float) -> list[tuple[float, Option]]:
    """The concave hull of (upper, value) from (0, 0): (value gained per loss added, option), falling."""
    points: list[tuple[float, float, Option | None]] = [(0.0, 0.0, None)]
    for option in frontier:
        if option.upper > cap:
            break
        while len(points) > 1 and _slope(points[-2], points[-1]) <= _slope(points[-1], option):
            points.pop()
        points.append((option.upper, option.value, option))
    return [(_slope(a, b), b[2]) for a, b in pairwise(points) if b[2] is not None]


def _slope(a: tuple[float, float, Option | None], b: tuple[float, float, Option | None] | Option) -> float:
    upper, value = (b.upper, b.value) if isinstance(b, Option) else (b[0], b[1])
    return math.inf if upper <= a[0] else (value - a[1]) / (upper - a[0])


def _prefix(ledgers: Sequence[_Ledger], cap: float, limit: float, base: Grant) -> tuple[Grant, ...]:
    """What each unit is granted by the longest prefix within the limit; (-1, -1) for nothing."""
    steps: list[tuple[float, int, int, Grant]] = []
    fills: list[tuple[float, int, Grant]] = []
    for unit, ledger in enumerate(ledgers):
        for order, (slope, option) in enumerate(_hull(ledger.frontier, cap)):
            steps.append((-slope, unit, order, (option.delta, option.se)))
        # Last, whatever is left under the cap: options that are no better per loss, but may be the
        # only ones that a requirement allows.
        largest = ledger.largest(cap)
        if largest[0] >= 0:
            fills.append((largest[0] + MARGIN * largest[1], unit, largest))
    granted: list[Grant] = [(-1.0, -1.0)] * len(ledgers)
    delta, variance = max(0.0, base[0]), base[1] ** 2
    sequence = [(unit, grant) for _, unit, _, grant in sorted(steps)]
    sequence += [(unit, grant) for _, unit, grant in sorted(fills)]
    for unit, grant in sequence:
        old = granted[unit]
        new = _larger(old, grant)
        delta += new[0] - max(0.0, old[0])
        variance += new[1] ** 2 - max(0.0, old[1]) ** 2
        if not delta + MARGIN * math.sqrt(max(0.0, variance)) <= limit:
            break
        granted[unit] = new
    return tuple(granted)
