"""FP8 products D_mn = A_mk @ B_nk.T with scales after the sum.

    tensorwise, rowwise   d = (qa @ qb.T) * s_a[m] * s_b[n]

Exact accumulation: Hopper's FP8 units add in about 14 bits, so every 128 elements of k are added up there and
their sum is added to an fp32 total. Fast accumulation leaves the total in the unit.
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

__all__ = ["launch_scaled", "scaled_product"]


@triton.jit(do_not_specialize=["M", "eps"])
def _scaled_kernel(
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
    eps,
    VECTOR_A: tl.constexpr,
    VECTOR_B: tl.constexpr,
    FAST: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile, over one chunk of k; a split's tile goes to its own plane of the workspace, unfinished."""
    tile_m, tile_n = tile_of_program(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read row 0: cheaper than a mask in the loop, and they are never stored.
    row = tl.where(rows < M, rows, 0).to(tl.int64)
    column = tl.where(columns < N, columns, 0).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    start = tl.program_id(1) * chunk
    stop = tl.minimum(start + chunk, K)
    at_a = a + row[:, None] * stride_a + (start + inner)[None, :]
    at_b = b + column[:, None] * stride_b + (start + inner)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(start, stop, BLOCK_K):
        if EVEN_K:
            x, y = tl.load(at_a), tl.load(at_b)
        else:
            inside = (inner < K - k)[None, :]
            x, y = tl.load(at_a, mask=inside, other=0.0), tl.load(at_b, mask=inside, other=0.0)
        if FAST:
            total = tl.dot(x, y.T, total)
        else:
            total += tl.dot(x, y.T)
        at_a += BLOCK_K
        at_b += BLOCK_K
    if VECTOR_A:
        total *= tl.load(scale_a + row)[:, None]
    else:
        total *= tl.load(scale_a)
    if VECTOR_B:
        total *= tl.load(scale_b + column)[None, :]
    else:
        total *= tl.load(scale_b)
    to = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    if SPLIT:
        to += tl.program_id(1).to(tl.int64) * M * N
    else:
        total = finished(total, bias, columns, N, eps, BIAS, NORM, ACTIVATION, BLOCK_M, BLOCK_N)
    tl.store(to, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def launch_scaled(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    tiles: Tiles,
    fast: bool = False,
    activation: int = 0,
    norm_block: int = 0,
    eps: float = 0.0,
) -> Tensor:
    """The product with scales after the sum, cut as `tiles` says; see `scaled_product`.

    Raises:
        UsageError: for a BlockNorm that the tiles do not hold.
    """
    m, n, k, tiles = prepared(a, b, tiles, norm_block)
    out = a.new_empty((m, n), dtype=out_dtype)
    if m == 0 or n == 0:
        return out
    partial = workspace_for(out, tiles)
    launcher(_scaled_kernel)[(tiles.tiles(m, n), tiles.splits)](
        a,
        b,
        scale_a.contiguous(),
        scale_b.contiguous(),
        a if bias is None else bias.contiguous(),
        partial,
        m,
        n,
        k,
        tiles.chunk_k(k),
        a.stride(0),
        b.stride(0),
        eps,
        VECTOR_A=scale_a.dim() == 1,
        VECTOR_B=scale_b.dim() == 1,
        FAST=fast,
        EVEN_K=bool(k % tiles.block_k == 0),
        SPLIT=tiles.splits > 1,
        BIAS=bias is not None,
        NORM=norm_block,
        ACTIVATION=activation,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP_M=tiles.group_m,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if tiles.splits > 1:
        add_splits(partial, bias, out, activation=activation)
    return out


@triton_op("loka::scaled_product", mutates_args={})
def scaled_product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
    activation: int,
    norm_block: int,
    eps: float,
) -> Tensor:
    """D [m, n] = (a @ b.T) * scale_a * scale_b, then bias, BlockNorm and activation, all in fp32.

    Args:
        a: [m, k] E4M3 or E5M2, contiguous along k; rows of a multiple of 16 bytes are read fastest.
        b: [n, k], the same.
        scale_a: fp32 () or [m].
        scale_b: fp32 () or [n].
        bias: [n] of any float dtype, or None.
        out_dtype: bf16, fp16 or fp32.
        fast: Leave the sum in the FP8 unit.
        activation: A value of `ACTIVATIONS`.
        norm_block: Columns of a BlockNorm, a power of two; 0 for none.
        eps: Added to BlockNorm's mean square.
    """
    problem = problem_of(a, b)
    tiles = tiles_for(problem, "fast" if fast else "exact", shared_bytes=shared_bytes_of(a.device))
    return launch_scaled(
        a,
        b,
        scale_a,
        scale_b,
        bias,
        out_dtype=out_dtype,
        tiles=tiles,
        fast=fast,
        activation=activation,
        norm_block=norm_block,
        eps=eps,
    )
