"""The Triton norms against plain torch and FP64, through Triton's interpreter on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from loka.kernels import block_norm as plain
from loka.kernels.triton import norms
from loka.kernels.triton.norms.tiles import cut_of
from loka.numerics import Quantized, block_rms_norm, block_rms_norm_gradients, bound_scale, decode_scale
from loka.vocab import BlockNormSpec, Format, Granularity, OperandSpec, ScaleRounding

E4M3 = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE, pad=16)
# Even blocks that fill their columns, one block, uneven ones, odd rows and widths, a single row and feature.
SHAPES = [
    (64, 512, 256),
    (5, 256, 256),
    (33, 300, 128),
    (7, 100, 256),
    (1, 48, 16),
    (3, 1, 8),
    (130, 257, 64),
]


def data(M: int, N: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * M + N)
    rows = torch.exp2(torch.randint(-6, 6, (M, 1), generator=generator).float())
    return (torch.randn(M, N, generator=generator) * rows).to(dtype)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("M", "N", "block"), SHAPES)
@pytest.mark.parametrize("swish", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_forward_and_gradients_are_as_close_to_fp64_as_torch(
    M: int, N: int, block: int, swish: bool, affine: bool
) -> None:
    norm = BlockNormSpec(block, 1e-6, swish)
    for dtype in (torch.bfloat16, torch.float32):
        x, g = data(M, N, dtype), data(M, N, dtype, seed=1)
        weight = data(1, N, torch.float32, seed=2)[0] if affine else None
        y = norms.block_norm(x, norm, weight)
        exact = block_rms_norm(x.double(), norm, None if weight is None else weight.double())
        theirs = block_rms_norm(x, norm, weight).to(dtype)
        assert (y.dtype, y.shape) == (dtype, x.shape)
        assert error(y, exact) <= 2 * error(theirs, exact) + 1e-7
        dx, dweight, amax = norms.block_norm_gradients(g, x, norm, weight)
        wide = None if weight is None else weight.double()
        exact_dx, exact_dweight = block_rms_norm_gradients(g.double(), x.double(), norm, wide)
        theirs_dx, _, _ = plain.block_norm_gradients(g, x, norm, weight)
        if N > 1:  # of one feature only eps is left of a gradient
            assert error(dx, exact_dx) <= 2 * error(theirs_dx, exact_dx) + 1e-6
        assert float(amax) == float(dx.float().abs().max())
        assert (dweight is None) is (weight is None)
        if dweight is not None:
            assert exact_dweight is not None
            assert error(dweight, exact_dweight) < 1e-5


@pytest.mark.parametrize(("M", "N", "block"), SHAPES)
def test_autograd_takes_the_gradients(M: int, N: int, block: int) -> None:
    norm = BlockNormSpec(block, 1e-6, True)
    x = data(M, N, torch.float32).requires_grad_()
    weight = data(1, N, torch.float32, seed=2)[0].requires_grad_()
    g = data(M, N, torch.float32, seed=1)
    norms.block_norm(x, norm, weight).backward(g)
    dx, dweight, _ = norms.block_norm_gradients(g, x.detach(), norm, weight.detach())
    assert torch.equal(x.grad, dx)
    assert torch.equal(weight.grad, dweight)


def check_codes(made: Quantized, wanted: Quantized) -> None:
    """Equal codes, but for one step where sums in another order moved a number over the middle."""
    assert made.spec == wanted.spec
    assert made.values.shape == wanted.values.shape
    assert made.values.is_contiguous()
    assert made.scale.shape == wanted.scale.shape
    torch.testing.assert_close(made.scale, wanted.scale, rtol=1e-6, atol=0)
    ours, theirs = made.values.float(), wanted.values.float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    off = (ours != theirs) & ~ours.isnan()
    assert int(off.sum()) <= 1 + made.values.numel() // 1000
    # Neighbours in E4M3 and E5M2 differ by a quarter at most, or by the subnormals' step.
    assert bool(((ours - theirs).abs()[off] <= theirs.abs()[off] / 4 + 2**-9).all())


SPECS = {
    "straight": (E4M3,),
    "transposed": (E4M3.with_transposed(True),),
    "both and plain": (E4M3, E4M3.with_transposed(True), OperandSpec.high_precision(), E4M3),
    "power of two": (OperandSpec(scale_rounding=ScaleRounding.POWER_OF_TWO, pad=16),),
    "e5m2": (OperandSpec.of(Format.E5M2, Granularity.TENSORWISE, pad=16),),
    "rowwise": (OperandSpec.of(Format.E4M3, Granularity.ROWWISE, pad=16),),
    "rowwise transposed": (OperandSpec.of(Format.E4M3, Granularity.ROWWISE, transposed=True, pad=16),),
    "blockwise": (OperandSpec.of(Format.E4M3, Granularity.BLOCKWISE_1X128, pad=128),),
    "two paddings": (E4M3, OperandSpec.of(Format.E4M3, Granularity.TENSORWISE, pad=32)),
    "odd transposed": (OperandSpec.of(Format.E4M3, Granularity.TENSORWISE, transposed=True),),
    "plain": (OperandSpec.high_precision(), OperandSpec.high_precision(transposed=True)),
}


@pytest.mark.parametrize("what", list(SPECS))
@pytest.mark.parametrize(("M", "N", "block"), [(64, 512, 256), (33, 300, 128), (7, 100, 256), (1, 48, 16)])
@pytest.mark.parametrize("affine", [False, True])
def test_operands_equal_those_of_plain_torch(what: str, M: int, N: int, block: int, affine: bool) -> None:
    norm, x = BlockNormSpec(block, 1e-6, True), data(M, N)
    weight = data(1, N, torch.float32, seed=2)[0] if affine else None
    made = norms.normed_operands(x, norm, SPECS[what], weight)
    wanted = plain.block_norm_operands(x, norm, SPECS[what], weight)
    assert len(made) == len(wanted)
    for ours, theirs in zip(made, wanted, strict=True):
        if ours.spec.is_quantized:
            check_codes(ours, theirs)
        else:
            torch.testing.assert_close(ours.values, theirs.values, rtol=2**-7, atol=0)


def test_codes_are_of_the_formula_where_sums_are_exact() -> None:
    """Rows of +-2^i have an exact mean square, so every code must be the oracle's."""
    signs = torch.randn(32, 512, generator=torch.Generator().manual_seed(0)).sign()
    x = (signs * torch.exp2(torch.arange(32) - 16.0)[:, None]).to(torch.bfloat16)
    specs = (E4M3, E4M3.with_transposed(True))
    norm = BlockNormSpec(256, 1e-6, True)
    for ours, theirs in zip(
        norms.normed_operands(x, norm, specs, None),
        plain.block_norm_operands(x, norm, specs),
        strict=True,
    ):
        assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_row_spoils_its_block_alone(bad: float) -> None:
    norm, x = BlockNormSpec(128, 1e-6, True), data(8, 256)
    specs = (E4M3, E4M3.with_transposed(True), OperandSpec.of(Format.E4M3, Granularity.ROWWISE, pad=16))
    clean = norms.block_norm(x, norm, None)
    whole = norms.normed_operands(x, norm, specs, None)
    x[3, 200] = bad
    y = norms.block_norm(x, norm, None)
    assert bool(y[3, 200].isnan())
    others = [row for row in range(8) if row != 3]
    assert torch.equal(y[others], clean[others])
    assert torch.equal(y[3, :128], clean[3, :128])
    for ours, before, theirs in zip(
        norms.normed_operands(x, norm, specs, None),
        whole,
        plain.block_norm_operands(x, norm, specs),
        strict=True,
    ):
        check_codes(ours, theirs)
        lying, lay = (
            q.values.view(torch.uint8).t() if q.spec.transposed else q.values.view(torch.uint8)
            for q in (ours, before)
        )
        assert torch.equal(lying[others], lay[others])
    dx, _, amax = norms.block_norm_gradients(torch.ones_like(x), x, norm, None)
    assert bool(dx[others].isfinite().all())
    assert float(amax) == float(dx[dx.isfinite()].float().abs().max())


def test_any_stride() -> None:
    norm, wide = BlockNormSpec(64, 1e-6, True), data(40, 400)
    for x in (wide[::2, 8:264], wide[:, :256].t(), wide[3:4, :256], wide[:, 5:6]):
        assert torch.equal(norms.block_norm(x, norm, None), norms.block_norm(x.contiguous(), norm, None))
        dx, _, _ = norms.block_norm_gradients(x, x, norm, None)
        assert torch.equal(dx, norms.block_norm_gradients(x.contiguous(), x.contiguous(), norm, None)[0])


def test_the_static_scale_is_that_of_an_amax_at_the_bound() -> None:
    for features, block in ((512, 256), (100, 256), (300, 128), (64, 64), (4096, 4096)):
        norm = BlockNormSpec(block)
        for rounding in ScaleRounding:
            for format_ in (Format.E4M3, Format.E5M2):
                spec = OperandSpec(format_, scale_rounding=rounding)
                amax = torch.tensor(norm.bound(features), dtype=torch.float64).float()
                ours = torch.tensor(bound_scale(norm, features, spec)).float()
                torch.testing.assert_close(ours, decode_scale(amax, format_, rounding), rtol=2**-23, atol=0)


def test_blocks_are_cut_as_the_spec_says() -> None:
    for M, N, block in SHAPES:
        cut = cut_of(data(M, N), BlockNormSpec(block))
        widths = (cut.width + 1,) * cut.wider + (cut.width,) * (cut.blocks - cut.wider)
        assert widths == BlockNormSpec(block).widths(N)
        assert cut.columns >= max(widths)


def test_the_cut_is_of_numbers_where_a_compiler_traces_with_symbols() -> None:
    cuts = []

    def traced(x: Tensor) -> Tensor:
        assert isinstance(x.shape[1], torch.SymInt)
        cuts.append(cut_of(x, BlockNormSpec(256, 1e-6)))
        return x + 1

    make_fx(traced, tracing_mode="symbolic")(torch.zeros(64, 600))
    (cut,) = cuts
    assert (cut.N, cut.blocks, cut.width, cut.wider, cut.columns) == (600, 3, 200, 0, 256)
    assert all(type(number) is int for number in (cut.N, cut.blocks, cut.width, cut.wider, cut.columns))
