"""Blocks in both orientations, or transposed, in pieces that fit the registers.

A program takes a tile of 128 rows. It goes through it twice, a piece at a time, the second time reading from
the L1 cache: first for the maxima and for the codes that lie as x does, then for the transposed codes.

A tile of 8-bit codes crosses shared memory byte by byte when Triton transposes it. Here the codes of two
neighbouring rows are put into one 16-bit number and those are transposed: four times fewer instructions. It
needs rows of the transposed output that are a multiple of 16 bytes.
"""

import triton
import triton.language as tl

from loka.kernels.triton.casts.formula import codes_of, decode_scale, finite_or_nan, reciprocal

__all__ = ["pairs_kernel"]


@triton.jit
def _bytes(codes):
    return codes.to(tl.uint8, bitcast=True).to(tl.uint16)


@triton.jit
def _pairs_of_codes(first, second, r, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """The code of `first` in the low byte, of `second` in the high one, as int16."""
    first_clean, second_clean = finite_or_nan(first), finite_or_nan(second)
    if HARDWARE and FORMAT == 0:
        # One instruction converts two numbers into two bytes; Triton pairs neighbours of a row, we two rows.
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,f,f",
            [first_clean * r, second_clean * r],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        )
    else:
        low = _bytes(codes_of(first, first_clean, r, FORMAT))
        high = _bytes(codes_of(second, second_clean, r, FORMAT))
        pairs = (low | (high << 8)).to(tl.int16, bitcast=True)
    return pairs


@triton.jit
def pairs_kernel(
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
    HARDWARE: tl.constexpr,
    PIECE: tl.constexpr,
    BC: tl.constexpr,
):
    """One tile of 128 rows x BC columns; with STRAIGHT or SQUARE, BC is 128. PIECE rows are taken at once."""
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    columns = tile_c * BC + tl.arange(0, BC)
    column = columns.to(tl.int64)
    inside = (columns < C)[None, :]
    kept = (columns < padded_C)[None, :]
    largest = tl.zeros([PIECE, BC], dtype=tl.float32)
    for start in tl.range(0, 128, PIECE, loop_unroll_factor=1):
        row = (tile_r * 128 + start + tl.arange(0, PIECE)).to(tl.int64)
        at = x + row[:, None] * stride + columns[None, :]
        wide = tl.load(at, mask=(row < R)[:, None] & inside, other=0.0).to(tl.float32)
        clean = finite_or_nan(wide)
        size = tl.abs(clean)
        largest = tl.maximum(largest, size)
        if STRAIGHT and not SQUARE:
            scale = decode_scale(tl.max(size, axis=1), MAX, POWER_OF_TWO)
            codes = codes_of(wide, clean, reciprocal(scale)[:, None], FORMAT)
            shown = tl.where(tile_c < straight_blocks, scale, 0.0)
            to = straight_scales + row * straight_stride_row + tile_c * straight_stride_block
            tl.store(to, shown, mask=(row < R) & (tile_c < straight_width))
            keep = (row < R)[:, None] & kept
            tl.store(straight + row[:, None] * padded_C + columns[None, :], codes, mask=keep)
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
        r = reciprocal(scale)[None, :]
        shown = tl.where(tile_r < transposed_blocks, scale, 0.0)
        to = transposed_scales + column * transposed_stride_row + tile_r * transposed_stride_block
        tl.store(to, shown, mask=(columns < C) & (tile_r < transposed_width))
    row_of_pairs = tl.multiple_of(padded_R // 2, 8)
    HALF: tl.constexpr = PIECE // 2
    for start in tl.range(0, 64, HALF, loop_unroll_factor=1):
        pairs = tile_r * 64 + start + tl.arange(0, HALF)
        even = (2 * pairs).to(tl.int64)
        pair_at = x + even[:, None] * stride + columns[None, :]
        first = tl.load(pair_at, mask=(even < R)[:, None] & inside, other=0.0).to(tl.float32)
        second = tl.load(pair_at + stride, mask=(even + 1 < R)[:, None] & inside, other=0.0).to(tl.float32)
        if STRAIGHT and SQUARE:
            lying = straight + even[:, None] * padded_C + columns[None, :]
            of_first = codes_of(first, finite_or_nan(first), r, FORMAT)
            tl.store(lying, of_first, mask=(even < R)[:, None] & kept)
            of_second = codes_of(second, finite_or_nan(second), r, FORMAT)
            tl.store(lying + padded_C, of_second, mask=(even + 1 < R)[:, None] & kept)
        both = tl.trans(_pairs_of_codes(first, second, r, FORMAT, HARDWARE))
        turned = transposed_pairs + column[:, None] * row_of_pairs + pairs[None, :]
        tl.store(turned, both, mask=(columns < C)[:, None] & (pairs < row_of_pairs)[None, :])
