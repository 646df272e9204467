"""Block RMS normalization: formula, written-out gradient against FP64 autograd, bound, operands."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loka.errors import UsageError
from loka.kernels.block_norm import block_norm, block_norm_gradients, block_norm_operands
from loka.numerics import block_rms_norm, block_rms_norm_gradients, decode
from loka.vocab import BlockNormSpec, Format, Granularity, OperandSpec

EPS = 1e-6
SHAPES = [(7, 256, 256), (5, 512, 256), (3, 100, 256), (4, 300, 128), (2, 257, 16), (6, 1, 4)]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spec_of(block: int, *, swish: bool = False) -> BlockNormSpec:
    return BlockNormSpec(block, EPS, swish)


def direct(x: Tensor, block: int, weight: Tensor | None = None, *, swish: bool = False) -> Tensor:
    """Row by row and block by block, as the definition says."""
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        at = 0
        for width in spec_of(block).widths(x.shape[1]):
            part = x[row, at : at + width]
            rms = math.sqrt(sum(float(v) ** 2 for v in part) / width + EPS)
            out[row, at : at + width] = part / rms
            at += width
    if weight is not None:
        out = out * weight
    return out * (out + 3).clamp(0, 6) / 6 if swish else out


@pytest.mark.parametrize(("features", "block"), [(256, 256), (257, 256), (1000, 256), (17, 16), (3, 256)])
def test_widths_are_those_of_tensor_split(features: int, block: int) -> None:
    widths = spec_of(block).widths(features)
    parts = torch.arange(features).tensor_split(-(-features // block))
    assert list(widths) == [len(part) for part in parts]
    assert max(widths) <= block
    assert spec_of(block).bound(features) == math.sqrt(max(widths))


@pytest.mark.parametrize(("rows", "features", "block"), SHAPES)
@pytest.mark.parametrize("swish", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_formula_and_gradients(rows: int, features: int, block: int, swish: bool, affine: bool) -> None:
    x = drawn(rows, features).requires_grad_()
    weight = drawn(features, seed=1).requires_grad_() if affine else None
    y = block_rms_norm(x, spec_of(block, swish=swish), weight)
    torch.testing.assert_close(y, direct(x.detach(), block, weight, swish=swish), rtol=1e-12, atol=1e-12)
    g = drawn(rows, features, seed=2)
    y.backward(g)
    dx, dweight = block_rms_norm_gradients(g, x.detach(), spec_of(block, swish=swish), weight)
    torch.testing.assert_close(dx, x.grad, rtol=1e-10, atol=1e-10)
    assert (dweight is None) is (weight is None)
    if weight is not None:
        torch.testing.assert_close(dweight, weight.grad, rtol=1e-10, atol=1e-10)


def test_the_bound_holds_and_is_reached() -> None:
    one_hot = torch.zeros(1, 512)
    one_hot[0, 300] = 1e15
    peak = block_rms_norm(one_hot, spec_of(256, swish=True)).abs().max()
    assert float(peak) == pytest.approx(16.0, rel=1e-6)
    heavy = drawn(64, 512) * drawn(64, 512, seed=3).exp().pow(4)
    assert float(block_rms_norm(heavy, spec_of(256)).abs().max()) <= 16.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_come_back_as_they_came(dtype: torch.dtype) -> None:
    x = drawn(3, 5, 300, dtype=dtype)
    y = block_norm(x, spec_of(256))
    assert (y.dtype, y.shape) == (dtype, x.shape)
    exact = direct(x.double().view(15, 300), 256).view(3, 5, 300)
    torch.testing.assert_close(y.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_operands_are_casts_of_the_unrounded_result_by_the_bound() -> None:
    x = drawn(33, 512, dtype=torch.bfloat16)
    straight = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE)
    specs = (straight, straight.with_transposed(True), OperandSpec.of(Format.E4M3, Granularity.ROWWISE))
    plain = OperandSpec.high_precision()
    q, qt, rowwise, y = block_norm_operands(x, spec_of(256, swish=True), (*specs, plain))
    assert float(q.scale) == float(torch.tensor(16.0) / 448)
    assert torch.equal(q.values.t().view(torch.uint8), qt.values.view(torch.uint8))
    exact = direct(x.double(), 256, swish=True)
    for quantized in (q, rowwise):
        noise = (decode(quantized).double() - exact).norm() / exact.norm()
        assert noise < 0.04  # 2^-5 at most, relative to each element
    assert torch.equal(y.values, exact.float().to(torch.bfloat16))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_row_stays_one_row(bad: float) -> None:
    x = drawn(4, 512, dtype=torch.float32)
    clean = block_norm(x, spec_of(256, swish=True))
    x[2, 300] = bad
    y = block_norm(x, spec_of(256, swish=True))
    assert y[2, 256:].isnan().any()
    others = [0, 1, 3]
    assert torch.equal(y[others], clean[others])
    assert torch.equal(y[2, :256], clean[2, :256])
    dx, _, amax = block_norm_gradients(torch.ones_like(x), x, spec_of(256))
    assert dx[others].isfinite().all()
    assert amax.isfinite()
    assert float(amax) == float(dx[dx.isfinite()].abs().max())


def test_no_rows_are_no_rows() -> None:
    x = torch.empty(0, 512, dtype=torch.bfloat16)
    assert block_norm(x, spec_of(256)).shape == (0, 512)
    dx, _, amax = block_norm_gradients(x, x, spec_of(256))
    assert dx.shape == (0, 512)
    assert float(amax) == 0.0


@pytest.mark.parametrize("block", [0, -1, 2.5, True])
def test_a_block_is_a_positive_integer(block: object) -> None:
    with pytest.raises(UsageError, match=r"BlockNorm\(block="):
        BlockNormSpec(block)  # type: ignore[arg-type]


@pytest.mark.parametrize("eps", [0, -1e-6, 1e-40, math.inf, math.nan, "1e-6", True])
def test_eps_is_a_positive_number(eps: object) -> None:
    with pytest.raises(UsageError, match=r"BlockNorm\(eps="):
        BlockNormSpec(eps=eps)  # type: ignore[arg-type]


def test_only_floats_with_features() -> None:
    norm = BlockNormSpec(4)
    for dtype in (torch.int64, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(UsageError, match=str(dtype)):
            block_norm(torch.zeros(2, 4).to(dtype), norm)
    for shape in ((), (2, 0)):
        with pytest.raises(UsageError, match="features"):
            block_norm(torch.zeros(shape), norm)
    with pytest.raises(UsageError, match=r"weight of \[3\] for 4 features"):
        block_norm(torch.zeros(2, 4), norm, torch.ones(3))
