"""A scale for each row, or for each column where the transposed operand is wanted.

Rows: one read. Columns: their maxima are taken in the first read, together with the cast of the rows where
that is wanted; the transposed cast is a second read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from loka.kernels.triton.casts.formula import codes_of, decode_scale, finite_or_nan, reciprocal
from loka.kernels.triton.casts.outputs import FLOAT8, FORMAT_MAX, empty_like_output, rows_of
from loka.kernels.triton.casts.tiles import column_amax_tile, rowwise_tile
from loka.kernels.triton.casts.turned import OF_COLUMNS, cast_turned, pairs_like
from loka.kernels.triton.launch import launcher

__all__ = ["cast_columnwise", "cast_rowwise"]


@triton.jit
def _rows_kernel(
    x,
    values,
    scales,
    R,
    C,
    stride,
    padded_C,
    MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WHOLE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """BR rows: amax, scale, cast. Rows longer than BC are read twice, the second time from the L2 cache."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    row = rows.to(tl.int64)[:, None]
    columns = tl.arange(0, BC)
    if WHOLE:
        inside = (rows < R)[:, None] & (columns < C)[None, :]
        wide = tl.load(x + row * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        clean = finite_or_nan(wide)
        scale = decode_scale(tl.max(tl.abs(clean), axis=1), MAX, POWER_OF_TWO)
        codes = codes_of(wide, clean, reciprocal(scale)[:, None], FORMAT)
        keep = (rows < R)[:, None] & (columns < padded_C)[None, :]
        tl.store(values + row * padded_C + columns[None, :], codes, mask=keep)
    else:
        largest = tl.zeros([BR, BC], dtype=tl.float32)
        for start in range(0, C, BC):
            inside = (rows < R)[:, None] & (start + columns < C)[None, :]
            wide = tl.load(x + row * stride + (start + columns)[None, :], mask=inside, other=0.0)
            largest = tl.maximum(largest, tl.abs(finite_or_nan(wide.to(tl.float32))))
        scale = decode_scale(tl.max(largest, axis=1), MAX, POWER_OF_TWO)
        r = reciprocal(scale)[:, None]
        for start in range(0, padded_C, BC):
            inside = (rows < R)[:, None] & (start + columns < C)[None, :]
            wide = tl.load(x + row * stride + (start + columns)[None, :], mask=inside, other=0.0)
            wide = wide.to(tl.float32)
            keep = (rows < R)[:, None] & (start + columns < padded_C)[None, :]
            codes = codes_of(wide, finite_or_nan(wide), r, FORMAT)
            tl.store(values + row * padded_C + (start + columns)[None, :], codes, mask=keep)
    tl.store(scales + rows, scale, mask=rows < R)


@triton.jit
def _column_amax_kernel(x, partials, R, C, stride, BR: tl.constexpr, BC: tl.constexpr):
    """Maxima of BC columns over every P-th block of BR rows, in `partials` [P, C]."""
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    largest = tl.zeros([BR, BC], dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        rows = block * BR + tl.arange(0, BR)
        inside = (rows < R)[:, None] & (columns < C)[None, :]
        at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
        wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(finite_or_nan(wide)))
    tl.store(partials + tl.program_id(0) * C + columns, tl.max(largest, axis=0), mask=columns < C)


@triton.jit
def _column_scale_kernel(
    partials, scales, P, C, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    """Scales of BC columns from their partial maxima."""
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    largest = tl.zeros([BP, BC], dtype=tl.float32)
    for start in range(0, P, BP):
        index = start + tl.arange(0, BP)
        inside = (index < P)[:, None] & (columns < C)[None, :]
        at = index[:, None] * C + columns[None, :]
        largest = tl.maximum(largest, tl.load(partials + at, mask=inside, other=0.0))
    scale = decode_scale(tl.max(largest, axis=0), MAX, POWER_OF_TWO)
    tl.store(scales + columns, scale, mask=columns < C)


@triton_op("loka::cast_rowwise", mutates_args={})
def cast_rowwise(x: Tensor, format_: int, power_of_two: bool, pad: int) -> tuple[Tensor, Tensor]:
    """Cast x [R, C] with a scale for each row.

    Args:
        x: bf16, fp16 or fp32, contiguous along C, not empty.
        format_: 0 for E4M3, 1 for E5M2.
        power_of_two: Round scales up to powers of two.
        pad: The multiple to which C is padded with zeros.

    Returns:
        values [R, C'], scales [R].
    """
    R, C, stride, padded_C, _ = rows_of(x, pad, 0)
    values = empty_like_output(x, (R, padded_C), FLOAT8[format_], wanted=True)
    scales = x.new_empty((R,), dtype=torch.float32)
    tile = rowwise_tile(R, padded_C)
    launcher(_rows_kernel)[(triton.cdiv(R, tile.rows),)](
        x,
        values,
        scales,
        R,
        C,
        stride,
        padded_C,
        MAX=FORMAT_MAX[format_],
        FORMAT=format_,
        POWER_OF_TWO=power_of_two,
        WHOLE=tile.columns >= padded_C,
        BR=tile.rows,
        BC=tile.columns,
        num_warps=tile.warps,
    )
    return values, scales


@triton_op("loka::cast_columnwise", mutates_args={})
def cast_columnwise(x: Tensor, format_: int, power_of_two: bool, pad: int) -> tuple[Tensor, Tensor]:
    """Cast the transpose of x [R, C] with a scale for each of its rows, that is each column of x.

    Args:
        x: bf16, fp16 or fp32, contiguous along C, not empty.
        format_: 0 for E4M3, 1 for E5M2.
        power_of_two: Round scales up to powers of two.
        pad: The multiple to which R is padded with zeros; R' must be even.

    Returns:
        values [C, R'], scales [C].
    """
    rows = rows_of(x, 0, pad)
    scales = x.new_empty((rows.C,), dtype=torch.float32)
    tile = column_amax_tile(rows.R, rows.C)
    across = triton.cdiv(rows.C, tile.columns)
    down = min(triton.cdiv(rows.R, tile.rows), max(1, tile.programs // across))
    partials = x.new_empty((down, rows.C), dtype=torch.float32)
    launcher(_column_amax_kernel)[(down, across)](
        x, partials, rows.R, rows.C, rows.stride, BR=tile.rows, BC=tile.columns, num_warps=tile.warps
    )
    launcher(_column_scale_kernel)[(triton.cdiv(rows.C, 32),)](
        partials, scales, down, rows.C, MAX=FORMAT_MAX[format_], POWER_OF_TWO=power_of_two, BP=64, BC=32
    )
    pairs = pairs_like(x, rows)
    unused = x.new_empty((0,), dtype=FLOAT8[format_]), x.new_empty((0,), dtype=torch.float32)
    cast_turned(
        x,
        rows,
        scales,
        (unused[0], pairs, unused[1]),
        source=OF_COLUMNS,
        format_=format_,
        power_of_two=power_of_two,
    )
    return pairs.view(FLOAT8[format_]), scales
