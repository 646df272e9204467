"""Covariance: full and sketched, against FP64, merged in any parts."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.errors import UsageError
from loka.numerics.covariance import FULL_FEATURES, SKETCH, Covariance, sketch_signs
from loka.probe.distributions.correlated import nystroem_loadings


def rows_of(seed: int, rows: int, features: int, *, shift: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator) / features**0.5
    return shift + scale * torch.randn(rows, features, generator=generator) @ mixing


def scatter64(x: torch.Tensor) -> torch.Tensor:
    deviation = x.double() - x.double().mean(dim=0)
    return deviation.t() @ deviation


def merged(parts: list[torch.Tensor]) -> Covariance:
    total = Covariance.empty(parts[0].shape[1])
    for part in parts:
        total = total.merge(Covariance.of(part))
    return total


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 40),
    features=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    shift=st.sampled_from([0.0, 3.0, 1000.0]),
)
def test_merging_parts_equals_fp64_of_the_whole(
    seed: int, rows: int, features: int, cuts: list[int], shift: float
) -> None:
    x = rows_of(seed, rows, features, shift=shift)
    bounds = sorted({0, rows, *(c for c in cuts if c < rows)})
    known = merged([x[a:b] for a, b in pairwise(bounds)])
    expected = scatter64(x)
    size = float(expected.abs().max()) + 1e-6 * shift**2
    assert int(known.count) == rows
    torch.testing.assert_close(known.mean, x.double().mean(dim=0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(known.scatter.double(), expected, rtol=0, atol=3e-6 * size + 1e-12)
    torch.testing.assert_close(known.m2, expected.diagonal(), rtol=0, atol=3e-6 * size + 1e-12)


def test_the_order_of_merging_does_not_matter() -> None:
    parts = [rows_of(seed, 20, 6, shift=seed) for seed in range(3)]
    a, b, c = (Covariance.of(p) for p in parts)
    left, right = a.merge(b).merge(c), c.merge(a.merge(b))
    for name, tensor in left.tensors().items():
        torch.testing.assert_close(tensor, right.tensors()[name], rtol=1e-6, atol=1e-6)


def test_a_wide_operand_keeps_the_product_with_the_signs() -> None:
    features = FULL_FEATURES + 1
    generator = torch.Generator().manual_seed(1)
    x = 2 + torch.randn(60, features, generator=generator)
    known = merged([x[:11], x[11:]])
    expected = scatter64(x) @ sketch_signs(features).double()
    assert known.scatter.shape == (features, SKETCH)
    assert not known.is_full
    torch.testing.assert_close(
        known.scatter.double(), expected, rtol=0, atol=1e-6 * float(expected.abs().max())
    )


def test_signs_are_fixed_and_look_random() -> None:
    signs = sketch_signs(512).double()
    assert torch.equal(signs.abs(), torch.ones(512, SKETCH, dtype=torch.float64))
    # The bits of splitmix64's finaliser at the first odd multiple of the golden ratio: 0xE220A8397B1DCDAF.
    first = [(0xE220A8397B1DCDAF >> bit) & 1 for bit in range(64)]
    assert signs[0, :64].tolist() == [2.0 * bit - 1 for bit in first]
    inner = signs.t() @ signs / 512 - torch.eye(SKETCH)
    assert float(inner.abs().max()) < 5 / 512**0.5


def test_the_sketch_recovers_a_covariance_of_low_rank() -> None:
    features = FULL_FEATURES + 32
    generator = torch.Generator().manual_seed(2)
    loadings = torch.randn(features, 20, generator=generator, dtype=torch.float64)
    x = torch.randn(300, 20, generator=generator, dtype=torch.float64) @ loadings.t()
    found, std = nystroem_loadings(Covariance.of(x.float()))
    expected = scatter64(x) / 299
    error = (found @ found.t() - expected).norm() / expected.norm()
    assert float(error) < 1e-4
    torch.testing.assert_close(std.square(), expected.diagonal(), rtol=1e-5, atol=0)


def test_bad_rows_and_no_rows_are_left_out() -> None:
    x = rows_of(3, 12, 4)
    bad = x.clone()
    bad[2, 1], bad[7, 0] = torch.nan, torch.inf
    good = torch.cat([x[:2], x[3:7], x[8:]])
    for known in (Covariance.of(bad), Covariance.of(bad).merge(Covariance.of(x[:0]))):
        assert int(known.count) == 10
        torch.testing.assert_close(known.scatter.double(), scatter64(good), rtol=1e-5, atol=1e-5)
    nothing = Covariance.of(torch.full((3, 4), torch.nan))
    assert int(nothing.count) == 0
    assert all(bool((t == 0).all()) for t in nothing.tensors().values())


def test_a_large_mean_costs_no_digits_of_the_spread() -> None:
    x = (1e4 + rows_of(4, 200, 3)).float()
    torch.testing.assert_close(Covariance.of(x).scatter.double(), scatter64(x), rtol=1e-5, atol=1e-4)


def test_autocast_does_not_round_the_products() -> None:
    x = rows_of(5, 50, 8)
    plain = Covariance.of(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Covariance.of(x)
        both = inside.merge(plain)
    assert torch.equal(inside.scatter, plain.scatter)
    assert torch.equal(both.scatter, plain.merge(plain).scatter)


def test_bytes_are_bounded_and_wrong_use_is_an_error() -> None:
    assert Covariance.empty(FULL_FEATURES).nbytes == 8 + 16 * FULL_FEATURES + 4 * FULL_FEATURES**2
    assert Covariance.empty(4096).nbytes == 8 + 16 * 4096 + 4 * 4096 * SKETCH
    with pytest.raises(UsageError, match=r"Covariance.of takes \[rows, features\], got shape \(3,\)"):
        Covariance.of(torch.zeros(3))
    with pytest.raises(UsageError, match="covariances of 3 and of 4 features"):
        Covariance.empty(3).merge(Covariance.empty(4))
