"""LoKA's Triton products against FP64 of the same operands, through Triton's interpreter on the CPU.

The interpreter adds in fp32, so a product with an fp32 result may be off by fp32's rounding alone: a few 1e-7
of a row for these k. A bf16 result adds 2^-9 of an element at most.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from triton_products_cases import mend_bf16_dot, operand, uneven, worst_row

from loka.errors import UsageError
from loka.kernels.triton.products.bf16 import launch_plain, plain_product
from loka.kernels.triton.products.blocks import ACTIVATIONS, add_splits
from loka.kernels.triton.products.blockwise import blockwise_product, launch_blockwise
from loka.kernels.triton.products.scaled import launch_scaled, scaled_product
from loka.kernels.triton.products.tiles import Tiles
from loka.numerics import Quantized, product_of_operands
from loka.vocab import Format, Granularity

mend_bf16_dot()

G = Granularity
FP32 = 3e-6
BF16 = 2.0**-8
SHAPES = [(1, 1, 1), (1, 300, 13), (13, 17, 130), (17, 13, 300), (130, 1, 17), (130, 130, 300), (300, 130, 1)]
SMALL = Tiles(64, 64, 128, 4, 2)


def scaled(a: Quantized, b: Quantized, bias: Tensor | None = None, **kwargs: object) -> Tensor:
    arguments = {"out_dtype": torch.float32, "fast": False, "activation": 0, "norm_block": 0, "eps": 0.0}
    arguments |= kwargs
    return scaled_product(a.values, b.values, a.scale, b.scale, bias, *arguments.values())


def blockwise(a: Quantized, b: Quantized, bias: Tensor | None = None, **kwargs: object) -> Tensor:
    arguments = {
        "out_dtype": torch.float32,
        "square_b": b.spec.granularity is G.BLOCKWISE_128X128,
        "activation": 0,
        "norm_block": 0,
        "eps": 0.0,
    }
    arguments |= kwargs
    return blockwise_product(a.values, b.values, a.scale, b.scale, bias, *arguments.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("granularity", [G.TENSORWISE, G.ROWWISE])
@pytest.mark.parametrize("fast", [False, True])
def test_scales_after_the_sum(shape: tuple[int, int, int], granularity: Granularity, fast: bool) -> None:
    m, n, k = shape
    a, b = operand(m, k, granularity), operand(n, k, granularity)
    ref = product_of_operands(a, b, dtype=torch.float64)
    out = scaled(a, b, fast=fast)
    assert out.shape == (m, n)
    assert worst_row(out, ref) < FP32


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight", [G.BLOCKWISE_1X128, G.BLOCKWISE_128X128])
def test_scales_inside_the_sum(shape: tuple[int, int, int], weight: Granularity) -> None:
    m, n, k = shape
    a, b = operand(m, k, G.BLOCKWISE_1X128), operand(n, k, weight)
    assert worst_row(blockwise(a, b), product_of_operands(a, b, dtype=torch.float64)) < FP32


def test_a_row_scale_may_meet_a_tensor_scale() -> None:
    a, b = operand(30, 70, G.ROWWISE), operand(20, 70, G.TENSORWISE)
    assert worst_row(scaled(a, b), product_of_operands(a, b, dtype=torch.float64)) < FP32


def test_block_scales_of_any_stride() -> None:
    a, b = operand(30, 300, G.BLOCKWISE_1X128), operand(20, 300, G.BLOCKWISE_1X128)
    want = blockwise(a, b)
    by_rows = [q._replace(scale=q.scale.t().contiguous().t()) for q in (a, b)]
    assert torch.equal(blockwise(*by_rows), want)


@pytest.mark.parametrize(("fa", "fb"), [(Format.E5M2, Format.E4M3), (Format.E4M3, Format.E5M2)])
def test_e5m2_with_e4m3(fa: Format, fb: Format) -> None:
    for granularity, product in ((G.TENSORWISE, scaled), (G.ROWWISE, scaled), (G.BLOCKWISE_1X128, blockwise)):
        a, b = operand(17, 130, granularity, format_=fa), operand(13, 130, granularity, format_=fb)
        assert worst_row(product(a, b), product_of_operands(a, b, dtype=torch.float64)) < FP32


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
def test_the_bias_is_added_before_the_one_rounding(out_dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    a, b = operand(17, 64, G.ROWWISE), operand(40, 64, G.ROWWISE)
    a = a._replace(scale=a.scale / a.scale.max() / 64)  # fp16's range
    bias = torch.randn(40, generator=torch.Generator().manual_seed(0)).to(bias_dtype)
    ref = product_of_operands(a, b, dtype=torch.float64) + bias.double()
    out = scaled(a, b, bias, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    # One rounding: at most half a unit in the last place of the element, and fp32's on the way.
    unit = torch.finfo(out_dtype).eps
    assert bool(((out.double() - ref).abs() <= 0.51 * unit * ref.abs() + 1e-6 * ref.abs().max()).all())


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_split_sums_are_the_same_sums(splits: int) -> None:
    m, n, k = 70, 33, 1000
    tiles = Tiles(64, 64, 128, 4, 2, splits=splits)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(0))
    for granularity in (G.TENSORWISE, G.ROWWISE):
        a, b = operand(m, k, granularity), operand(n, k, granularity)
        ref = (product_of_operands(a, b, dtype=torch.float64) + bias.double()).clamp(min=0)
        out = launch_scaled(
            *(a.values, b.values, a.scale, b.scale, bias),
            out_dtype=torch.float32,
            tiles=tiles,
            activation=ACTIVATIONS["relu"],
        )
        assert float((out.double() - ref).norm() / ref.norm()) < FP32
    a, b = operand(m, k, G.BLOCKWISE_1X128), operand(n, k, G.BLOCKWISE_1X128)
    out = launch_blockwise(
        *(a.values, b.values, a.scale, b.scale, None), out_dtype=torch.float32, tiles=tiles, square_b=False
    )
    assert worst_row(out, product_of_operands(a, b, dtype=torch.float64)) < FP32


def test_a_long_k_is_split_and_repeats_to_the_bit() -> None:
    a, b = operand(24, 20_000, G.TENSORWISE), operand(40, 20_000, G.TENSORWISE)
    first, second = scaled(a, b), scaled(a, b)
    assert torch.equal(first, second)
    assert worst_row(first, product_of_operands(a, b, dtype=torch.float64)) < FP32


def test_no_element_is_left_unwritten() -> None:
    """What `new_empty` gives is filled with NaN in deterministic mode."""
    a, b = operand(70, 300, G.ROWWISE), operand(33, 300, G.ROWWISE)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        out = scaled(a, b)
        split = launch_plain(
            uneven(70, 300, 0),
            uneven(33, 300, 1),
            None,
            out_dtype=torch.float32,
            compute_dtype=torch.float32,
            tiles=Tiles(64, 64, 32, 4, 2, splits=3),
        )
    finally:
        torch.use_deterministic_algorithms(before)
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(split).all())


def test_splits_are_added_in_order_and_past_one_round() -> None:
    partial = torch.randn(11, 30, 70, generator=torch.Generator().manual_seed(0))
    out = torch.full((30, 70), torch.nan)
    add_splits(partial, None, out)
    assert torch.allclose(out.double(), partial.double().sum(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("norm_block", [0, 128, 256])
def test_epilogues(activation: str, norm_block: int) -> None:
    m, n, k = 20, 512, 48
    a, b = operand(m, k, G.ROWWISE), operand(n, k, G.ROWWISE)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(0))
    y = product_of_operands(a, b, dtype=torch.float64) + bias.double()
    if norm_block:
        blocks = y.view(m, -1, norm_block)
        y = (blocks / (blocks.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(m, n)
    if activation == "relu":
        y = y.relu()
    elif activation == "hard_swish":
        y = y * (y + 3).clamp(0, 6) / 6
    number = ACTIVATIONS[activation]
    out = scaled(a, b, bias, activation=number, norm_block=norm_block, eps=1e-5)
    assert float((out.double() - y).norm() / y.norm()) < FP32
    if norm_block <= 128:
        qa, qb = operand(m, k, G.BLOCKWISE_1X128), operand(n, k, G.BLOCKWISE_128X128)
        assert blockwise(qa, qb, bias, activation=number, norm_block=norm_block, eps=1e-5).shape == (m, n)


def test_an_activation_keeps_nan() -> None:
    a, b = operand(4, 16, G.TENSORWISE), operand(16, 16, G.TENSORWISE)
    codes = a.values.view(torch.uint8).clone()
    codes[1, 2] = 0x7F
    a = a._replace(values=codes.view(torch.float8_e4m3fn))
    for activation in ACTIVATIONS.values():
        out = scaled(a, b, activation=activation)
        assert bool(out[1].isnan().all())
        assert bool(torch.isfinite(out[[0, 2, 3]]).all())


@pytest.mark.parametrize("shape", [(0, 8, 16), (8, 0, 16)])
def test_an_empty_result(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = operand(m, k, G.ROWWISE), operand(n, k, G.ROWWISE)
    assert scaled(a, b).shape == (m, n)
    assert plain(torch.empty(m, k), torch.empty(n, k)).shape == (m, n)


def test_an_empty_sum_is_the_bias() -> None:
    bias = torch.randn(5, generator=torch.Generator().manual_seed(0))
    out = plain(torch.empty(3, 0), torch.empty(5, 0), bias)
    assert torch.equal(out, bias.expand(3, 5))


def plain(a: Tensor, b: Tensor, bias: Tensor | None = None, **kwargs: object) -> Tensor:
    arguments = {
        "out_dtype": torch.float32,
        "compute_dtype": torch.float32,
        "activation": 0,
        "norm_block": 0,
        "eps": 0.0,
    }
    arguments |= kwargs
    return plain_product(a, b, bias, *arguments.values())


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (17, 13, 300), (130, 1, 17), (130, 70, 33), (64, 24, 40), (16, 8, 2100)]
)
@pytest.mark.parametrize("a_by_rows", [False, True])
@pytest.mark.parametrize("b_by_rows", [False, True])
def test_bf16_products_of_views(shape: tuple[int, int, int], a_by_rows: bool, b_by_rows: bool) -> None:
    m, n, k = shape
    a, b = uneven(m, k, 1), uneven(n, k, 2)
    a = a.t().contiguous().t() if a_by_rows else a
    b = b.t().contiguous().t() if b_by_rows else b
    for dtype in (torch.bfloat16, torch.float32):
        low = a.to(dtype), b.to(dtype)
        out = plain(*low, compute_dtype=dtype)
        assert worst_row(out, low[0].double() @ low[1].double().t()) < FP32
    # fp32 in memory, bf16 in the product: as autocast would multiply.
    mixed = plain(a, b, compute_dtype=torch.bfloat16)
    assert worst_row(mixed, a.bfloat16().double() @ b.bfloat16().double().t()) < FP32


def test_bf16_products_of_other_strides_and_dtypes() -> None:
    a, b = uneven(40, 120, 1)[:, ::3], uneven(34, 40, 2)[::2]
    bias = torch.randn(17, generator=torch.Generator().manual_seed(0)).bfloat16()
    ref = a.double() @ b.double().t() + bias.double()
    assert worst_row(plain(a, b, bias), ref) < FP32
    for dtype in (torch.bfloat16, torch.float16):
        x, y = (a / 64).to(dtype), (b / 64).to(dtype)
        out = plain(x, y, bias, compute_dtype=dtype, out_dtype=dtype)
        assert out.dtype == dtype
        assert worst_row(out, x.double() @ y.double().t() + bias.double()) < BF16


def test_bf16_split_sums_repeat_to_the_bit() -> None:
    g, x = uneven(9_000, 24, 1).bfloat16(), uneven(9_000, 40, 2).bfloat16()
    first, second = (plain(g.t(), x.t(), compute_dtype=torch.bfloat16) for _ in range(2))
    assert torch.equal(first, second)
    assert worst_row(first, g.double().t() @ x.double()) < FP32


def test_what_cannot_be_multiplied_is_said() -> None:
    a, b = operand(8, 16, G.ROWWISE), operand(8, 32, G.ROWWISE)
    with pytest.raises(UsageError, match="disagree in k: A holds 16, B holds 32"):
        scaled(a, b)
    with pytest.raises(UsageError, match="disagree in k"):
        plain(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(UsageError, match="contiguous along k"):
        scaled(a._replace(values=b.values[:, ::2]), a)
    with pytest.raises(UsageError, match=r"not in torch\.float64"):
        plain(torch.ones(2, 3), torch.ones(2, 3), compute_dtype=torch.float64)
    with pytest.raises(UsageError, match="N % 128 == 0, got N=8"):
        scaled(a, a, norm_block=128)
    with pytest.raises(UsageError, match="power of two, got 96"):
        scaled(a, a, norm_block=96)


def test_group_orders_give_the_same_tiles() -> None:
    a, b = operand(200, 40, G.ROWWISE), operand(130, 40, G.ROWWISE)
    outs = [
        launch_scaled(
            *(a.values, b.values, a.scale, b.scale, None),
            out_dtype=torch.float32,
            tiles=Tiles(64, 64, 64, 4, 2, group_m=group),
        )
        for group in (1, 2, 3, 8)
    ]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert worst_row(outs[0], product_of_operands(a, b, dtype=torch.float64)) < FP32


def test_every_alternative_computes_the_product() -> None:
    from loka.kernels.triton.products.tiles import alternatives
    from loka.vocab import GemmProblem

    m, n, k = 20, 24, 150
    for family, granularity in itertools.product(("exact", "fast"), (G.ROWWISE,)):
        a, b = operand(m, k, granularity), operand(n, k, granularity)
        ref = product_of_operands(a, b, dtype=torch.float64)
        for tiles in alternatives(GemmProblem(m, n, k), family):
            out = launch_scaled(
                *(a.values, b.values, a.scale, b.scale, None),
                out_dtype=torch.float32,
                tiles=tiles,
                fast=family == "fast",
            )
            assert worst_row(out, ref) < FP32
