"""From x to FP8 with a scale for each row: blocks are normalized twice, the second time from the cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from loka.kernels.triton.casts.formula import codes_of, decode_scale, finite_or_nan, reciprocal
from loka.kernels.triton.casts.outputs import FLOAT8, FORMAT_MAX, padded
from loka.kernels.triton.launch import launcher
from loka.kernels.triton.norms.formula import activated, inverse_rms, place_of
from loka.kernels.triton.norms.tiles import cut_of, lying_tile
from loka.vocab import BlockNormSpec

__all__ = ["normalize_to_float8_rows"]


@triton.jit
def _kernel(
    x,
    weight,
    values,
    scales,
    M,
    stride,
    padded_N,
    blocks,
    width,
    wider,
    eps,
    MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    AFFINE: tl.constexpr,
    SWISH: tl.constexpr,
    UNEVEN: tl.constexpr,
    EXACT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """BR whole rows, a block after the other."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    columns = tl.arange(0, BC)
    row = rows.to(tl.int64)[:, None]
    largest = tl.zeros([BR], dtype=tl.float32)
    scale, r = largest, largest[:, None]
    for turn in range(2 * blocks):
        block = turn % blocks
        start, size = place_of(block, width, wider, UNEVEN)
        inside = (rows < M)[:, None] if EXACT else (rows < M)[:, None] & (columns < size)[None, :]
        place = (start + columns)[None, :]
        wide = tl.load(x + row * stride + place, mask=inside, other=0.0).to(tl.float32)
        z = wide * inverse_rms(wide, size, eps)
        if AFFINE:
            z *= tl.load(weight + start + columns, mask=columns < size, other=0.0).to(tl.float32)[None, :]
        out = activated(z, SWISH)
        clean = finite_or_nan(out)
        if turn < blocks:
            largest = tl.maximum(largest, tl.max(tl.abs(clean), axis=1))
            if turn == blocks - 1:
                scale = decode_scale(largest, MAX, POWER_OF_TWO)
                r = reciprocal(scale)[:, None]
        else:
            tl.store(values + row * padded_N + place, codes_of(out, clean, r, FORMAT), mask=inside)
    tl.store(scales + rows, scale, mask=rows < M)


@triton_op("loka::normalize_to_float8_rows", mutates_args={})
def normalize_to_float8_rows(
    x: Tensor,
    weight: Tensor | None,
    block: int,
    eps: float,
    swish: bool,
    format_: int,
    power_of_two: bool,
    pad: int,
) -> tuple[Tensor, Tensor]:
    """Normalize x [M, N] and cast it with a scale for each row.

    Args:
        x: bf16, fp16 or fp32, contiguous along N, not empty.
        weight: [N] or None.
        block: Features of a block at most.
        eps: Added to the mean square.
        swish: Hard swish behind it.
        format_: 0 for E4M3, 1 for E5M2.
        power_of_two: Round scales up to powers of two.
        pad: The multiple to which N is padded with zeros.

    Returns:
        values [M, N'], scales [M].
    """
    cut = cut_of(x, BlockNormSpec(block, eps, swish))
    wide = padded(cut.N, pad)
    make = x.new_zeros if wide > cut.N else x.new_empty
    values = make((cut.M, wide), dtype=torch.uint8).view(FLOAT8[format_])
    scales = x.new_empty((cut.M,), dtype=torch.float32)
    rows, warps = lying_tile(cut.columns)
    launcher(_kernel)[(triton.cdiv(cut.M, rows),)](
        x,
        x if weight is None else weight,
        values,
        scales,
        cut.M,
        cut.stride,
        wide,
        cut.blocks,
        cut.width,
        cut.wider,
        eps,
        MAX=FORMAT_MAX[format_],
        FORMAT=format_,
        POWER_OF_TWO=power_of_two,
        AFFINE=weight is not None,
        SWISH=swish,
        UNEVEN=cut.wider > 0,
        EXACT=cut.exact,
        BR=rows,
        BC=cut.columns,
        num_warps=warps,
    )
    return values, scales
