"""The cast against a bit-level oracle and by properties."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.errors import UsageError
from loka.numerics import (
    Quantized,
    amax_of,
    cast_operand,
    decode,
    decode_scale,
    lay_out,
    round_to_format,
    scale_shape,
    torch_dtype,
)
from loka.vocab import Format, Granularity, OperandSpec, ScaleLayout, ScaleRounding

FLOAT8 = [f for f in Format if f.is_float8]
GRANULARITIES = list(Granularity)


def bits(t: torch.Tensor) -> list[int]:
    return t.view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("format_", FLOAT8)
def test_every_code_decodes_to_its_defined_value(format_: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch_dtype(format_))
    for code, value in enumerate(codes.float().tolist()):
        want = oracle.value_of(code, format_)
        if isinstance(want, str):
            assert math.isnan(value) if want == "nan" else value == float(want)
        else:
            assert Fraction(value) == want


@pytest.mark.parametrize("format_", FLOAT8)
def test_largest_and_smallest_values_match_the_definition(format_: Format) -> None:
    values = [v for v, _ in oracle.positive_values(format_)]
    assert Fraction(format_.max) == values[-1]
    assert Fraction(format_.smallest_subnormal) == values[1]


@pytest.mark.parametrize("format_", FLOAT8)
def test_rounding_at_every_value_midpoint_and_neighbour(format_: Format) -> None:
    values = [v for v, _ in oracle.positive_values(format_)]
    points = [float(v) for v in values]
    for low, high in itertools.pairwise(values):
        middle = float((low + high) / 2)
        points += [middle, math.nextafter(middle, 0), math.nextafter(middle, math.inf)]
    points += [format_.max * f for f in (1.01, 1.04, 1.1, 2.0, 1e3)]
    x = torch.tensor(points + [-p for p in points], dtype=torch.float32)
    got = bits(round_to_format(x, format_))
    want = [oracle.encode(Fraction(v), format_) for v in x.tolist()]
    # -0 keeps its sign in the formats that have one.
    for value, g, w in zip(x.tolist(), got, want, strict=True):
        if value == 0 and format_ in (Format.E4M3, Format.E5M2):
            w = 0x80 if math.copysign(1, value) < 0 else 0
        assert g == w, (value, g, w)


def test_d8_beyond_the_range() -> None:
    x = torch.tensor([448.0, 449, 464, 465, 480, 1000, -1000])
    assert round_to_format(x, Format.E4M3).float().tolist() == [448.0] * 6 + [-448.0]


def test_d9_e5m2_limit() -> None:
    x = torch.tensor([57344.0, 61440, 98304, -1e9])
    assert round_to_format(x, Format.E5M2).float().tolist() == [57344.0, 57344, 57344, -57344]


@pytest.mark.parametrize("format_", FLOAT8)
def test_nonfinite_elements_stay_nonfinite_and_never_enter_an_amax(format_: Format) -> None:
    x = torch.tensor([[1.0, math.inf, -2.0, math.nan]])
    q = cast_operand(x, OperandSpec.of(format_, Granularity.TENSORWISE))
    assert q.scale.item() == pytest.approx(2.0 / format_.max, rel=1e-7)
    decoded = decode(q)[0].tolist()
    assert decoded[2] == pytest.approx(-2.0)
    assert math.isnan(decoded[3])
    assert decoded[1] == math.inf if format_ is Format.E5M2 else math.isnan(decoded[1])


@pytest.mark.parametrize("k", range(-100, 100))
def test_d10_power_of_two_scales(k: int) -> None:
    exact = torch.tensor(448.0 * 2.0**k)
    above = torch.nextafter(exact, torch.tensor(math.inf))
    power = ScaleRounding.POWER_OF_TWO
    assert decode_scale(exact, Format.E4M3, power).item() == 2.0**k
    assert decode_scale(above, Format.E4M3, power).item() in (2.0**k, 2.0 ** (k + 1))


def test_scale_of_zero_is_one_and_tiny_amax_is_floored() -> None:
    amax = torch.tensor([0.0, 1e-45, 1e-38])
    for rounding in ScaleRounding:
        scale = decode_scale(amax, Format.E4M3, rounding)
        assert scale[0] == 1.0
        assert (scale[1:] == 2.0**-100).all()
        assert torch.isfinite(scale).all()


def _direct_cast(x: list[list[float]], spec: OperandSpec) -> tuple[list[list[int]], list[list[float]]]:
    """The formula element by element: float32 steps through numpy-free Python, codes by the oracle."""

    def f32(v: float) -> float:
        return torch.tensor(v, dtype=torch.float64).float().item()

    rows, k = len(x), len(x[0])
    padded = k + (-k % spec.pad)
    block_r = spec.granularity.block_rows or rows
    block_k = spec.granularity.block_k or padded
    codes, scales = [], []
    for r in range(rows):
        code_row, scale_row = [], []
        for c in range(padded):
            group = [
                abs(x[i][j])
                for i in range(r // block_r * block_r, min(rows, (r // block_r + 1) * block_r))
                for j in range(c // block_k * block_k, min(k, (c // block_k + 1) * block_k))
            ]
            amax = max(group, default=0.0)
            if amax == 0:
                s = 1.0
            else:
                s = f32(amax / spec.format.max)
                if spec.scale_rounding is ScaleRounding.POWER_OF_TWO:
                    mantissa, exponent = math.frexp(s)
                    s = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
                s = max(s, 2.0**-100)
            value = x[r][c] if c < k else 0.0
            scaled = f32(value * f32(1.0 / s))
            code_row.append(oracle.encode(Fraction(scaled), spec.format))
            scale_row.append(s)
        codes.append(code_row)
        scales.append(scale_row)
    return codes, scales


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format_", FLOAT8)
@pytest.mark.parametrize("transposed", [False, True])
def test_cast_against_the_formula_element_by_element(
    format_: Format, granularity: Granularity, transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 37, generator=generator) * torch.exp2(
        torch.randint(-6, 7, (5, 37), generator=generator).float()
    )
    x[2] = 0.0
    spec = OperandSpec.of(format_, granularity, transposed=transposed, pad=16)
    q = cast_operand(x, spec)
    operand = x.t() if transposed else x
    codes, scales = _direct_cast(operand.tolist(), spec)
    got = q.values.view(torch.uint8).tolist()
    # A negative value that rounds to zero keeps its sign bit; the oracle's FNUZ zero has none.
    for got_row, want_row, value_row in zip(got, codes, operand.tolist(), strict=True):
        assert got_row[: len(value_row)] == want_row[: len(value_row)]
        assert not any(got_row[len(value_row) :])
    full = torch.tensor(scales)
    assert torch.equal(
        decode(Quantized(torch.ones_like(q.values, dtype=torch.float32), q.scale, q.spec)), full
    )
    assert q.values.is_contiguous()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    k=st.integers(1, 300),
    exponent=st.integers(-60, 60),
    granularity=st.sampled_from(GRANULARITIES),
    format_=st.sampled_from(FLOAT8),
    seed=st.integers(0, 2**20),
)
def test_cast_properties(
    rows: int, k: int, exponent: int, granularity: Granularity, format_: Format, seed: int
) -> None:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    spec = OperandSpec.of(format_, granularity)
    q = cast_operand(x, spec)
    back = decode(q)
    # Half a unit in the last place of a normal value, or half the smallest subnormal times the scale.
    scale = decode(Quantized(torch.ones_like(q.values, dtype=torch.float32), q.scale, q.spec))
    bound = torch.maximum(
        x.abs() * 2.0 ** -(format_.mantissa_bits + 1), scale * format_.smallest_subnormal / 2
    )
    assert ((back - x).abs() <= bound * (1 + 1e-5)).all()
    # Powers of two move through the cast exactly.
    doubled = cast_operand(x * 2, spec)
    assert bits(doubled.values) == bits(q.values)
    assert torch.equal(doubled.scale, q.scale * 2)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0)])
def test_empty_operands(granularity: Granularity, shape: tuple[int, int]) -> None:
    spec = OperandSpec.of(Format.E4M3, granularity, pad=16)
    q = cast_operand(torch.empty(shape), spec)
    assert q.values.shape == shape
    assert q.scale.shape == scale_shape(spec, *shape)
    assert (amax_of(torch.empty(shape), granularity) == 0).all()


def test_d7_zero_rows_and_blocks_have_finite_scales() -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    x[2, :128] = 0
    for granularity in GRANULARITIES:
        q = cast_operand(x, OperandSpec.of(Format.E4M3, granularity))
        assert torch.isfinite(q.scale).all()
        assert (decode(q)[1] == 0).all()


def test_any_stride_and_dtype_gives_the_same_codes() -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    spec = OperandSpec.of(Format.E4M3, Granularity.ROWWISE)
    want = bits(cast_operand(x.float(), spec).values)
    wide = torch.zeros(6, 128, dtype=torch.bfloat16)
    wide[:, ::2] = x
    for same in (x, x.t().contiguous().t(), wide[:, ::2], x.double()):
        assert bits(cast_operand(same, spec).values) == want


def test_static_scale_clamps_and_bad_scales_are_refused() -> None:
    spec = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE)
    q = cast_operand(torch.tensor([[1000.0, 1.0]]), spec, scale=torch.tensor(1.0))
    assert q.values.float().tolist() == [[448.0, 1.0]]
    for bad in (torch.ones(3), torch.tensor(1.0, dtype=torch.float64)):
        with pytest.raises(UsageError, match="needs float32 of shape"):
            cast_operand(torch.ones(2, 4), spec, scale=bad)
    with pytest.raises(UsageError, match="2-D"):
        cast_operand(torch.ones(4), spec)


def test_layouts_keep_the_numbers() -> None:
    scale = torch.arange(15.0).reshape(3, 5)
    assert torch.equal(lay_out(scale, ScaleLayout.MN_MAJOR, 3), scale)
    assert lay_out(scale, ScaleLayout.MN_MAJOR, 3).stride() == (1, 3)
    padded = lay_out(scale, ScaleLayout.MN_MAJOR_PAD4, 3)
    assert padded.shape == (3, 8)
    assert torch.equal(padded[:, :5], scale)
    assert torch.equal(lay_out(torch.tensor(2.0), ScaleLayout.VECTOR, 3), torch.full((3,), 2.0))


def test_d11_fnuz_bytes() -> None:
    codes = torch.tensor([0x7E, 0x80, 0x00, 0x38, 0x01], dtype=torch.uint8)
    plain = codes.view(torch.float8_e4m3fn).float().tolist()
    fnuz = codes.view(torch.float8_e4m3fnuz).float().tolist()
    assert plain == [448, 0, 0, 1, 2**-9]
    assert math.copysign(1, plain[1]) == -1
    assert fnuz[0] == 224
    assert math.isnan(fnuz[1])
    assert fnuz[2:] == [0, 0.5, 2**-10]
