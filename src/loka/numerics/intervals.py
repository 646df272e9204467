"""Intervals for a mean, without a statistics library.

The distribution function of Student's t for whole degrees of freedom is a finite sum of cosines (Abramowitz &
Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4); its quantile is found by bisection.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from loka.errors import UsageError

__all__ = ["Interval", "interval_around", "mean_interval", "student_t_cdf", "student_t_quantile"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the two-sided interval around it.

    Attributes:
        mean: The estimate.
        low: Lower end.
        high: Upper end.
        level: Coverage, such as 0.9.
        count: Independent values it is made of.
    """

    mean: float
    low: float
    high: float
    level: float
    count: int


def student_t_cdf(t: float, *, df: int) -> float:
    """P(T <= t) for Student's t with a whole number of degrees of freedom.

    Raises:
        UsageError: if df < 1.
    """
    if df < 1:
        raise UsageError(f"Student's t needs at least 1 degree of freedom, got {df}")
    theta = math.atan(t / math.sqrt(df))
    cosine_squared = math.cos(theta) ** 2
    # Odd df: cos (1 + 2/3 cos^2 + 2*4/(3*5) cos^4 + ...); even df: 1 + 1/2 cos^2 + 1*3/(2*4) cos^4 + ...
    odd = df % 2
    term, total = 1.0, 0.0
    for k in range(odd, df - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cosine_squared
    inner = math.sin(theta) * total
    central = 2 / math.pi * (theta + inner * math.cos(theta)) if odd else inner
    return 0.5 + central / 2


@functools.lru_cache(maxsize=4096)
def student_t_quantile(p: float, *, df: int) -> float:
    """The t with P(T <= t) = p, to the last digits of a float.

    Raises:
        UsageError: if p is not in (0, 1) or df < 1.
    """
    if not 0.0 < p < 1.0:
        raise UsageError(f"a quantile needs a probability in (0, 1), got {p}")
    if p < 0.5:
        return -student_t_quantile(1.0 - p, df=df)
    if p == 0.5:
        return 0.0
    low, high = 0.0, 1.0
    while student_t_cdf(high, df=df) < p and high < 1e300:
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if student_t_cdf(middle, df=df) < p:
            low = middle
        else:
            high = middle
    return high


def mean_interval(values: Sequence[float], *, level: float = 0.9) -> Interval:
    """Student's t interval for the mean of independent values.

    Args:
        values: At least two.
        level: Coverage in (0, 1).

    Raises:
        UsageError: if there are fewer than two values, or the level is not in (0, 1).
    """
    if len(values) < 2:
        raise UsageError(f"an interval of a mean needs at least two values, got {len(values)}")
    return interval_around(statistics.fmean(values), statistics.stdev(values), count=len(values), level=level)


def interval_around(mean: float, deviation: float, *, count: int, level: float = 0.9) -> Interval:
    """Student's t interval for a mean whose values are summed up already.

    Args:
        mean: Of the values.
        deviation: Their sample standard deviation.
        count: Their number, at least two.
        level: Coverage in (0, 1).

    Raises:
        UsageError: if there are fewer than two values, or the level is not in (0, 1).
    """
    if count < 2:
        raise UsageError(f"an interval of a mean needs at least two values, got {count}")
    if not 0.0 < level < 1.0:
        raise UsageError(f"the level of an interval must lie in (0, 1), got {level}")
    half = student_t_quantile((1 + level) / 2, df=count - 1) * deviation / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, level, count)
