"""Counter-based draws against Python integers and exact distributions."""

from __future__ import annotations

import bisect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.recsys.data.synthetic_draws import Zipf, bits, key_of, mix64, normals, permutation, unit_interval

M = 2**64 - 1
words = st.integers(-(2**63), 2**63 - 1)


def mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
    return x ^ (x >> 31)


@settings(max_examples=200, deadline=None)
@given(counter=words, key=words, position=words)
def test_bits_are_64_bit_arithmetic(counter: int, key: int, position: int) -> None:
    x = torch.tensor([counter])
    assert mix64(x).item() & M == mixed(counter & M)
    at = (counter * 0x9E3779B97F4A7C15 + key) & M
    assert bits(x, key).item() & M == mixed(at)
    found = bits(x, key, position=torch.tensor([position])).item()
    assert found & M == mixed((at + position * 0xD1B54A32D192ED03) & M)


def test_splitmix64_known_answers() -> None:
    """The first outputs of SplitMix64 from state 1234567, as other implementations list them."""
    state = torch.arange(1, 4)
    found = [v & M for v in bits(state, 1234567).tolist()]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniform_and_normal_draws_are_distributed_as_they_say() -> None:
    random = bits(torch.arange(100_000), key_of(0, "test"))
    u = unit_interval(random)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    counts = torch.histc(u, 50, 0, 1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 49 + 5 * math.sqrt(98)  # chi squared, 49 degrees
    z = torch.cat(normals(random))
    phi = (1 + torch.special.erf(z / math.sqrt(2))) / 2
    counts = torch.histc(phi, 50, 0, 1)
    assert float(((counts - 4000) ** 2 / 4000).sum()) < 49 + 5 * math.sqrt(98)
    a, b = normals(random)
    assert abs(float((a * b).mean())) < 5 / math.sqrt(100_000)
    # The extreme words stay finite.
    ends = torch.cat(normals(torch.tensor([0, -1, 2**63 - 1, -(2**63)])))
    assert bool(torch.isfinite(ends).all())
    assert unit_interval(torch.tensor([-1])).item() == 1 - 2.0**-53


@pytest.mark.parametrize(
    ("n", "alpha", "shift"), [(1, 1.0, 1.0), (2, 0.0, 1.0), (1000, 0.9, 1.0), (65, 1.0, 2.0)]
)
def test_zipf_is_the_quantile_function(n: int, alpha: float, shift: float) -> None:
    zipf = Zipf(n, alpha, shift=shift)
    weight = [(r + shift) ** -alpha for r in range(n)]
    total = math.fsum(weight)
    cumulative = [round(2**32 * math.fsum(weight[: r + 1]) / total) for r in range(n - 1)]
    draws = [0, 1, 2**31, 2**32 - 1]
    draws += [d for c in cumulative for d in (c - 1, c, c + 1) if 0 <= d < 2**32]
    upper = torch.tensor([d - 2**31 for d in draws]) << 32  # the smallest word is the smallest draw
    found = zipf.ranks(upper | 12345).tolist()
    exact = [bisect.bisect_right(cumulative, d) for d in draws]
    # A bound of the table may be rounded the other way: one draw in 2**32 at its edge.
    near = [bisect.bisect_right(cumulative, d + e) for e in (-1, 1) for d in draws]
    assert all(
        r in (a, b, c)
        for r, a, b, c in zip(found, exact, near[: len(draws)], near[len(draws) :], strict=True)
    )
    assert sum(r == a for r, a in zip(found, exact, strict=True)) > 0.99 * len(draws)
    assert min(found) == 0
    assert max(found) == n - 1


def test_permutation_is_one() -> None:
    p = permutation(10_000, key_of(3, "x"))
    assert torch.equal(p.sort().values, torch.arange(10_000))
    assert abs(float(torch.corrcoef(torch.stack([p.double(), torch.arange(10_000.0).double()]))[0, 1])) < 0.05
    assert not torch.equal(p, permutation(10_000, key_of(4, "x")))
    assert key_of(3, "x") != key_of(3, "y")
