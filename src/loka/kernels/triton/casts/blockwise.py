"""A scale for 128 elements along k, of one row (1x128) or of 128 rows (128x128): one read, both orientations.

Blocks of the transposed operand run along R, so a tile of 128 x 128 holds whole blocks of both orientations.
A 128x128 block has one scale in both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from loka.kernels.triton.casts.blockwise_pairs import pairs_kernel
from loka.kernels.triton.casts.formula import codes_of, decode_scale, finite_or_nan, reciprocal
from loka.kernels.triton.casts.outputs import FLOAT8, FORMAT_MAX, empty_like_output, padded
from loka.kernels.triton.casts.tiles import blockwise_tile, pairs_tile
from loka.kernels.triton.launch import is_compiled, launcher

__all__ = ["K_MAJOR", "MN_MAJOR", "MN_MAJOR_PAD4", "cast_blockwise"]

# Layouts by number, as for formats. Scales are [row blocks, k blocks]: contiguous along k, along the rows, or
# along k with the k blocks padded by zeros to a multiple of 4.
K_MAJOR, MN_MAJOR, MN_MAJOR_PAD4 = 0, 1, 2


@triton.jit
def _kernel(
    x,
    straight,
    straight_scales,
    transposed,
    transposed_scales,
    R,
    C,
    stride,
    padded_C,
    padded_R,
    straight_rows,
    straight_blocks,
    straight_stride_row,
    straight_stride_block,
    transposed_rows,
    transposed_blocks,
    transposed_stride_row,
    transposed_stride_block,
    straight_width,
    transposed_width,
    tiles_c,
    MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SQUARE: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """One tile of BR x 128. Rows and columns past the tensor are zeros; scales past the last block too."""
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    rows = tile_r * BR + tl.arange(0, BR)
    columns = tile_c * BC + tl.arange(0, BC)
    row, column = rows.to(tl.int64), columns.to(tl.int64)
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    wide = tl.load(x + row[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    clean = finite_or_nan(wide)
    magnitude = tl.abs(clean)
    if SQUARE:
        scale = decode_scale(tl.max(magnitude), MAX, POWER_OF_TWO)
        codes = codes_of(wide, clean, reciprocal(scale), FORMAT)
        if STRAIGHT:
            shown = tl.where((tile_r < straight_rows) & (tile_c < straight_blocks), scale, 0.0)
            at = tile_r * straight_stride_row + tile_c * straight_stride_block
            tl.store(straight_scales + at, shown, mask=(tile_r < straight_rows) & (tile_c < straight_width))
        if TRANSPOSED:
            shown = tl.where((tile_c < transposed_rows) & (tile_r < transposed_blocks), scale, 0.0)
            at = tile_c * transposed_stride_row + tile_r * transposed_stride_block
            tl.store(
                transposed_scales + at, shown, mask=(tile_c < transposed_rows) & (tile_r < transposed_width)
            )
    if STRAIGHT:
        if not SQUARE:
            scale = decode_scale(tl.max(magnitude, axis=1), MAX, POWER_OF_TWO)
            codes = codes_of(wide, clean, reciprocal(scale)[:, None], FORMAT)
            shown = tl.where(tile_c < straight_blocks, scale, 0.0)
            at = row * straight_stride_row + tile_c * straight_stride_block
            tl.store(straight_scales + at, shown, mask=(rows < R) & (tile_c < straight_width))
        keep = (rows < R)[:, None] & (columns < padded_C)[None, :]
        tl.store(straight + row[:, None] * padded_C + columns[None, :], codes, mask=keep)
    if TRANSPOSED:
        if not SQUARE:
            scale = decode_scale(tl.max(magnitude, axis=0), MAX, POWER_OF_TWO)
            codes = codes_of(wide, clean, reciprocal(scale)[None, :], FORMAT)
            shown = tl.where(tile_r < transposed_blocks, scale, 0.0)
            at = column * transposed_stride_row + tile_r * transposed_stride_block
            tl.store(transposed_scales + at, shown, mask=(columns < C) & (tile_r < transposed_width))
        keep = (columns < C)[:, None] & (rows < padded_R)[None, :]
        tl.store(transposed + column[:, None] * padded_R + rows[None, :], tl.trans(codes), mask=keep)


def _scales(x: Tensor, rows: int, k: int, layout: int, *, square: bool, wanted: bool) -> Tensor:
    """Memory for the scales of an operand [rows, k], strided as its layout says."""
    down, blocks = -(-rows // 128) if square else rows, -(-k // 128)
    if not wanted:
        return x.new_empty((0, 0), dtype=torch.float32)
    if layout == MN_MAJOR:
        return x.new_empty((blocks, down), dtype=torch.float32).t()
    return x.new_empty((down, padded(blocks, 4) if layout == MN_MAJOR_PAD4 else blocks), dtype=torch.float32)


@triton_op("loka::cast_blockwise", mutates_args={})
def cast_blockwise(
    x: Tensor,
    format_: int,
    power_of_two: bool,
    square: bool,
    straight_pad: int,
    straight_layout: int,
    transposed_pad: int,
    transposed_layout: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast x [R, C] in blocks of 1x128 or 128x128, in either orientation or both.

    Args:
        x: bf16, fp16 or fp32, contiguous along C, not empty.
        format_: 0 for E4M3, 1 for E5M2.
        power_of_two: Round scales up to powers of two.
        square: 128x128 blocks instead of 1x128.
        straight_pad: The multiple to which C is padded in the straight output; 0 for no such output.
        straight_layout: Of its scales: K_MAJOR, MN_MAJOR or MN_MAJOR_PAD4.
        transposed_pad: The same for R in the transposed output.
        transposed_layout: Of its scales.

    Returns:
        straight [R, C'], its scales, transposed [C, R'], its scales (empty for what was not asked).
    """
    R, C = x.shape
    padded_C, padded_R = padded(C, straight_pad), padded(R, transposed_pad)
    float8 = FLOAT8[format_]
    straight = empty_like_output(x, (R, padded_C), float8, wanted=straight_pad > 0)
    of_s = _scales(x, R, padded_C, straight_layout, square=square, wanted=straight_pad > 0)
    of_t = _scales(x, C, padded_R, transposed_layout, square=square, wanted=transposed_pad > 0)
    # Scales padded to a multiple of 4 blocks reach past the values: the grid covers both.
    shape = (R, C, x.stride(0), padded_C, padded_R)
    if transposed_pad and padded_R % 16 == 0:
        pairs = x.new_empty((C, padded_R // 2), dtype=torch.int16)
        _launch_pairs(x, (straight, of_s, pairs, of_t), shape, format_, power_of_two, square)
        transposed = pairs.view(float8)
    else:
        transposed = empty_like_output(x, (C, padded_R), float8, wanted=transposed_pad > 0)
        _launch_tiles(x, (straight, of_s, transposed, of_t), shape, format_, power_of_two, square)
    return straight, of_s, transposed, of_t


_Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
_Shape = tuple[int, int, int, int, int]


def _launch_pairs(
    x: Tensor, outputs: _Outputs, shape: _Shape, format_: int, power_of_two: bool, square: bool
) -> None:
    straight, of_s, pairs, of_t = outputs
    R, C, stride, padded_C, padded_R = shape
    tile = pairs_tile(R, C, whole_blocks=square or straight.numel() > 0)
    tiles_r = max(triton.cdiv(padded_R, 128), of_t.shape[1])
    tiles_c = max(triton.cdiv(max(C, padded_C), tile.columns), of_s.shape[1])
    launcher(pairs_kernel)[(tiles_r * tiles_c,)](
        x,
        straight,
        of_s,
        pairs,
        of_t,
        R,
        C,
        stride,
        padded_C,
        padded_R,
        triton.cdiv(R, 128) if square else R,
        *of_s.stride(),
        triton.cdiv(C, 128) if square else C,
        *of_t.stride(),
        triton.cdiv(padded_C, 128),
        triton.cdiv(padded_R, 128),
        of_s.shape[1],
        of_t.shape[1],
        tiles_c,
        MAX=FORMAT_MAX[format_],
        FORMAT=format_,
        POWER_OF_TWO=power_of_two,
        SQUARE=square,
        STRAIGHT=straight.numel() > 0,
        HARDWARE=is_compiled(pairs_kernel),
        PIECE=tile.rows,
        BC=tile.columns,
        num_warps=tile.warps,
    )


def _launch_tiles(
    x: Tensor, outputs: _Outputs, shape: _Shape, format_: int, power_of_two: bool, square: bool
) -> None:
    straight, of_s, transposed, of_t = outputs
    R, C, stride, padded_C, padded_R = shape
    tile = blockwise_tile(R, C, square=square, transposed=transposed.numel() > 0)
    tiles_r = max(triton.cdiv(padded_R, tile.rows), of_t.shape[1])
    tiles_c = max(triton.cdiv(padded_C, 128), of_s.shape[1])
    launcher(_kernel)[(tiles_r * tiles_c,)](
        x,
        straight,
        of_s,
        transposed,
        of_t,
        R,
        C,
        stride,
        padded_C,
        padded_R,
        triton.cdiv(R, 128) if square else R,
        triton.cdiv(padded_C, 128),
        *of_s.stride(),
        triton.cdiv(C, 128) if square else C,
        triton.cdiv(padded_R, 128),
        *of_t.stride(),
        of_s.shape[1],
        of_t.shape[1],
        tiles_c,
        MAX=FORMAT_MAX[format_],
        FORMAT=format_,
        POWER_OF_TWO=power_of_two,
        SQUARE=square,
        STRAIGHT=straight.numel() > 0,
        TRANSPOSED=transposed.numel() > 0,
        BR=tile.rows,
        BC=tile.columns,
        num_warps=tile.warps,
    )
