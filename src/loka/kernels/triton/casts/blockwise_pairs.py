"""1x128 blocks of the transposed operand, transposed two bytes at a time.

A tile of 8-bit codes crosses shared memory byte by byte when Triton transposes it. Here a program holds even
and odd rows apart, puts the codes of two neighbouring rows into one 16-bit number and transposes those: four
times fewer instructions. It needs rows of the transposed output that are a multiple of 16 bytes.
"""

import triton
import triton.language as tl

from loka.kernels.triton.casts.formula import codes_of, decode_scale, finite_or_nan, reciprocal

__all__ = ["pairs_kernel"]


@triton.jit
def _bytes(codes):
    return codes.to(tl.uint8, bitcast=True).to(tl.uint16)


@triton.jit
def _pairs_of_codes(
    first, first_clean, second, second_clean, r, FORMAT: tl.constexpr, HARDWARE: tl.constexpr
):
    """The code of `first` in the low byte, of `second` in the high one, as int16."""
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
    straight_stride_row,
    straight_stride_block,
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
    STRAIGHT: tl.constexpr,
    HARDWARE: tl.constexpr,
    BC: tl.constexpr,
):
    """One tile of 128 rows x BC columns; with STRAIGHT, BC is 128 and the rows are cast as well."""
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    pairs = tile_r * 64 + tl.arange(0, 64)
    columns = tile_c * BC + tl.arange(0, BC)
    even, column = (2 * pairs).to(tl.int64), columns.to(tl.int64)
    odd = even + 1
    inside = (columns < C)[None, :]
    at = columns[None, :]
    first = tl.load(x + even[:, None] * stride + at, mask=(even < R)[:, None] & inside, other=0.0).to(
        tl.float32
    )
    second = tl.load(x + odd[:, None] * stride + at, mask=(odd < R)[:, None] & inside, other=0.0).to(
        tl.float32
    )
    first_clean, second_clean = finite_or_nan(first), finite_or_nan(second)
    first_size, second_size = tl.abs(first_clean), tl.abs(second_clean)
    if STRAIGHT:
        kept = (columns < padded_C)[None, :]
        block = tile_c * straight_stride_block
        scale = decode_scale(tl.max(first_size, axis=1), MAX, POWER_OF_TWO)
        codes = codes_of(first, first_clean, reciprocal(scale)[:, None], FORMAT)
        shown = tl.where(tile_c < straight_blocks, scale, 0.0)
        in_layout = tile_c < straight_width
        tl.store(straight_scales + even * straight_stride_row + block, shown, mask=(even < R) & in_layout)
        tl.store(straight + even[:, None] * padded_C + at, codes, mask=(even < R)[:, None] & kept)
        scale = decode_scale(tl.max(second_size, axis=1), MAX, POWER_OF_TWO)
        codes = codes_of(second, second_clean, reciprocal(scale)[:, None], FORMAT)
        shown = tl.where(tile_c < straight_blocks, scale, 0.0)
        tl.store(straight_scales + odd * straight_stride_row + block, shown, mask=(odd < R) & in_layout)
        tl.store(straight + odd[:, None] * padded_C + at, codes, mask=(odd < R)[:, None] & kept)
    scale = decode_scale(tl.max(tl.maximum(first_size, second_size), axis=0), MAX, POWER_OF_TWO)
    shown = tl.where(tile_r < transposed_blocks, scale, 0.0)
    to = column * transposed_stride_row + tile_r * transposed_stride_block
    tl.store(transposed_scales + to, shown, mask=(columns < C) & (tile_r < transposed_width))
    r = reciprocal(scale)[None, :]
    both = tl.trans(_pairs_of_codes(first, first_clean, second, second_clean, r, FORMAT, HARDWARE))
    row_of_pairs = tl.multiple_of(padded_R // 2, 8)
    keep = (columns < C)[:, None] & (pairs < row_of_pairs)[None, :]
    tl.store(transposed_pairs + column[:, None] * row_of_pairs + pairs[None, :], both, mask=keep)
