"""Casts whose scales are known before: one read that writes the transpose, and x as it lies where wanted."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.triton.casts.formula import codes_of, decode_scale, finite_or_nan, reciprocal
from loka.kernels.triton.casts.outputs import FORMAT_MAX, Rows
from loka.kernels.triton.casts.pairs import pairs_in_row, pairs_of_codes
from loka.kernels.triton.casts.tiles import transposing_tile
from loka.kernels.triton.launch import is_compiled, launcher

__all__ = ["GIVEN", "OF_COLUMNS", "OF_PARTIALS", "cast_turned", "pairs_like"]

# Where the scale comes from: one that is given, one from partial maxima, or one for each column.
GIVEN, OF_PARTIALS, OF_COLUMNS = 0, 1, 2


@triton.jit
def _kernel(
    x,
    scales,
    straight,
    transposed_pairs,
    scale_out,
    R,
    C,
    stride,
    padded_C,
    padded_R,
    P,
    MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SCALE: tl.constexpr,
    PARTIALS: tl.constexpr,
    STRAIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """One tile of BP pairs of rows x BC columns."""
    # From the end: what the amax read last is still in the L2 cache.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles_c = tl.cdiv(padded_C, BC)
    pairs = (tile // tiles_c) * BP + tl.arange(0, BP)
    columns = (tile % tiles_c) * BC + tl.arange(0, BC)
    if SCALE == 0:
        r = reciprocal(tl.load(scales))
    elif SCALE == 1:
        # Every program derives the scale from the partial maxima: no host, no launch of its own.
        index = tl.arange(0, PARTIALS)
        scale = decode_scale(tl.max(tl.load(scales + index, mask=index < P, other=0.0)), MAX, POWER_OF_TWO)
        if tile == 0:
            tl.store(scale_out, scale)
        r = reciprocal(scale)
    else:
        r = reciprocal(tl.load(scales + columns, mask=columns < C, other=1.0))[None, :]
    even, column = (2 * pairs).to(tl.int64), columns.to(tl.int64)
    at = x + even[:, None] * stride + columns[None, :]
    inside = (columns < C)[None, :]
    first = tl.load(at, mask=(even < R)[:, None] & inside, other=0.0).to(tl.float32)
    second = tl.load(at + stride, mask=(even + 1 < R)[:, None] & inside, other=0.0).to(tl.float32)
    if STRAIGHT:
        lying = straight + even[:, None] * padded_C + columns[None, :]
        kept = (columns < padded_C)[None, :]
        of_first = codes_of(first, finite_or_nan(first), r, FORMAT)
        tl.store(lying, of_first, mask=(even < R)[:, None] & kept)
        of_second = codes_of(second, finite_or_nan(second), r, FORMAT)
        tl.store(lying + padded_C, of_second, mask=(even + 1 < R)[:, None] & kept)
    row_of_pairs = pairs_in_row(padded_R, ALIGNED)
    turned = transposed_pairs + column[:, None] * row_of_pairs + pairs[None, :]
    both = tl.trans(pairs_of_codes(first, second, r, FORMAT, HARDWARE))
    tl.store(turned, both, mask=(columns < C)[:, None] & (pairs < row_of_pairs)[None, :])


def cast_turned(
    x: Tensor,
    rows: Rows,
    scales: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor],
    *,
    source: int,
    format_: int,
    power_of_two: bool,
) -> None:
    """Write the transpose of a cast x, and the cast itself where its output is not empty.

    Args:
        x: [R, C], contiguous along C.
        rows: How x lies and what the outputs are padded to.
        scales: fp32: one scale, partial maxima, or a scale for each column, as `source` says.
        outputs: straight [R, C'] or empty; pairs int16 [C, R' / 2]; the scale () for partial maxima.
        source: GIVEN, OF_PARTIALS or OF_COLUMNS.
        format_: 0 for E4M3, 1 for E5M2.
        power_of_two: Round the scale of partial maxima up to a power of two.
    """
    straight, pairs, scale_out = outputs
    tile = transposing_tile(rows.R, rows.C, x.element_size())
    tiles_r = triton.cdiv(rows.rows_out, tile.rows)
    tiles_c = triton.cdiv(rows.columns_out, tile.columns)
    count = scales.numel() if source == OF_PARTIALS else 1
    launcher(_kernel)[(tiles_r * tiles_c,)](
        x,
        scales,
        straight,
        pairs,
        scale_out,
        rows.R,
        rows.C,
        rows.stride,
        rows.columns_out,
        rows.rows_out,
        count,
        MAX=FORMAT_MAX[format_],
        FORMAT=format_,
        POWER_OF_TWO=power_of_two,
        SCALE=source,
        PARTIALS=triton.next_power_of_2(count),
        STRAIGHT=straight.numel() > 0,
        ALIGNED=rows.rows_out % 16 == 0,
        HARDWARE=is_compiled(_kernel),
        BP=tile.rows // 2,
        BC=tile.columns,
        num_warps=tile.warps,
    )


def pairs_like(x: Tensor, rows: Rows) -> Tensor:
    """Memory for the transposed output [C, R'], as int16 pairs."""
    return x.new_empty((rows.C, rows.rows_out // 2), dtype=torch.int16)
