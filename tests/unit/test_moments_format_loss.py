"""What a cast would lose, from the histogram, against casts of the tensor itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.errors import UsageError
from loka.numerics import (
    FLOAT8_FORMATS,
    Moments,
    cast_loss,
    cast_operand,
    column_octaves,
    format_loss,
    row_octaves,
)
from loka.vocab import Format, Granularity, OperandSpec


def data(seed: int, octaves: float, centre: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 20, generator=generator) * torch.exp2(
        octaves * torch.randn(200, 20, generator=generator) + centre
    )
    return torch.where(torch.rand(200, 20, generator=generator) < 0.3, 0.0, x)


@given(
    seed=st.integers(0, 10**6),
    octaves=st.floats(0, 12),
    centre=st.floats(-25, 20),
    given_scale=st.one_of(st.none(), st.floats(-12, 12)),
)
@settings(max_examples=60, deadline=None)
def test_the_bounds_hold_what_a_cast_really_loses(
    seed: int, octaves: float, centre: float, given_scale: float | None
) -> None:
    x = data(seed, octaves, centre)
    moments = Moments.of(x)
    scale = None if given_scale is None else torch.tensor(2.0**given_scale)
    for format_ in FLOAT8_FORMATS:
        spec = OperandSpec.of(format_, Granularity.TENSORWISE)
        really = cast_loss(x, cast_operand(x, spec, scale=scale))
        told = format_loss(moments, format_, scale=scale)
        for share, exact in ((told.underflow, really.underflow), (told.saturation, really.saturation)):
            assert share.low - 1e-9 <= exact.item() <= share.high + 1e-9, format_
            assert share.low - 1e-9 <= share.value <= share.high + 1e-9, format_


def test_the_share_itself_is_close_where_magnitudes_are_spread() -> None:
    x = torch.exp2(torch.rand(400, 200, generator=torch.Generator().manual_seed(0)) * 40 - 30)
    moments = Moments.of(x)
    for format_, scale in ((Format.E4M3, None), (Format.E5M2, 2.0**-11.7), (Format.E4M3, 2.0**-3.3)):
        given_scale = None if scale is None else torch.tensor(scale)
        q = cast_operand(x, OperandSpec.of(format_, Granularity.TENSORWISE), scale=given_scale)
        really, told = cast_loss(x, q), format_loss(moments, format_, scale=scale)
        assert told.underflow.value == pytest.approx(really.underflow.item(), abs=0.005)
        assert told.saturation.value == pytest.approx(really.saturation.item(), abs=0.005)
    assert told.saturation.value > 0.05


def test_edges() -> None:
    nothing = format_loss(Moments.empty(3), Format.E4M3)
    assert (nothing.underflow, nothing.saturation) == ((0, 0, 0), (0, 0, 0))
    zeros = format_loss(Moments.of(torch.zeros(4, 3)), Format.E5M2)
    assert zeros.underflow.value == 0
    tiny = format_loss(Moments.of(torch.full((4, 3), 2.0**-140)), Format.E4M3)
    assert (tiny.underflow.low, tiny.underflow.high) == (0, 1)  # the lowest bin is open
    huge = Moments.of(torch.full((4, 3), 3e38))
    assert format_loss(huge, Format.E4M3).saturation.high == 0
    assert format_loss(huge, Format.E4M3, scale=1.0).saturation.high == 1
    with pytest.raises(UsageError, match="takes an 8-bit format, got bf16"):
        format_loss(huge, Format.BF16)
    with pytest.raises(UsageError, match="scale above 0, got 0"):
        format_loss(huge, Format.E4M3, scale=0.0)


def test_spread_of_rows_and_columns() -> None:
    x = torch.ones(1000, 100)
    assert len(set(row_octaves(Moments.of(x), (0.01, 0.99)) or [])) == 1
    assert len(set(column_octaves(Moments.of(x), (0.01, 0.99)) or [])) == 1
    rows = x * torch.exp2(torch.arange(1000) % 10.0)[:, None]
    low, high = row_octaves(Moments.of(rows), (0.01, 0.99)) or (0.0, 0.0)
    assert high - low == 9
    assert len(set(column_octaves(Moments.of(rows), (0.01, 0.99)) or [])) == 1
    nothing = Moments.of(torch.zeros(3, 2))
    assert row_octaves(nothing, (0.5,)) is column_octaves(nothing, (0.5,)) is None
    columns = x * torch.exp2(torch.arange(100) % 7.5)
    wanted = [math.log2(v) for v in sorted(columns.amax(dim=0).tolist())]
    found = column_octaves(Moments.of(columns), (0.0, 0.5, 1.0))
    assert found == pytest.approx([wanted[0], wanted[round(49.5)], wanted[99]])
    assert len(set(row_octaves(Moments.of(columns), (0.01, 0.99)) or [])) == 1
    dead = torch.zeros(5, 4)
    dead[2, 1] = 3.0
    assert row_octaves(Moments.of(dead), (0.0, 1.0)) == [1.0, 1.0]
    assert column_octaves(Moments.of(dead), (0.0, 1.0)) == pytest.approx([math.log2(3)] * 2)
    assert row_octaves(Moments.empty(4), (0.5,)) is column_octaves(Moments.empty(4), (0.5,)) is None
