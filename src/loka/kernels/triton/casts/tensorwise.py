"""One scale for the whole tensor: a read for the amax, then one read that writes both orientations.

x [R, C] with contiguous columns. Values: straight [R, C padded], transposed [C, R padded].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from loka.kernels.triton.casts.formula import codes_of, decode_scale, finite_or_nan, reciprocal
from loka.kernels.triton.casts.outputs import FLOAT8, FORMAT_MAX, Rows, empty_like_output, rows_of
from loka.kernels.triton.casts.tiles import amax_tile, elementwise_tile
from loka.kernels.triton.casts.turned import GIVEN, OF_PARTIALS, cast_turned, pairs_like
from loka.kernels.triton.launch import launcher

__all__ = ["cast_tensorwise"]

_Words = tuple[int, bool]  # format, power of two
_RUN = 1024  # a tensor without gaps is read in runs of this length, whatever its rows are


@triton.jit
def _amax_kernel(x, partials, R, C, stride, BR: tl.constexpr, BC: tl.constexpr):
    """The largest finite magnitude of every P-th tile, in `partials` [P]."""
    tiles_c = tl.cdiv(C, BC)
    tiles = tl.cdiv(R, BR) * tiles_c
    amax = tl.zeros([BR, BC], dtype=tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = (tile // tiles_c) * BR + tl.arange(0, BR)
        columns = (tile % tiles_c) * BC + tl.arange(0, BC)
        inside = (rows < R)[:, None] & (columns < C)[None, :]
        at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
        wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.abs(finite_or_nan(wide)))
    tl.store(partials + tl.program_id(0), tl.max(amax))


@triton.jit
def _cast_kernel(
    x,
    scales,
    straight,
    scale_out,
    R,
    C,
    stride,
    padded_C,
    P,
    MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    GIVEN_SCALE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Cast one tile as it lies. Every program derives the scale from the partial maxima."""
    # From the end: what the amax read last is still in the L2 cache.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    # Padding of k lies past C; the grid covers it, so that its zeros are written too.
    tiles_c = tl.cdiv(padded_C, BC)
    if GIVEN_SCALE:
        scale = tl.load(scales)
    else:
        index = tl.arange(0, PARTIALS)
        scale = decode_scale(tl.max(tl.load(scales + index, mask=index < P, other=0.0)), MAX, POWER_OF_TWO)
        if tile == 0:
            tl.store(scale_out, scale)
    row = ((tile // tiles_c) * BR + tl.arange(0, BR)).to(tl.int64)
    columns = (tile % tiles_c) * BC + tl.arange(0, BC)
    inside = (row < R)[:, None] & (columns < C)[None, :]
    wide = tl.load(x + row[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    codes = codes_of(wide, finite_or_nan(wide), reciprocal(scale), FORMAT)
    keep = (row < R)[:, None] & (columns < padded_C)[None, :]
    tl.store(straight + row[:, None] * padded_C + columns[None, :], codes, mask=keep)


def _flattened(x: Tensor, rows: Rows) -> Rows:
    """The same memory in rows of 1,024, where it has no gaps and the output none either."""
    if x.is_contiguous() and x.numel() % _RUN == 0 and rows.columns_out == rows.C:
        return Rows(x.numel() // _RUN, _RUN, _RUN, _RUN, x.numel() // _RUN)
    return rows


def _partial_amax(x: Tensor) -> Tensor:
    rows = _flattened(x, rows_of(x, 0, 0))
    tile = amax_tile(rows.R, rows.C)
    programs = min(tile.programs, triton.cdiv(rows.R, tile.rows) * triton.cdiv(rows.C, tile.columns))
    partials = x.new_empty((programs,), dtype=torch.float32)
    launcher(_amax_kernel)[(programs,)](
        x, partials, rows.R, rows.C, rows.stride, BR=tile.rows, BC=tile.columns, num_warps=tile.warps
    )
    return partials


def _cast_straight(
    x: Tensor, rows: Rows, scales: Tensor, straight: Tensor, scale_out: Tensor, *, given: bool, words: _Words
) -> None:
    format_, power_of_two = words
    rows = _flattened(x, rows)
    tile = elementwise_tile(rows.R, rows.C)
    grid = (triton.cdiv(rows.R, tile.rows) * triton.cdiv(rows.columns_out, tile.columns),)
    count = 1 if given else scales.numel()
    launcher(_cast_kernel)[grid](
        x,
        scales,
        straight,
        scale_out,
        rows.R,
        rows.C,
        rows.stride,
        rows.columns_out,
        count,
        MAX=FORMAT_MAX[format_],
        FORMAT=format_,
        POWER_OF_TWO=power_of_two,
        GIVEN_SCALE=given,
        PARTIALS=triton.next_power_of_2(count),
        BR=tile.rows,
        BC=tile.columns,
        num_warps=tile.warps,
    )


@triton_op("loka::cast_tensorwise", mutates_args={})
def cast_tensorwise(
    x: Tensor,
    scale: Tensor | None,
    format_: int,
    power_of_two: bool,
    straight_pad: int,
    transposed_pad: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast x [R, C] with one scale, in either orientation or both.

    Args:
        x: bf16, fp16 or fp32, contiguous along C, not empty.
        scale: A static decode scale, fp32 of shape (); then there is no amax.
        format_: 0 for E4M3, 1 for E5M2.
        power_of_two: Round the scale up to a power of two.
        straight_pad: The multiple to which C is padded in the straight output; 0 for no such output.
        transposed_pad: The same for R in the transposed output; R' must be even.

    Returns:
        straight [R, C'], transposed [C, R'], scale () (empty tensors for what was not asked).
    """
    rows = rows_of(x, straight_pad, transposed_pad)
    float8 = FLOAT8[format_]
    straight = empty_like_output(x, (rows.R, rows.columns_out), float8, wanted=straight_pad > 0)
    given = scale is not None
    scales = _partial_amax(x) if scale is None else scale
    out_scale = x.new_empty((0,) if given else (), dtype=torch.float32)
    if not transposed_pad:
        words = (format_, power_of_two)
        _cast_straight(x, rows, scales, straight, out_scale, given=given, words=words)
        return straight, x.new_empty((0,), dtype=float8), out_scale
    pairs = pairs_like(x, rows)
    cast_turned(
        x,
        rows,
        scales,
        (straight, pairs, out_scale),
        source=GIVEN if given else OF_PARTIALS,
        format_=format_,
        power_of_two=power_of_two,
    )
    return straight, pairs.view(float8), out_scale
