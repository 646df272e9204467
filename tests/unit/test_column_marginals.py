"""Histograms of every feature by the Triton kernels, interpreted, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.kernels.column_statistics import marginals_of
from loka.kernels.triton.statistics import column_marginals, feature_bins
from loka.kernels.triton.statistics import marginals as host
from loka.numerics import Marginals


def sample(S: int, F: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Heavy tails, zeros, both signs, constants, few values, magnitudes from 2^-149 to 2^120, bad rows."""
    generator = torch.Generator().manual_seed(S + F)
    x = torch.randn(S, F, generator=generator)
    kinds = torch.arange(F) % 7
    x = torch.where(kinds == 1, x.pow(9), x)
    x = torch.where(kinds == 2, x.relu(), x)
    x = torch.where(kinds == 3, torch.full_like(x, -3.0), x)
    x = torch.where(kinds == 4, (4 * x).round(), x)
    x = torch.where(
        kinds == 5, x * torch.exp2(torch.randint(-149, 120, x.shape, generator=generator).float()), x
    )
    x = torch.where(kinds == 6, 1e4 + x, x).to(dtype)
    if S > 4:
        x[1, 0], x[3, -1] = torch.nan, -torch.inf
    return x


def check(found: Marginals, wanted: Marginals) -> None:
    """Equal, but for positions where a quotient falls on a step of 1/256."""
    steps = {"inside": 1 / 256, "inside_squares": 2 / 256, "fine_inside": 0.0, "fine_squares": 0.0}
    for name, tensor in wanted.tensors().items():
        ours = found.tensors()[name]
        assert ours.dtype is tensor.dtype, name
        if name in steps:
            moved = (ours - tensor).abs()
            assert float(moved.max()) <= steps[name], name
            assert int((moved > 0).sum()) <= moved.numel() // 1000, name
        else:
            assert torch.equal(ours, tensor), name


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (100, 70), (33, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_to_plain_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = sample(*shape, dtype)
    check(column_marginals(x), Marginals.of(x))


def test_bounds_of_fp32() -> None:
    tiny, huge = 2.0**-149, torch.finfo(torch.float32).max
    x = torch.tensor([[tiny, -tiny, huge, 0.0, -huge], [3 * tiny, 2.0**-126, -huge, -0.0, 0.0]])
    check(column_marginals(x), Marginals.of(x))


def test_rows_of_which_none_is_finite() -> None:
    x = torch.full((3, 4), torch.inf)
    check(column_marginals(x), Marginals.of(x))


def test_more_rows_than_a_word_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ROWS_A_WORD", 40)
    x = sample(100, 9)
    check(column_marginals(x), Marginals.of(x))


def test_a_view_of_either_orientation() -> None:
    x = sample(50, 40)
    check(column_marginals(x[:, 3:20]), Marginals.of(x[:, 3:20].contiguous()))
    check(column_marginals(x.t()), Marginals.of(x.t().contiguous()))


def test_on_a_cpu_it_is_plain_torch() -> None:
    x = sample(20, 5)
    for name, tensor in Marginals.of(x).tensors().items():
        assert torch.equal(marginals_of(x).tensors()[name], tensor)
    assert feature_bins.ROWS_A_WORD == 2048
