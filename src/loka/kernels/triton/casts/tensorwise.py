"""One scale for the whole tensor: a read for the amax, then one read that writes both orientations.

x [R, C] with contiguous columns. Values: straight [R, C padded], transposed [C, R padded].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from loka.kernels.triton.casts.formula import codes_of, decode_scale, finite_or_nan, reciprocal
from loka.kernels.triton.casts.outputs import FLOAT8, FORMAT_MAX, empty_like_output, padded
from loka.kernels.triton.casts.tiles import amax_tile, elementwise_tile, transposing_tile
from loka.kernels.triton.launch import launcher

__all__ = ["cast_tensorwise"]

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
    partials,
    given,
    straight,
    transposed,
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
    GIVEN: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PARTIALS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Cast one tile. Every program derives the scale from the partial maxima: no host, no third launch."""
    # From the end: what the amax read last is still in the L2 cache.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    # Padding of k lies past R or C; the grid covers it, so that its zeros are written too.
    tiles_c = tl.cdiv(padded_C, BC)
    if GIVEN:
        scale = tl.load(given)
    else:
        index = tl.arange(0, PARTIALS)
        amax = tl.max(tl.load(partials + index, mask=index < P, other=0.0))
        scale = decode_scale(amax, MAX, POWER_OF_TWO)
        if tile == 0:
            tl.store(scale_out, scale)
    r = reciprocal(scale)
    rows = (tile // tiles_c) * BR + tl.arange(0, BR)
    columns = (tile % tiles_c) * BC + tl.arange(0, BC)
    row, column = rows.to(tl.int64), columns.to(tl.int64)
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    wide = tl.load(x + row[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    codes = codes_of(wide, finite_or_nan(wide), r, FORMAT)
    if STRAIGHT:
        keep = (rows < R)[:, None] & (columns < padded_C)[None, :]
        tl.store(straight + row[:, None] * padded_C + columns[None, :], codes, mask=keep)
    if TRANSPOSED:
        keep = (columns < C)[:, None] & (rows < padded_R)[None, :]
        tl.store(transposed + column[:, None] * padded_R + rows[None, :], tl.trans(codes), mask=keep)


def _flattened(x: Tensor) -> tuple[int, int, int]:
    """(rows, columns, row stride) of the same memory in rows of 1,024, where it has no gaps."""
    if x.is_contiguous() and x.numel() % _RUN == 0:
        return x.numel() // _RUN, _RUN, _RUN
    return x.shape[0], x.shape[1], x.stride(0)


def _partial_amax(x: Tensor) -> Tensor:
    R, C, stride = _flattened(x)
    tile = amax_tile(R, C)
    programs = min(tile.programs, triton.cdiv(R, tile.rows) * triton.cdiv(C, tile.columns))
    partials = x.new_empty((programs,), dtype=torch.float32)
    launcher(_amax_kernel)[(programs,)](
        x, partials, R, C, stride, BR=tile.rows, BC=tile.columns, num_warps=tile.warps
    )
    return partials


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
        transposed_pad: The same for R in the transposed output.

    Returns:
        straight [R, C'], transposed [C, R'], scale () (empty tensors for what was not asked).
    """
    R, C = x.shape
    float8 = FLOAT8[format_]
    padded_C, padded_R = padded(C, straight_pad), padded(R, transposed_pad)
    straight = empty_like_output(x, (R, padded_C), float8, wanted=straight_pad > 0)
    transposed = empty_like_output(x, (C, padded_R), float8, wanted=transposed_pad > 0)
    partials = x
    programs = 1
    if scale is None:
        out_scale = x.new_empty((), dtype=torch.float32)
        partials = _partial_amax(x)
        programs = partials.shape[0]
    else:
        out_scale = x.new_empty((0,), dtype=torch.float32)
    stride = x.stride(0)
    if not transposed_pad and padded_C == C:
        R, C, stride = _flattened(x)
        padded_R, padded_C = R, C
    tile = transposing_tile(R, C, x.element_size()) if transposed_pad else elementwise_tile(R, C)
    grid = (triton.cdiv(padded_R, tile.rows) * triton.cdiv(padded_C, tile.columns),)
    launcher(_cast_kernel)[grid](
        x,
        partials,
        x if scale is None else scale,
        straight,
        transposed,
        out_scale,
        R,
        C,
        stride,
        padded_C,
        padded_R,
        programs,
        MAX=FORMAT_MAX[format_],
        FORMAT=format_,
        POWER_OF_TWO=power_of_two,
        GIVEN=scale is not None,
        STRAIGHT=straight_pad > 0,
        TRANSPOSED=transposed_pad > 0,
        PARTIALS=triton.next_power_of_2(programs),
        BR=tile.rows,
        BC=tile.columns,
        num_warps=tile.warps,
    )
    return straight, transposed, out_scale
