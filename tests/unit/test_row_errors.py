"""What rows of a product add to its error: the Triton kernel, interpreted, against plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from loka.kernels.column_statistics import row_errors_of
from loka.kernels.triton.statistics import error_row_sums
from loka.numerics import ROW_SUMS, error_of_rows, product_error, row_sums


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 100), (4, 2048), (5, 5001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_to_plain_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    ref = torch.randn(shape, generator=generator) * torch.logspace(-20, 15, shape[0])[:, None]
    ref[torch.rand(shape, generator=generator) < 0.1] = 0.0
    out = (ref * (1 + 0.05 * torch.randn(shape, generator=generator))).to(dtype)
    found, wanted = error_row_sums(out, ref), row_sums(out, ref)
    assert found.shape == (shape[0], ROW_SUMS)
    assert found.dtype is torch.float64
    # The signed sum may cancel: it is held against the sum of magnitudes.
    scale = wanted.clone()
    scale[:, 2] = (out.double() - ref.double()).abs().sum(dim=1)
    assert ((found - wanted).abs() <= 1e-13 * scale).all()


def test_strides_and_ruined_rows() -> None:
    ref = torch.arange(60.0).view(5, 12)[:, 1:9]
    out = ref.clone()
    out[1, 2], out[2, 3] = torch.nan, torch.inf
    found = error_row_sums(out, ref)
    assert math.isnan(found[1, 0])
    assert math.isinf(found[2, 0])
    assert torch.equal(found[0], row_sums(out, ref)[0])
    assert torch.equal(row_errors_of(out, ref)[3], row_sums(out, ref)[3])


def test_many_products_at_once_are_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (r + 0.1 * torch.randn(40, 9, generator=generator), r)
        for r in torch.randn(6, 40, 9, generator=generator)
    ]
    together = error_of_rows(torch.stack([row_sums(out, ref) for out, ref in pairs])).stacked()
    assert together.shape == (6, 7)
    for row, (out, ref) in zip(together, pairs, strict=True):
        assert torch.allclose(row, product_error(out, ref).stacked(), rtol=1e-14)
        diff = out.double() - ref.double()
        rows = (diff.norm(dim=1) / ref.double().norm(dim=1)).sort().values
        assert torch.allclose(row[2:5], torch.stack([rows[19], rows[39], rows[39]]))
        assert torch.allclose(row[5], diff.mean() / ref.double().abs().mean())
        assert torch.allclose(row[6], (diff / ref.double()).abs().mean())
