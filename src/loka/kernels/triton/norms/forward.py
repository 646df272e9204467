"""x [M, N] normalized over blocks, with hard swish where asked: one read, one write."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from loka.kernels.triton.launch import launcher
from loka.kernels.triton.norms.formula import activated, inverse_rms, place_of
from loka.kernels.triton.norms.gradients import gradients_of_block_norm
from loka.kernels.triton.norms.tiles import cut_of, lying_tile
from loka.vocab import BlockNormSpec

__all__ = ["normalize_blocks"]


@triton.jit
def _kernel(
    x,
    weight,
    y,
    M,
    N,
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
    """BR rows of one block."""
    program = tl.program_id(0)
    start, size = place_of(program % blocks, width, wider, UNEVEN)
    rows = (program // blocks) * BR + tl.arange(0, BR)
    columns = tl.arange(0, BC)
    row = rows.to(tl.int64)[:, None]
    inside = (rows < M)[:, None] if EXACT else (rows < M)[:, None] & (columns < size)[None, :]
    wide = tl.load(x + row * stride + (start + columns)[None, :], mask=inside, other=0.0).to(tl.float32)
    z = wide * inverse_rms(wide, size, eps)
    if AFFINE:
        w = tl.load(weight + start + columns, mask=columns < size, other=0.0).to(tl.float32)
        z = z * w[None, :]
    out = activated(z, SWISH)
    tl.store(y + row * N + (start + columns)[None, :], out.to(y.dtype.element_ty), mask=inside)


@triton_op("loka::normalize_blocks", mutates_args={})
def normalize_blocks(
    x: Tensor, weight: Tensor | None, block: int, eps: float, swish: bool, wide: bool
) -> Tensor:
    """Normalize x [M, N], contiguous along N, not empty.

    Args:
        x: bf16, fp16 or fp32.
        weight: [N] or None.
        block: Features of a block at most.
        eps: Added to the mean square.
        swish: Hard swish behind it.
        wide: Give fp32, not rounded to x's dtype.

    Returns:
        [M, N], contiguous.
    """
    cut = cut_of(x, BlockNormSpec(block, eps, swish))
    y = x.new_empty((cut.M, cut.N), dtype=torch.float32 if wide else x.dtype)
    rows, warps = lying_tile(cut.columns)
    launcher(_kernel)[(triton.cdiv(cut.M, rows) * cut.blocks,)](
        x,
        x if weight is None else weight,
        y,
        cut.M,
        cut.N,
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
    return y


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.block, ctx.eps, ctx.swish, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    g = g if g.stride(-1) == 1 or g.shape[-1] == 1 else g.contiguous()
    dx, dweight, _ = gradients_of_block_norm(g, x, weight, ctx.block, ctx.eps, ctx.swish)
    dweight = None if weight is None else dweight.to(weight.dtype)
    return dx, dweight, None, None, None, None


normalize_blocks.register_autograd(_backward, setup_context=_keep)
