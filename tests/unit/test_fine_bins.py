"""Even bins, stretches and digits against direct computation."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.numerics.digits import digits_of, rounded
from loka.numerics.fine_bins import FINE_BINS, fine_exponent, fine_numbers, power_of_two
from loka.numerics.marginals import Marginals
from loka.numerics.stretches import Stretches, shortened

values = st.one_of(
    st.floats(-1e6, 1e6, width=32, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 1e-30),
    st.floats(1, 1.015625, width=32),
    st.sampled_from([0.0, 1.0, -1.0, 3.0, -4.0, 1e-20, -3e-9, 3e38, -1e-40]),
)


def direct_number(value: float, k: int) -> int:
    """Bins 2^k wide counted from 0 outwards, in whole numbers."""
    outwards = math.floor(abs(Fraction(value)) / Fraction(2) ** k)
    return -1 - outwards if value < 0 else outwards


@settings(deadline=None, max_examples=150)
@given(rows=st.lists(values, min_size=1, max_size=30), cut=st.integers(0, 30))
def test_counts_are_those_of_a_direct_count_and_the_bins_as_narrow_as_fits(
    rows: list[float], cut: int
) -> None:
    x = torch.tensor(rows)[:, None]
    column = x.flatten().tolist()
    known = Marginals.of(x[:cut]).merge(Marginals.of(x[cut:]))
    k = int(fine_exponent(known.low, known.high))
    numbers = [direct_number(value, k) for value in column]
    counts = [0] * FINE_BINS
    for number in numbers:
        counts[number - min(numbers)] += 1
    assert known.fine_counts[0].tolist() == counts
    # One narrower needs more bins, or tells values apart that fp32 does not.
    finer = [direct_number(value, k - 1) for value in column]
    least = max(math.frexp(abs(value))[1] for value in column) - 24 if any(column) else -200
    assert max(finer) - min(finer) >= FINE_BINS or k == least


def test_numbers_count_outwards_from_zero() -> None:
    x = torch.tensor([0.0, 0.49, 0.5, -0.1, -0.5, -1.2])
    assert fine_numbers(x, torch.tensor(-1)).tolist() == [0, 0, 1, -1, -2, -3]


def test_powers_of_two_are_exact_over_the_range() -> None:
    exponents = torch.tensor([-1022, -200, -1, 0, 1, 300, 1023], dtype=torch.int32)
    assert power_of_two(exponents).tolist() == [math.ldexp(1, e) for e in exponents.tolist()]


def test_a_shortened_stretch_has_the_mean_and_the_variance() -> None:
    left, right = torch.tensor([0.0]).double(), torch.tensor([8.0]).double()
    mean, variance = torch.tensor([3.0]).double(), torch.tensor([2.0]).double()
    start, stop = shortened(left, mean, right, variance)
    known = Stretches(torch.ones(1, 1).double(), start[None], mean[None], stop[None])
    u = ((torch.arange(200000) + 0.5) / 200000)[:, None]
    drawn = known.quantile(u).double()
    assert drawn.mean().item() == pytest.approx(3, abs=1e-4)
    assert drawn.var().item() == pytest.approx(2, rel=1e-4)
    assert 0 <= drawn.min().item() <= drawn.max().item() <= 8
    whole = shortened(left, mean, right, torch.tensor([7.0]).double())
    assert (whole[0].item(), whole[1].item()) == (0, 8)


def test_stretches_follow_one_another_in_rising_order() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat(
        [
            torch.randn(4000, 1, generator=generator).exp(),
            torch.randn(4000, 1, generator=generator),
            -(5 + torch.randn(4000, 1, generator=generator)),
            torch.randn(4000, 1, generator=generator).relu() - 0.25,
        ],
        dim=1,
    )
    known = Marginals.of(x).stretches()
    assert known.counts.sum(dim=1).tolist() == [4000] * 4
    for feature in range(4):
        held = known.counts[feature] > 0
        start, mean, stop = (t[feature][held] for t in (known.start, known.mean, known.stop))
        assert bool((start <= mean).all())
        assert bool((mean <= stop).all())
        assert bool((stop[:-1] <= start[1:] + 1e-12).all())
        shares, column = known.shares[feature][held], x[:, feature].double()
        assert float((shares * mean).sum()) == pytest.approx(float(column.mean()), abs=1e-3)


def test_digits_by_hand_and_rounding_as_bf16_and_fp16_do() -> None:
    x = torch.tensor([[1.0, 0.0, 3.0, 2.0**-140, 0.1], [4.0, 0.0, 2.0, 3 * 2.0**-140, -5.0]])
    assert digits_of(x).tolist() == [1, 0, 2, 2, 24]
    wide = torch.randn(4000, 2, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 1e30])
    for dtype, digits in ((torch.bfloat16, 8), (torch.float32, 24)):
        cast = wide.to(dtype).float()
        many = torch.full((2,), digits, dtype=torch.int32)
        assert torch.equal(rounded(wide, many), cast)
        assert bool((digits_of(cast) == digits).all())
    some = wide[:, :1] * 10
    assert torch.equal(rounded(some, torch.tensor([11])), some.half().float())
