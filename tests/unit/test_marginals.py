"""Marginals: histograms of every feature, against a direct count, merged in any parts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.errors import UsageError
from loka.numerics.marginals import MARGINAL_BINS, Marginals, half_octave


def direct_counts(values: list[float]) -> tuple[list[int], int]:
    """Counts and origin of one feature, worked out number by number."""
    halves = [math.floor(2 * math.log2(abs(v))) for v in values if v != 0]
    origin = max(halves, default=-400)
    counts = [0] * MARGINAL_BINS
    for value in values:
        if value == 0:
            counts[31] += 1
            continue
        depth = origin - math.floor(2 * math.log2(abs(value)))
        counts[63 - min(depth, 31) if value > 0 else min(depth, 30)] += 1
    return counts, origin


def assert_the_same(a: Marginals, b: Marginals, *, rtol: float = 0) -> None:
    """Equal but for the positions in even bins: cast to 1/256 of a bin, once of a narrower bin."""
    loose = {"fine_inside": 1 / 256, "fine_squares": 2 / 256}
    for name, tensor in a.tensors().items():
        other = b.tensors()[name]
        if name in loose:
            assert bool(((tensor - other).abs() <= loose[name] * a.fine_counts).all()), name
        else:
            torch.testing.assert_close(tensor, other, rtol=rtol, atol=0, msg=name)


values = st.one_of(
    st.just(0.0),
    st.floats(-1e6, 1e6, width=32, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 1e-30),
    st.sampled_from([1.0, -1.0, 2.0, -4.0, 1e-20, -3e-9]),
)


@settings(deadline=None, max_examples=80)
@given(rows=st.lists(st.tuples(values, values), min_size=1, max_size=30), cut=st.integers(0, 30))
def test_merged_counts_are_those_of_a_direct_count(rows: list[tuple[float, float]], cut: int) -> None:
    x = torch.tensor(rows)
    known = Marginals.of(x[:cut]).merge(Marginals.of(x[cut:]))
    whole = Marginals.of(x)
    assert_the_same(whole, known)
    for feature in range(2):
        column = [row[feature] for row in rows]
        counts, origin = direct_counts(x[:, feature].tolist())
        assert known.counts[feature].tolist() == counts
        assert int(known.origin[feature]) == origin
        assert float(known.low[feature]) == pytest.approx(min(column), rel=1e-6)
        assert float(known.high[feature]) == pytest.approx(max(column), rel=1e-6)


def test_merging_is_associative_where_origins_differ_by_more_than_the_bins() -> None:
    parts = [torch.tensor([[10.0**k, -(10.0**-k)]]) for k in (-12, 8, 0, 3)]
    a, b, c, d = (Marginals.of(p) for p in parts)
    left, right = a.merge(b).merge(c).merge(d), a.merge(b.merge(c.merge(d)))
    assert_the_same(left, right)
    assert int(left.counts.sum()) == 8


def test_half_octaves_follow_from_the_bits() -> None:
    magnitudes = torch.tensor([1.0, 1.4142, 1.4143, 2.0, 0.7072, 2.0**-126, 3.4e38, 0.0])
    assert half_octave(magnitudes).tolist() == [0, 0, 1, 2, -1, -252, 255, -400]


def test_quantiles_of_uniform_numbers_come_back_within_a_bin() -> None:
    x = torch.linspace(-3, 5, 8001)[:, None]
    u = torch.tensor([[0.0], [0.1], [0.375], [0.5], [0.9], [1.0]])
    found = Marginals.of(x).quantile(u)
    torch.testing.assert_close(found, -3 + 8 * u, rtol=2e-3, atol=2e-3)


def test_exact_zeros_and_bounds_survive() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 3, generator=generator).relu()
    x[:, 1] = x[:, 1].clamp(max=0.5)
    x[:, 2] = 7.25
    known = Marginals.of(x)
    drawn = known.quantile(torch.rand(20000, 3, generator=generator))
    zeros = (drawn == 0).double().mean(dim=0)
    torch.testing.assert_close(zeros, (x == 0).double().mean(dim=0), rtol=0, atol=0.02)
    assert float(drawn[:, 1].max()) <= 0.5
    assert bool((drawn[:, 2] == 7.25).all())
    assert float(drawn.min()) == 0


def test_quantiles_rise_and_stay_within_what_was_seen() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(500, 4, generator=generator).pow(5)
    known = Marginals.of(x)
    u = torch.linspace(0, 1, 301)[:, None].expand(-1, 4)
    drawn = known.quantile(u)
    assert bool((drawn.diff(dim=0) >= 0).all())
    assert bool((drawn[0] >= x.amin(dim=0)).all())
    assert bool((drawn[-1] <= x.amax(dim=0)).all())
    torch.testing.assert_close(drawn[0], x.amin(dim=0), rtol=0.2, atol=0)
    torch.testing.assert_close(drawn[-1], x.amax(dim=0), rtol=0.2, atol=0)


def test_a_feature_of_a_few_values_is_not_smeared() -> None:
    x = torch.tensor([-1.25, 0.0, 1.1, 6.0]).repeat(100)[:, None]
    drawn = Marginals.of(x[:130]).merge(Marginals.of(x[130:])).quantile(torch.rand(2000, 1))
    nearest = (drawn - torch.tensor([-1.25, 0.0, 1.1, 6.0])).abs().min(dim=1).values
    assert float((nearest / drawn.squeeze(1).abs().clamp(min=1)).max()) < 0.002


def test_positions_within_a_bin_add_up_over_parts_and_words() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4200, 2, generator=generator)
    whole, parts = Marginals.of(x), Marginals.of(x[:1000]).merge(Marginals.of(x[1000:]))
    assert_the_same(whole, parts, rtol=1e-6)
    # Directly, in the bin of [1, sqrt 2) of the first feature.
    values = x[:, 0][(x[:, 0] >= 1) & (x[:, 0] < 2**0.5)].double()
    position = ((values - 1) / (2**0.5 - 1) * 256).floor() / 256
    place = 63 - int(whole.origin[0])
    assert int(whole.counts[0, place]) == values.numel()
    assert float(whole.inside[0, place]) == pytest.approx(float(position.sum()), abs=0.02)
    assert float(whole.inside_squares[0, place]) == pytest.approx(float(position.square().sum()), abs=0.02)


def test_nearly_constant_features_keep_their_shape() -> None:
    # Bulk and a few rows beside it, all within one half octave; quantiles of the rows themselves.
    generator = torch.Generator().manual_seed(4)
    x = (1.2 + 0.004 * torch.randn(4096, 1, generator=generator)).clamp(max=1.203)
    x[::40] = 1.37
    u = (torch.arange(1, 400)[:, None] / 400).double()
    found = Marginals.of(x[:1000]).merge(Marginals.of(x[1000:])).quantile(u)
    wanted = x.sort(dim=0).values[(u * 4096).long().flatten()]
    assert float((found - wanted).abs().max()) < 0.0015


def test_values_at_a_cap_stay_there() -> None:
    # One-signed, over decades, a hundredth of the rows at the largest value, as clipped counts are.
    generator = torch.Generator().manual_seed(5)
    x = (3 * torch.randn(20000, 1, generator=generator)).exp().clamp(max=1000)
    share = float((x == 1000).double().mean())
    assert 0.005 < share < 0.02
    drawn = Marginals.of(x).quantile((torch.arange(100000)[:, None] + 0.5) / 100000)
    assert float((drawn > 999).double().mean()) == pytest.approx(share, rel=0.1)


def test_bf16_values_are_drawn_as_such() -> None:
    generator = torch.Generator().manual_seed(6)
    x = (torch.randn(3000, 3, generator=generator) * torch.tensor([1.0, 1e-3, 1e5])).bfloat16().float()
    known = Marginals.of(x[:50]).merge(Marginals.of(x[50:]))
    assert known.digits.tolist() == [8, 8, 8]
    drawn = known.quantile(torch.rand(5000, 3, generator=generator))
    assert torch.equal(drawn, drawn.bfloat16().float())
    assert bool((drawn <= x.amax(dim=0)).all())


def test_without_even_bins_half_octaves_serve() -> None:
    # As a file from before there were even bins is read.
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8000, 2, generator=generator)
    later = {"fine_counts", "fine_inside", "fine_squares", "digits"}

    def old(rows: torch.Tensor) -> Marginals:
        kept = {name: t for name, t in Marginals.of(rows).tensors().items() if name not in later}
        return Marginals.from_tensors(kept)

    u = torch.rand(40000, 2, generator=generator)
    wanted = torch.special.ndtri(u.double()).float()
    for known in (old(x), old(x[:4000]).merge(Marginals.of(x[4000:]))):
        found = known.quantile(u)
        assert known.digits.tolist() == [24, 24]
        assert float((found - wanted).abs().mean()) < 0.03
        assert found.square().mean().item() == pytest.approx(x.square().mean().item(), rel=0.02)


def test_second_moments_of_a_heavy_tail_come_back() -> None:
    generator = torch.Generator().manual_seed(2)
    x = (2 * torch.randn(20000, 2, generator=generator)).exp()
    drawn = Marginals.of(x).quantile((torch.arange(100000)[:, None] + 0.5).expand(-1, 2) / 100000)
    assert drawn.square().mean(dim=0).tolist() == pytest.approx(x.square().mean(dim=0).tolist(), rel=0.1)


def test_bad_rows_and_no_rows() -> None:
    x = torch.tensor([[1.0, -2.0], [torch.nan, 5.0], [torch.inf, 1.0], [0.0, 3.0]])
    known, good = Marginals.of(x), Marginals.of(x[[0, 3]])
    for name, tensor in good.tensors().items():
        assert torch.equal(tensor, known.tensors()[name]), name
    nothing = Marginals.of(torch.full((2, 2), torch.nan))
    assert torch.equal(nothing.quantile(torch.rand(5, 2)), torch.zeros(5, 2))
    again = nothing.merge(good)
    for name, tensor in good.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name


def test_wrong_use_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"Marginals.of takes \[rows, features\], got shape \(3,\)"):
        Marginals.of(torch.zeros(3))
    with pytest.raises(UsageError, match="marginals of 3 and of 4 features"):
        Marginals.empty(3).merge(Marginals.empty(4))
