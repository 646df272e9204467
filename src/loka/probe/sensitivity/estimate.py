"""Estimates of the change of the loss, corrected by direct trials where they are uncertain.

Estimate and direct trial look at the same rows, so the noise of the rows is common to both; what a trial adds
is how the network bends between site and loss, which the estimate leaves out. A few trials say how much that
is as a share of the estimate's second-order part, and the others are given that much of doubt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from loka.probe.sensitivity.changes import Change, relative_change
from loka.probe.sensitivity.direct import DirectChanges
from loka.probe.sensitivity.scores import RowScores

__all__ = ["Bend", "bend_of", "corrected", "evenly_spread", "uncertain", "with_doubt"]

# Doubt that is this share of the sampling error adds 12 % to the standard error, and a trial's cost is a
# forward: below it, more rows are the better use of time.
_DOUBT = 0.5
# The same where the budget could be on either side of the estimate.
_DOUBT_NEAR_BUDGET = 0.1


@dataclass(frozen=True, slots=True)
class Bend:
    """How far direct trials were from estimates.

    Attributes:
        share: Root mean square of the difference over that of the estimates' second-order parts.
        trials: Trials it is made of.
    """

    share: float
    trials: int


def evenly_spread(scores: RowScores, known: Sequence[int], count: int) -> list[int]:
    """`count` of the pairs, evenly spread over the order of their second-order parts, from the largest."""
    ranked = sorted(known, key=lambda i: -abs(scores.second(i)))
    if count >= len(ranked):
        return ranked
    step = len(ranked) / max(count, 1)
    return [ranked[int(i * step)] for i in range(count)]


def bend_of(scores: RowScores, direct: DirectChanges, trials: Mapping[int, int]) -> Bend:
    """Compare direct trials with the estimates of the same rows.

    Args:
        scores: Estimates.
        direct: Trials, on the first rows of the scores.
        trials: Pair to trial.
    """
    rows = direct.losses.numel()
    base = float(direct.losses.mean())
    off = signal = 0.0
    for pair, trial in trials.items():
        estimate = scores.shift([pair])[:rows]
        off += (float((direct.differences[trial] - estimate).mean()) / base) ** 2
        signal += scores.second(pair) ** 2
    return Bend(math.sqrt(off / signal) if signal > 0 else 1.0, len(trials))


def uncertain(
    scores: RowScores, known: Sequence[int], bend: Bend, *, budget: float | None, at_most: int
) -> list[int]:
    """The pairs for which a direct trial is worth its cost, the most doubtful first.

    Args:
        scores: Estimates.
        known: Pairs to choose from.
        bend: How far estimates are off.
        budget: The limit on the loss that a plan will have to keep, if known.
        at_most: Most trials.
    """
    worth: list[tuple[float, int]] = []
    for i in known:
        delta, se = scores.change([i])
        doubt = bend.share * abs(scores.second(i))
        near = budget is not None and abs(delta - budget) <= 2 * math.hypot(se, doubt)
        if doubt > (_DOUBT_NEAR_BUDGET if near else _DOUBT) * se:
            worth.append((-doubt / se if se > 0 else -math.inf, i))
    return [i for _, i in sorted(worth)[:at_most]]


def with_doubt(change: Change, second: float, bend: Bend) -> Change:
    """An estimate that was not tried: its standard error and its doubt together."""
    return Change(change.delta, math.hypot(change.se, bend.share * second))


def corrected(estimate: Tensor, losses: Tensor, differences: Tensor) -> Change:
    """A direct trial on the first rows, with the estimate of all rows as its control variate.

    The regression estimator of two-phase sampling (Cochran, "Sampling Techniques", 1977, section 12.6):
    mean of the trial on its n rows, plus b times what the estimate's mean on all rows differs from that on
    the n. Where the trial covers all rows, it is the trial.

    Args:
        estimate: fp64 [rows].
        losses: fp64 [rows].
        differences: fp64 [n], n <= rows: the trial's, of the first n rows.
    """
    rows, n = losses.numel(), differences.numel()
    if n == rows:
        return relative_change(differences, losses)
    s, s_n = estimate - estimate.mean(), estimate[:n] - estimate[:n].mean()
    variance = float(s_n.square().mean())
    slope = float((s_n * (differences - differences.mean())).mean()) / variance if variance > 0 else 0.0
    rest = differences - differences.mean() - slope * s_n
    base = float(losses.mean())
    mean = float(differences.mean()) + slope * float(estimate.mean() - estimate[:n].mean())
    spread = float(rest.square().sum()) / max(n - 2, 1) / n + slope**2 * float(s.square().mean()) / rows
    return Change(mean / base, math.sqrt(spread) / base if n > 2 else math.inf)
