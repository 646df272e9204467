from __future__ import annotations

import math

import pytest

from loka.errors import UsageError
from loka.numerics.intervals import mean_interval, student_t_cdf, student_t_quantile

# Upper quantiles from printed tables of Student's t (four digits after the point or as many as printed).
TABLE = [
    (1, 0.95, 6.314),
    (2, 0.95, 2.920),
    (3, 0.95, 2.353),
    (4, 0.95, 2.132),
    (5, 0.975, 2.571),
    (9, 0.95, 1.833),
    (9, 0.995, 3.250),
    (10, 0.9, 1.372),
    (19, 0.975, 2.093),
    (30, 0.95, 1.697),
    (120, 0.95, 1.658),
]


@pytest.mark.parametrize(("df", "p", "expected"), TABLE)
def test_quantiles_equal_the_printed_table(df: int, p: float, expected: float) -> None:
    assert student_t_quantile(p, df=df) == pytest.approx(expected, abs=5.1e-4)
    assert student_t_quantile(1 - p, df=df) == pytest.approx(-expected, abs=5.1e-4)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 8, 25])
def test_distribution_equals_the_integral_of_its_density(df: int) -> None:
    constant = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    t, n = 1.7, 2000
    density = [constant * (1 + (t * i / n) ** 2 / df) ** (-(df + 1) / 2) for i in range(n + 1)]
    simpson = density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2])
    assert student_t_cdf(t, df=df) == pytest.approx(0.5 + simpson * t / n / 3, abs=1e-12)
    assert student_t_cdf(student_t_quantile(0.91, df=df), df=df) == pytest.approx(0.91, abs=1e-14)


def test_closed_forms() -> None:
    assert student_t_quantile(0.75, df=1) == pytest.approx(1.0, rel=1e-14)  # Cauchy
    assert student_t_quantile(0.9, df=2) == pytest.approx(0.8 * math.sqrt(2 / (1 - 0.64)), rel=1e-14)
    assert student_t_quantile(0.5, df=6) == 0.0


def test_interval_of_a_mean() -> None:
    interval = mean_interval([1.0, 2.0, 4.0])
    half = 0.9 * math.sqrt(2 / 0.19) * math.sqrt(7 / 3) / math.sqrt(3)
    assert interval.mean == pytest.approx(7 / 3)
    assert (interval.low, interval.high) == pytest.approx((7 / 3 - half, 7 / 3 + half), rel=1e-12)
    assert (interval.level, interval.count) == (0.9, 3)


def test_what_has_no_interval() -> None:
    with pytest.raises(UsageError, match="at least two values, got 1"):
        mean_interval([1.0])
    with pytest.raises(UsageError, match=r"in \(0, 1\), got 90"):
        mean_interval([1.0, 2.0], level=90)
    with pytest.raises(UsageError, match="degree of freedom, got 0"):
        student_t_cdf(1.0, df=0)
    with pytest.raises(UsageError, match="probability"):
        student_t_quantile(1.0, df=3)
