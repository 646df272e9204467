"""What vetting is made of: operands, guards, the reference and errors, each against a direct computation."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from loka.kernels.vetting.limits import limits_of, one_sign_limit
from loka.kernels.vetting.operands import PlacedOperand, distinct_rows, make_operand
from loka.kernels.vetting.poison import guarded_copy, guarded_empty, poison_free_memory, workspace_sizes
from loka.kernels.vetting.reference import errors_of, reference_of
from loka.kernels.vetting.verdict import Data
from loka.numerics import decode, lay_out, scale_shape
from loka.vocab import Accumulation, Format, Granularity, OperandSpec, ScaleLayout, ScaleRounding

CPU = torch.device("cpu")
SPECS = [
    OperandSpec.high_precision(),
    OperandSpec.high_precision(transposed=True),
    OperandSpec(Format.E4M3),
    OperandSpec(Format.E5M2, Granularity.ROWWISE, True, scale_layout=ScaleLayout.VECTOR, pad=16),
    OperandSpec(Format.E4M3, Granularity.TENSORWISE, scale_layout=ScaleLayout.VECTOR, pad=16),
    OperandSpec(Format.E4M3, Granularity.BLOCKWISE_1X128, scale_layout=ScaleLayout.MN_MAJOR, pad=16),
    OperandSpec(Format.E4M3, Granularity.BLOCKWISE_128X128, scale_layout=ScaleLayout.MN_MAJOR_PAD4, pad=16),
    OperandSpec(Format.E4M3, Granularity.BLOCKWISE_128X128, True, scale_layout=ScaleLayout.K_MAJOR, pad=128),
    OperandSpec(
        Format.E4M3, Granularity.MX_1X32, False, ScaleRounding.POWER_OF_TWO, ScaleLayout.K_MAJOR, pad=32
    ),
]


def made(rows: int, k: int, spec: OperandSpec, data: Data = Data.TWO_SIGNED, seed: int = 0) -> PlacedOperand:
    return make_operand(rows, k, spec, data, torch.Generator().manual_seed(seed))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rows", [70, 1500])
def test_an_operand_is_what_its_spec_says(spec: OperandSpec, rows: int) -> None:
    operand = made(rows, 300, spec)
    full = operand.full
    k = 300 + (-300 % spec.pad)
    assert tuple(full.values.shape) == (rows, k)
    assert full.values.stride() == ((1, rows) if spec.transposed and not spec.is_quantized else (k, 1))
    assert full.spec == spec
    order = torch.arange(rows) if operand.order is None else operand.order
    assert (operand.order is None) == (rows == 70)
    assert torch.equal(as_bytes(full.values), as_bytes(operand.base.values.contiguous())[order])
    assert torch.equal(decode(full, dtype=torch.float64), decode(operand.base, dtype=torch.float64)[order])
    if spec.is_quantized and scale_shape(spec, rows, k):
        laid = lay_out(full.scale.contiguous(), spec.scale_layout, rows)
        assert full.scale.stride() == laid.stride()
        assert full.scale.shape == laid.shape


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rows", [70, 1500])
def test_nan_lies_around_every_operand(spec: OperandSpec, rows: int) -> None:
    for placed in (made(rows, 300, spec).full.values, made(rows, 300, spec).full.scale):
        whole = placed.untyped_storage()
        flat = torch.empty(0, dtype=placed.dtype).set_(whole)
        begin = placed.storage_offset()
        end = begin + 1 + sum((s - 1) * t for s, t in zip(placed.shape, placed.stride(), strict=True))
        assert flat[:begin].float().isnan().all()
        assert flat[end:].float().isnan().all()
        assert min(begin, flat.numel() - end) * placed.itemsize >= 4096
        assert placed.data_ptr() % 16 == 0
        assert not placed.float().isnan().any()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ],
)
def test_the_guard_is_nan_in_every_format(dtype: torch.dtype) -> None:
    assert guarded_empty((3, 5), (5, 1), dtype, CPU).float().isnan().all()
    assert guarded_empty((0, 5), (5, 1), dtype, CPU).numel() == 0
    x = torch.arange(12.0).view(3, 4).t().to(dtype)
    copy = guarded_copy(x)
    assert copy.stride() == x.stride()
    assert torch.equal(copy.float(), x.float())


@pytest.mark.parametrize("granularity", [g for g in Granularity if g is not Granularity.TENSORWISE])
def test_scales_differ_strongly_from_their_neighbours(granularity: Granularity) -> None:
    """A swapped, shifted or transposed scale is off by a factor of two or more at most places."""
    scale = made(640, 1280, OperandSpec.of(Format.E4M3, granularity)).base.scale.log2()
    for dim in range(scale.dim()):
        step = (scale - scale.roll(1, dim)).abs()
        assert (step > 0.8).double().mean() > 0.5
        assert step.max() > 3


def test_the_last_columns_weigh_as_much_as_all_others() -> None:
    for k, edge in ((4097, 1), (4096, 16), (5000, 8), (65537, 1)):
        a = made(64, k, OperandSpec.high_precision(), seed=1).base.values.double()
        b = made(64, k, OperandSpec.high_precision(), seed=2).base.values.double()
        size = a.norm(dim=1)[:, None] * b.norm(dim=1)
        last = (a[:, -edge:] @ b[:, -edge:].t() / size).norm() / (a @ b.t() / size).norm()
        assert 0.2 < last < 0.99, (k, float(last))


def test_data_of_one_sign_is_of_one_sign() -> None:
    values = made(40, 300, SPECS[3], Data.ONE_SIGNED).full.values[:, :300].float()
    assert values.min() >= 0
    assert (values > 0).double().mean() > 0.9


def test_how_many_rows_are_drawn() -> None:
    assert distinct_rows(70, 300, 1) == 70
    assert distinct_rows(65536, 2048, 1) == 1024
    assert distinct_rows(2048, 262144, 1) == 64
    assert distinct_rows(2048, 2**20, 1) == 48
    assert distinct_rows(1024, 123200, 128) == 384
    for rows, k in itertools.product((1, 1000, 10**6), (1, 10**3, 10**6)):
        assert distinct_rows(rows, k, 1) * k <= 48 * 10**6


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_reference_is_the_product_of_what_the_operands_hold(spec: OperandSpec) -> None:
    a, b = made(1100, 700, spec, seed=1), made(50, 700, spec, seed=2)
    reference = reference_of(a, b)
    x, y = decode(a.full, dtype=torch.float64), decode(b.full, dtype=torch.float64)
    want = x @ y.t()
    assert reference.rows is not None
    assert reference.columns is None
    size = x.norm(dim=1)[:, None] * y.norm(dim=1)
    assert torch.allclose(reference.product[reference.rows], want, rtol=1e-12, atol=float(size.max()) * 1e-15)
    assert reference.product.shape == (1024, 50)
    x = decode(a.base, dtype=torch.float64)
    size = x.norm(dim=1)[:, None] * y.norm(dim=1)
    usual = ((x @ y.t()) / size).square().mean().sqrt()
    assert torch.allclose(reference.size, size * usual, rtol=1e-9)


def test_the_reference_of_a_long_k_in_chunks() -> None:
    spec = OperandSpec(Format.E4M3, Granularity.BLOCKWISE_1X128, scale_layout=ScaleLayout.MN_MAJOR, pad=16)
    k = 2**18 + 7
    a, b = made(32, k, spec, seed=1), made(20, k, spec, seed=2)
    want = decode(a.full, dtype=torch.float64) @ decode(b.full, dtype=torch.float64).t()
    assert torch.allclose(reference_of(a, b).product, want, rtol=1e-9, atol=float(want.abs().max()) * 1e-13)


def test_errors_against_their_definition() -> None:
    a, b = made(1030, 200, SPECS[3], seed=1), made(48, 200, SPECS[3], seed=2)
    reference = reference_of(a, b)
    assert reference.rows is not None
    want, size = reference.product[reference.rows], reference.size[reference.rows]
    bias = torch.randn(48, generator=torch.Generator().manual_seed(3))
    for added in (None, bias):
        right = want if added is None else want + added.double()
        usual = size if added is None else size + added.double().abs()
        out = right.clone()
        out[700, 3] += 0.5 * usual[700, 3]
        out[:, 9] *= 1.01
        wrong = out - right
        share = wrong / torch.maximum(usual, right.abs())
        found = errors_of(out, reference, bias=added)
        by_row, by_column = share.square().mean(1).sqrt(), share.square().mean(0).sqrt()
        assert found.row == pytest.approx(float(by_row.max()), rel=1e-9)
        assert found.row_index == int(by_row.argmax()) == 700
        assert found.column == pytest.approx(float(by_column.max()), rel=1e-9)
        assert found.column_index == int(by_column.argmax())
        norm = float((wrong / usual).norm() / (right / usual).norm())
        assert found.norm == pytest.approx(norm, rel=1e-9)
    assert errors_of(want, reference).norm == 0.0


def test_something_where_nothing_should_be_is_infinitely_wrong() -> None:
    a, b = made(4, 32, SPECS[0]), made(4, 32, SPECS[0], seed=1)
    a.base.values[2] = 0.0
    reference = reference_of(a, b)
    out = reference.product.clone()
    assert errors_of(out, reference).row < 1e-12
    out[2, 1] = 1.0
    assert errors_of(out, reference).row > 1e100


def test_limits_follow_from_the_formats() -> None:
    for accumulation in Accumulation:
        wide = limits_of(Format.FP32, accumulation)
        for format_, dtype in ((Format.BF16, torch.bfloat16), (Format.FP16, torch.float16)):
            limits = limits_of(format_, accumulation)
            unit = torch.finfo(dtype).eps / 2
            assert limits.norm - wide.norm == pytest.approx(unit, rel=1e-3)
            assert limits.row - wide.row == pytest.approx(unit, rel=1e-3)
    # The root mean square of bf16's rounding, over significands that are evenly spread.
    x = torch.linspace(1, 2, 100001, dtype=torch.float64)[:-1]
    rounding = float(((x.bfloat16().double() - x) / x).square().mean().sqrt())
    assert limits_of(Format.FP32, Accumulation.EXACT).norm < rounding
    assert rounding < one_sign_limit(Accumulation.EXACT) < one_sign_limit(Accumulation.FAST)


def test_poison_has_the_sizes_that_a_product_asks_for() -> None:
    sizes = workspace_sizes(100, 50, 2)
    assert sizes.count(10_000) == 2
    assert 4 * 100 * 50 * 8 in sizes
    assert 32 * 2**20 in sizes
    assert 0 < poison_free_memory(100, 50, 2, CPU) <= 2 * 2**20
    assert poison_free_memory(0, 50, 2, CPU) > 0
    assert math.isfinite(sum(sizes))
