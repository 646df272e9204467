"""Intervals of a mean of few values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["MeanInterval", "mean_interval", "student_t_quantile"]


class MeanInterval(NamedTuple):
    """A mean with its two-sided interval; the ends equal the mean where one value gives no spread."""

    mean: float
    low: float
    high: float


def student_t_quantile(p: float, df: int) -> float:
    """The p-quantile of Student's t with df >= 1 degrees of freedom, to about 1e-9.

    By bisection on the distribution function, which for whole df is a finite sum (Abramowitz and Stegun
    26.7.3 and 26.7.4).
    """
    if p < 0.5:
        return -student_t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while _t_two_sided(high, df) < 2 * p - 1:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if _t_two_sided(middle, df) < 2 * p - 1:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_two_sided(t: float, df: int) -> float:
    """P(|T| <= t)."""
    theta = math.atan2(t, math.sqrt(df))
    cos2 = math.cos(theta) ** 2
    if df % 2:
        term, total = math.cos(theta), 0.0
        for i in range(1, df - 1, 2):
            total += term
            term *= cos2 * (i + 1) / (i + 2)
        return 2 / math.pi * (theta + math.sin(theta) * total)
    term, total = 1.0, 0.0
    for i in range(0, df, 2):
        total += term
        term *= cos2 * (i + 1) / (i + 2)
    return math.sin(theta) * total


def mean_interval(values: Sequence[float], *, level: float = 0.90) -> MeanInterval:
    """Mean and two-sided t-interval of independent values."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return MeanInterval(mean, mean, mean)
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = student_t_quantile((1 + level) / 2, n - 1) * sd / math.sqrt(n)
    return MeanInterval(mean, mean - half, mean + half)
