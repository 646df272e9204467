"""FP8 products D_mn = A_mk @ B_nk.T with scales inside the sum.

    blockwise   d = sum over blocks of 128 of k: (qa @ qb.T) * s_a[m, block] * s_b[n, block]

Each block is added up in Hopper's FP8 units, scaled, and added to an fp32 total: exact by construction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from loka.kernels.triton.launch import launcher
from loka.kernels.triton.products.blocks import add_splits, finished, tile_of_program
from loka.kernels.triton.products.operands import prepared, problem_of, workspace_for
from loka.kernels.triton.products.shared_memory import shared_bytes_of
from loka.kernels.triton.products.tiles import Tiles, tiles_for

__all__ = ["blockwise_product", "launch_blockwise"]


@triton.jit(do_not_specialize=["M", "eps"])
def _blockwise_kernel(
    a,
    b,
    scale_a,
    scale_b,
    bias,
    out,
    M,
    N,
    K,
    chunk,
    stride_a,
    stride_b,
    stride_scale_a,
    stride_scale_a_block,
    stride_scale_b,
    stride_scale_b_block,
    eps,
    SQUARE_B: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile; each step of k is one block of scales. SQUARE_B: one scale of B for 128 x 128."""
    tile_m, tile_n = tile_of_program(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(rows < M, rows, 0).to(tl.int64)
    column = tl.where(columns < N, columns, 0).to(tl.int64)
    inner = tl.arange(0, 128)
    start = tl.program_id(1) * chunk
    stop = tl.minimum(start + chunk, K)
    at_a = a + row[:, None] * stride_a + (start + inner)[None, :]
    at_b = b + column[:, None] * stride_b + (start + inner)[None, :]
    at_scale_a = scale_a + row * stride_scale_a + (start // 128) * stride_scale_a_block
    if SQUARE_B:
        # A tile of at most 128 columns lies in one row of blocks.
        at_scale_b = scale_b + (tile_n * BLOCK_N // 128) * stride_scale_b
    else:
        at_scale_b = scale_b + column * stride_scale_b
    at_scale_b += (start // 128) * stride_scale_b_block
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(start, stop, 128):
        if EVEN_K:
            x, y = tl.load(at_a), tl.load(at_b)
        else:
            inside = (inner < K - k)[None, :]
            x, y = tl.load(at_a, mask=inside, other=0.0), tl.load(at_b, mask=inside, other=0.0)
        step = tl.dot(x, y.T)
        if SQUARE_B:
            total += step * (tl.load(at_scale_a) * tl.load(at_scale_b))[:, None]
        else:
            total += step * tl.load(at_scale_a)[:, None] * tl.load(at_scale_b)[None, :]
        at_a += 128
        at_b += 128
        at_scale_a += stride_scale_a_block
        at_scale_b += stride_scale_b_block
    to = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    if SPLIT:
        to += tl.program_id(1).to(tl.int64) * M * N
    else:
        total = finished(total, bias, columns, N, eps, BIAS, NORM, ACTIVATION, BLOCK_M, BLOCK_N)
    tl.store(to, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def launch_blockwise(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    tiles: Tiles,
    square_b: bool,
    activation: int = 0,
    norm_block: int = 0,
    eps: float = 0.0,
) -> Tensor:
    """The product with scales inside the sum, cut as `tiles` says; see `blockwise_product`.

    Raises:
        UsageError: for a BlockNorm that the tiles do not hold.
    """
    m, n, k, tiles = prepared(a, b, tiles, norm_block)
    out = a.new_empty((m, n), dtype=out_dtype)
    if m == 0 or n == 0:
        return out
    partial = workspace_for(out, tiles)
    launcher(_blockwise_kernel)[(tiles.tiles(m, n), tiles.splits)](
        a,
        b,
        scale_a,
        scale_b,
        a if bias is None else bias.contiguous(),
        partial,
        m,
        n,
        k,
        tiles.chunk_k(k),
        a.stride(0),
        b.stride(0),
        scale_a.stride(0),
        scale_a.stride(1),
        scale_b.stride(0),
        scale_b.stride(1),
        eps,
        SQUARE_B=square_b,
        EVEN_K=bool(k % 128 == 0),
        SPLIT=tiles.splits > 1,
        BIAS=bias is not None,
        NORM=norm_block,
        ACTIVATION=activation,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        GROUP_M=tiles.group_m,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if tiles.splits > 1:
        add_splits(partial, bias, out, activation=activation)
    return out


@triton_op("loka::blockwise_product", mutates_args={})
def blockwise_product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    square_b: bool,
    activation: int,
    norm_block: int,
    eps: float,
) -> Tensor:
    """D [m, n] of operands with a scale for every 128 elements of k, then as `scaled_product`.

    Args:
        a: [m, k] E4M3 or E5M2, contiguous along k.
        b: [n, k], the same.
        scale_a: fp32 [m, ceil(k / 128)], any stride.
        scale_b: fp32 [n, ceil(k / 128)], or [ceil(n / 128), ceil(k / 128)] with `square_b`; any stride.
        bias: [n] of any float dtype, or None.
        out_dtype: bf16, fp16 or fp32.
        square_b: Whether a scale of B stands for 128 x 128 elements.
        activation: A value of `ACTIVATIONS`.
        norm_block: Columns of a BlockNorm, at most 128 here; 0 for none.
        eps: Added to BlockNorm's mean square.
    """
    tiles = tiles_for(problem_of(a, b), "blockwise", shared_bytes=shared_bytes_of(a.device))
    return launch_blockwise(
        a,
        b,
        scale_a,
        scale_b,
        bias,
        out_dtype=out_dtype,
        tiles=tiles,
        square_b=square_b,
        activation=activation,
        norm_block=norm_block,
        eps=eps,
    )
