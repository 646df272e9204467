"""The kernels of block scales: tiles that hold whole blocks of both orientations."""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import triton
import triton.language as tl

from loka.kernels.triton.casts.formula import (
    codes_of,
    decode_scale,
    fast_reciprocal,
    finite_or_nan,
    reciprocal,
)
from loka.kernels.triton.casts.pairs import pairs_in_row, pairs_of_codes

__all__ = ["both_kernel", "straight_kernel"]


@triton.jit
def straight_kernel(
    x,
    values,
    scales,
    R,
    C,
    stride,
    padded_C,
    scale_rows,
    blocks,
    width,
    scale_stride_row,
    scale_stride_block,
    tiles_c,
    MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SQUARE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """One tile of BR x 128 as it lies. Past the tensor there are zeros; past the last block scales too."""
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row = (tile_r * BR + tl.arange(0, BR)).to(tl.int64)
    columns = tile_c * BC + tl.arange(0, BC)
    inside = (row < R)[:, None] & (columns < C)[None, :]
    wide = tl.load(x + row[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    clean = finite_or_nan(wide)
    block_at = tile_c * scale_stride_block
    if SQUARE:
        scale = decode_scale(tl.max(tl.abs(clean)), MAX, POWER_OF_TWO)
        shown = tl.where(tile_c < blocks, scale, 0.0)
        at = scales + tile_r * scale_stride_row + block_at
        tl.store(at, shown, mask=(tile_r < scale_rows) & (tile_c < width))
        codes = codes_of(wide, clean, reciprocal(scale), FORMAT)
    else:
        scale = decode_scale(tl.max(tl.abs(clean), axis=1), MAX, POWER_OF_TWO)
        shown = tl.where(tile_c < blocks, scale, 0.0)
        tl.store(scales + row * scale_stride_row + block_at, shown, mask=(row < R) & (tile_c < width))
        codes = codes_of(wide, clean, reciprocal(scale)[:, None], FORMAT)
    keep = (row < R)[:, None] & (columns < padded_C)[None, :]
    tl.store(values + row[:, None] * padded_C + columns[None, :], codes, mask=keep)


@triton.jit
def _read(at, inside, WHOLE: tl.constexpr):
    """fp32 of a piece; a tile that lies wholly inside needs no mask."""
    loaded = tl.load(at) if WHOLE else tl.load(at, mask=inside, other=0.0)
    return loaded.to(tl.float32)


@triton.jit
def _write(at, value, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=inside)


@triton.jit
def both_kernel(
    x,
    straight,
    straight_scales,
    transposed_pairs,
    transposed_scales,
    R,
    C,
    stride,
    padded_C,
    padded_R,
    straight_rows,
    straight_stride_row,
    straight_stride_block,
    transposed_rows,
    transposed_stride_row,
    transposed_stride_block,
    straight_blocks,
    transposed_blocks,
    straight_width,
    transposed_width,
    tiles_c,
    MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SQUARE: tl.constexpr,
    STRAIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    PIECE: tl.constexpr,
    BC: tl.constexpr,
):
    """One tile of 128 rows x BC columns, in pieces of PIECE rows that fit the registers.

    It is read twice, the second time from the L1 cache: first for the maxima and, with STRAIGHT, for the
    1x128 codes that lie as x does, then for the transposed codes. With STRAIGHT or SQUARE, BC is 128.
    """
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    columns = tile_c * BC + tl.arange(0, BC)
    column = columns.to(tl.int64)
    inside = (columns < C)[None, :]
    kept = (columns < padded_C)[None, :]
    largest = tl.zeros([PIECE, BC], dtype=tl.float32)
    for start in tl.range(0, 128, PIECE, loop_unroll_factor=1):
        row = (tile_r * 128 + start + tl.arange(0, PIECE)).to(tl.int64)
        in_rows = (row < R)[:, None]
        wide = _read(x + row[:, None] * stride + columns[None, :], in_rows & inside, WHOLE)
        clean = finite_or_nan(wide)
        size = tl.abs(clean)
        largest = tl.maximum(largest, size)
        if STRAIGHT and not SQUARE:
            scale = decode_scale(tl.max(size, axis=1), MAX, POWER_OF_TWO)
            codes = codes_of(wide, clean, fast_reciprocal(scale, HARDWARE)[:, None], FORMAT)
            shown = tl.where(tile_c < straight_blocks, scale, 0.0)
            to = straight_scales + row * straight_stride_row + tile_c * straight_stride_block
            tl.store(to, shown, mask=(row < R) & (tile_c < straight_width))
            _write(straight + row[:, None] * padded_C + columns[None, :], codes, in_rows & kept, WHOLE)
    if SQUARE:
        scale = decode_scale(tl.max(largest), MAX, POWER_OF_TWO)
        r = reciprocal(scale)
        if STRAIGHT:
            shown = tl.where(tile_c < straight_blocks, scale, 0.0)
            to = straight_scales + tile_r * straight_stride_row + tile_c * straight_stride_block
            tl.store(to, shown, mask=(tile_r < straight_rows) & (tile_c < straight_width))
        shown = tl.where(tile_r < transposed_blocks, scale, 0.0)
        to = transposed_scales + tile_c * transposed_stride_row + tile_r * transposed_stride_block
        tl.store(to, shown, mask=(tile_c < transposed_rows) & (tile_r < transposed_width))
    else:
        scale = decode_scale(tl.max(largest, axis=0), MAX, POWER_OF_TWO)
        r = fast_reciprocal(scale, HARDWARE)[None, :]
        shown = tl.where(tile_r < transposed_blocks, scale, 0.0)
        to = transposed_scales + column * transposed_stride_row + tile_r * transposed_stride_block
        tl.store(to, shown, mask=(columns < C) & (tile_r < transposed_width))
    row_of_pairs = pairs_in_row(padded_R, ALIGNED)
    HALF: tl.constexpr = PIECE // 2
    for start in tl.range(0, 64, HALF, loop_unroll_factor=1):
        pairs = tile_r * 64 + start + tl.arange(0, HALF)
        even = (2 * pairs).to(tl.int64)
        pair_at = x + even[:, None] * stride + columns[None, :]
        first = _read(pair_at, (even < R)[:, None] & inside, WHOLE)
        second = _read(pair_at + stride, (even + 1 < R)[:, None] & inside, WHOLE)
        if STRAIGHT and SQUARE:
            lying = straight + even[:, None] * padded_C + columns[None, :]
            of_first = codes_of(first, finite_or_nan(first), r, FORMAT)
            _write(lying, of_first, (even < R)[:, None] & kept, WHOLE)
            of_second = codes_of(second, finite_or_nan(second), r, FORMAT)
            _write(lying + padded_C, of_second, (even + 1 < R)[:, None] & kept, WHOLE)
        both = tl.trans(pairs_of_codes(first, second, r, FORMAT, HARDWARE))
        turned = transposed_pairs + column[:, None] * row_of_pairs + pairs[None, :]
        _write(turned, both, (columns < C)[:, None] & (pairs < row_of_pairs)[None, :], WHOLE)
