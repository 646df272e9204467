"""A scale for 128 elements along k, of one row (1x128) or of 128 rows (128x128): one read, both orientations.

Blocks of the transposed operand run along R, so a tile of 128 x 128 holds whole blocks of both orientations.
A 128x128 block has one scale in both.
"""

import torch
import triton
from torch import Tensor
from torch.library import triton_op

from loka.kernels.triton.casts.blocks import both_kernel, straight_kernel
from loka.kernels.triton.casts.outputs import (
    FLOAT8,
    FORMAT_MAX,
    Rows,
    empty_like_output,
    padded,
    rows_of,
)
from loka.kernels.triton.casts.tiles import blockwise_tile, both_tile
from loka.kernels.triton.casts.turned import pairs_like
from loka.kernels.triton.launch import is_compiled, launcher

__all__ = ["K_MAJOR", "MN_MAJOR", "MN_MAJOR_PAD4", "cast_blockwise"]

# Layouts by number, as for formats. Scales are [row blocks, k blocks]: contiguous along k, along the rows, or
# along k with the k blocks padded by zeros to a multiple of 4.
K_MAJOR, MN_MAJOR, MN_MAJOR_PAD4 = 0, 1, 2


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
        transposed_pad: The same for R in the transposed output; R' must be even.
        transposed_layout: Of its scales.

    Returns:
        straight [R, C'], its scales, transposed [C, R'], its scales (empty for what was not asked).
    """
    rows = rows_of(x, straight_pad, transposed_pad)
    float8 = FLOAT8[format_]
    straight = empty_like_output(x, (rows.R, rows.columns_out), float8, wanted=straight_pad > 0)
    of_s = _scales(x, rows.R, rows.columns_out, straight_layout, square=square, wanted=straight_pad > 0)
    of_t = _scales(x, rows.C, rows.rows_out, transposed_layout, square=square, wanted=transposed_pad > 0)
    if not transposed_pad:
        _launch_straight(x, rows, straight, of_s, format_, power_of_two, square)
        return straight, of_s, x.new_empty((0,), dtype=float8), of_t
    pairs = pairs_like(x, rows)
    _launch_both(x, rows, (straight, of_s, pairs, of_t), format_, power_of_two, square)
    return straight, of_s, pairs.view(float8), of_t


def _launch_straight(
    x: Tensor, rows: Rows, values: Tensor, scales: Tensor, format_: int, power_of_two: bool, square: bool
) -> None:
    tile = blockwise_tile(rows.R, rows.C, square=square)
    # Scales padded to a multiple of 4 blocks reach past the values: the grid covers both.
    tiles_c = max(triton.cdiv(rows.columns_out, 128), scales.shape[1])
    launcher(straight_kernel)[(triton.cdiv(rows.R, tile.rows) * tiles_c,)](
        x,
        values,
        scales,
        rows.R,
        rows.C,
        rows.stride,
        rows.columns_out,
        scales.shape[0],
        triton.cdiv(rows.columns_out, 128),
        scales.shape[1],
        *scales.stride(),
        tiles_c,
        MAX=FORMAT_MAX[format_],
        FORMAT=format_,
        POWER_OF_TWO=power_of_two,
        SQUARE=square,
        BR=tile.rows,
        BC=tile.columns,
        num_warps=tile.warps,
    )


def _launch_both(
    x: Tensor,
    rows: Rows,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
    format_: int,
    power_of_two: bool,
    square: bool,
) -> None:
    straight, of_s, pairs, of_t = outputs
    tile = both_tile(rows.R, rows.C, square=square, straight=straight.numel() > 0)
    # Scales padded to a multiple of 4 blocks reach past the values: the grid covers both.
    tiles_r = max(triton.cdiv(rows.rows_out, 128), of_t.shape[1])
    tiles_c = max(triton.cdiv(max(rows.C, rows.columns_out), tile.columns), of_s.shape[1])
    whole = rows.R % 128 == 0 and rows.C % 128 == 0
    exact = tiles_r * 128 == rows.R and tiles_c * tile.columns == rows.C
    launcher(both_kernel)[(tiles_r * tiles_c,)](
        x,
        straight,
        of_s,
        pairs,
        of_t,
        rows.R,
        rows.C,
        rows.stride,
        rows.columns_out,
        rows.rows_out,
        of_s.shape[0],
        *of_s.stride(),
        of_t.shape[0],
        *of_t.stride(),
        triton.cdiv(rows.columns_out, 128),
        triton.cdiv(rows.rows_out, 128),
        of_s.shape[1],
        of_t.shape[1],
        tiles_c,
        MAX=FORMAT_MAX[format_],
        FORMAT=format_,
        POWER_OF_TWO=power_of_two,
        SQUARE=square,
        STRAIGHT=straight.numel() > 0,
        WHOLE=whole and exact,
        ALIGNED=rows.rows_out % 16 == 0,
        HARDWARE=is_compiled(both_kernel),
        PIECE=tile.rows,
        BC=tile.columns,
        num_warps=tile.warps,
    )
