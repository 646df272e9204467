"""Gradients of the block norm: one read of g and x gives dx and its amax; the forward is computed again."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from loka.kernels.triton.casts.formula import finite_or_nan
from loka.kernels.triton.launch import launcher
from loka.kernels.triton.norms.formula import inverse_rms, place_of, slope_of
from loka.kernels.triton.norms.tiles import cut_of, lying_tile
from loka.vocab import BlockNormSpec

__all__ = ["gradients_of_block_norm"]


@triton.jit
def _kernel(
    g,
    x,
    weight,
    dx,
    dweights,
    partials,
    M,
    N,
    g_stride,
    stride,
    blocks,
    width,
    wider,
    eps,
    AFFINE: tl.constexpr,
    SWISH: tl.constexpr,
    UNEVEN: tl.constexpr,
    EXACT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """BR rows of one block: dx, the largest magnitude of it, and what they add to the weight's gradient."""
    program = tl.program_id(0)
    start, size = place_of(program % blocks, width, wider, UNEVEN)
    tile = program // blocks
    rows = tile * BR + tl.arange(0, BR)
    columns = tl.arange(0, BC)
    row = rows.to(tl.int64)[:, None]
    place = (start + columns)[None, :]
    inside = (rows < M)[:, None] if EXACT else (rows < M)[:, None] & (columns < size)[None, :]
    wide = tl.load(x + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(g + row * g_stride + place, mask=inside, other=0.0).to(tl.float32)
    r = inverse_rms(wide, size, eps)
    h = wide * r
    z = h
    if AFFINE:
        w = tl.load(weight + start + columns, mask=columns < size, other=0.0).to(tl.float32)[None, :]
        z = h * w
    if SWISH:
        p = p * slope_of(z)
    q = p
    if AFFINE:
        q = p * w
        added = tl.sum(tl.where(inside, p * h, 0.0), axis=0)
        tl.store(dweights + tile.to(tl.int64) * N + start + columns, added, mask=columns < size)
    mean = (tl.sum(q * h, axis=1) / size.to(tl.float32))[:, None]
    rounded = (r * (q - h * mean)).to(dx.dtype.element_ty)
    tl.store(dx + row * N + place, rounded, mask=inside)
    magnitude = tl.abs(finite_or_nan(tl.where(inside, rounded.to(tl.float32), 0.0)))
    tl.store(partials + program, tl.maximum(tl.max(tl.max(magnitude, axis=1), axis=0), 0.0))


@triton_op("loka::gradients_of_block_norm", mutates_args={})
def gradients_of_block_norm(
    g: Tensor, x: Tensor, weight: Tensor | None, block: int, eps: float, swish: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients at x [M, N] of what `normalize_blocks` gives.

    Args:
        g: Gradient of the output [M, N], contiguous along N.
        x: The input, contiguous along N, not empty: bf16, fp16 or fp32.
        weight: [N] or None.
        block: Features of a block at most.
        eps: Added to the mean square.
        swish: Hard swish behind it.

    Returns:
        dx [M, N] in x's dtype; the weight's gradient fp32 [N], empty without a weight; the largest finite
        magnitude of dx as rounded, fp32 ().
    """
    cut = cut_of(x, BlockNormSpec(block, eps, swish))
    rows, warps = lying_tile(cut.columns)
    tiles = triton.cdiv(cut.M, rows)
    dx = x.new_empty((cut.M, cut.N))
    dweights = x.new_empty((0 if weight is None else tiles, cut.N), dtype=torch.float32)
    partials = x.new_empty((tiles * cut.blocks,), dtype=torch.float32)
    launcher(_kernel)[(tiles * cut.blocks,)](
        g,
        x,
        x if weight is None else weight,
        dx,
        dweights,
        partials,
        cut.M,
        cut.N,
        g.stride(0) if cut.M > 1 else cut.N,
        cut.stride,
        cut.blocks,
        cut.width,
        cut.wider,
        eps,
        AFFINE=weight is not None,
        SWISH=swish,
        UNEVEN=cut.wider > 0,
        EXACT=cut.exact,
        BR=rows,
        BC=cut.columns,
        num_warps=warps,
    )
    dweight = dweights.sum(dim=0) if weight is not None else dweights.new_empty((0,))
    return dx, dweight, partials.amax()
