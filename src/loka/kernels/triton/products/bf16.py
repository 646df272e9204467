"""D_mn = A_mk @ B_nk.T in bf16 (or fp16, fp32) from any strides: nothing is transposed or cast beforehand.

The three passes of a linear layer are views of its tensors, so that x, w and g are read where they lie:

    fwd    A = x [M, K],    B = w [N, K]
    dgrad  A = g [M, N],    B = w.T [K, N]
    wgrad  A = g.T [N, M],  B = x.T [K, M]        k = M rows, split over programs
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from loka.errors import UsageError
from loka.kernels.triton.launch import launcher
from loka.kernels.triton.products.blocks import (
    COMPUTE_DTYPES,
    add_splits,
    as_compute,
    check_norm,
    finished,
    tile_of_program,
)
from loka.kernels.triton.products.shared_memory import shared_bytes_of
from loka.kernels.triton.products.tiles import Tiles, tiles_for
from loka.vocab import Format, GemmProblem

__all__ = ["launch_plain", "plain_product"]


@triton.jit(do_not_specialize=["M", "eps"])
def _plain_kernel(
    a,
    b,
    bias,
    out,
    M,
    N,
    K,
    chunk,
    stride_a_row,
    stride_a_k,
    stride_b_row,
    stride_b_k,
    eps,
    COMPUTE: tl.constexpr,
    A_BY_ROWS: tl.constexpr,
    B_BY_ROWS: tl.constexpr,
    M_EIGHT: tl.constexpr,
    N_EIGHT: tl.constexpr,
    K_EIGHT: tl.constexpr,
    A_EIGHT: tl.constexpr,
    B_EIGHT: tl.constexpr,
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
    """One tile, over one chunk of k; a split's tile goes to its own plane of the workspace, unfinished.

    A_BY_ROWS, B_BY_ROWS: rows, not k, are contiguous in memory. M_EIGHT and the like: a multiple of 8, which
    is 16 bytes of bf16, the widest load. Triton itself looks for multiples of 16, and a hint on an argument
    has no effect: what it sees is `x // 8 * 8`.
    """
    bound_m = M // 8 * 8 if M_EIGHT else M
    bound_n = N // 8 * 8 if N_EIGHT else N
    bound_k = K // 8 * 8 if K_EIGHT else K
    tile_m, tile_n = tile_of_program(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1).to(tl.int64) * chunk
    stop = tl.minimum(start + chunk, bound_k)
    inner = start + tl.arange(0, BLOCK_K)
    # Along k, rows past the end read the last row, without a mask; they are never stored. Along rows, that
    # would break up a contiguous run, so there they are masked.
    if A_BY_ROWS:
        step_a = stride_a_k // 8 * 8 if A_EIGHT else stride_a_k
        at_a = a + rows[:, None] + inner[None, :] * step_a
    else:
        step_a = stride_a_k
        row_a = stride_a_row // 8 * 8 if A_EIGHT else stride_a_row
        at_a = a + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * row_a + inner[None, :] * step_a
    if B_BY_ROWS:
        step_b = stride_b_k // 8 * 8 if B_EIGHT else stride_b_k
        at_b = b + columns[None, :] + inner[:, None] * step_b
    else:
        step_b = stride_b_k
        row_b = stride_b_row // 8 * 8 if B_EIGHT else stride_b_row
        at_b = b + tl.minimum(columns, N - 1).to(tl.int64)[None, :] * row_b + inner[:, None] * step_b
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, (stop - start).to(tl.int32), BLOCK_K):
        if EVEN_K:
            x = tl.load(at_a, mask=(rows < bound_m)[:, None], other=0.0) if A_BY_ROWS else tl.load(at_a)
            y = tl.load(at_b, mask=(columns < bound_n)[None, :], other=0.0) if B_BY_ROWS else tl.load(at_b)
        else:
            inside = inner + k < stop
            keep_a, keep_b = inside[None, :], inside[:, None]
            if A_BY_ROWS:
                keep_a = keep_a & (rows < bound_m)[:, None]
            if B_BY_ROWS:
                keep_b = keep_b & (columns < bound_n)[None, :]
            x = tl.load(at_a, mask=keep_a, other=0.0)
            y = tl.load(at_b, mask=keep_b, other=0.0)
        total = tl.dot(as_compute(x, COMPUTE), as_compute(y, COMPUTE), total, input_precision="ieee")
        at_a += BLOCK_K * step_a
        at_b += BLOCK_K * step_b
    to = out + rows.to(tl.int64)[:, None] * bound_n + columns[None, :]
    if SPLIT:
        to += tl.program_id(1).to(tl.int64) * M * bound_n
    else:
        total = finished(total, bias, columns, N, eps, BIAS, NORM, ACTIVATION, BLOCK_M, BLOCK_N)
    tl.store(to, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < bound_n)[None, :])


def launch_plain(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    tiles: Tiles,
    activation: int = 0,
    norm_block: int = 0,
    eps: float = 0.0,
) -> Tensor:
    """The product cut as `tiles` says; see `plain_product`.

    Raises:
        UsageError: for operands that disagree in k, a compute dtype that is none, or a BlockNorm that the
            tiles do not hold.
    """
    (m, k), n = a.shape, b.shape[0]
    if b.shape[1] != k:
        raise UsageError(f"the operands disagree in k: A holds {k}, B holds {b.shape[1]}")
    if compute_dtype not in COMPUTE_DTYPES:
        raise UsageError(f"a product computes in bf16, fp16 or fp32, not in {compute_dtype}")
    tiles = tiles.for_norm(norm_block)
    check_norm(n, norm_block, tiles)
    out = a.new_empty((m, n), dtype=out_dtype)
    if m == 0 or n == 0:
        return out
    partial = out if tiles.splits == 1 else a.new_empty((tiles.splits, m, n), dtype=torch.float32)
    # A comparison of symbolic sizes is turned into a bool, and so guarded, since it is part of the kernel.
    a_by_rows = bool(a.stride(0) == 1 and a.stride(1) != 1)
    b_by_rows = bool(b.stride(0) == 1 and b.stride(1) != 1)
    launcher(_plain_kernel)[(tiles.tiles(m, n), tiles.splits)](
        a,
        b,
        a if bias is None else bias.contiguous(),
        partial,
        m,
        n,
        k,
        tiles.chunk_k(k),
        a.stride(0),
        a.stride(1),
        b.stride(0),
        b.stride(1),
        eps,
        COMPUTE=COMPUTE_DTYPES[compute_dtype],
        A_BY_ROWS=a_by_rows,
        B_BY_ROWS=b_by_rows,
        M_EIGHT=bool(a_by_rows and m % 8 == 0),
        N_EIGHT=bool(n % 8 == 0),
        K_EIGHT=bool(k % 8 == 0 and not (a_by_rows and b_by_rows)),
        A_EIGHT=bool(a.stride(1 if a_by_rows else 0) % 8 == 0),
        B_EIGHT=bool(b.stride(1 if b_by_rows else 0) % 8 == 0),
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


@triton_op("loka::plain_product", mutates_args={})
def plain_product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    activation: int,
    norm_block: int,
    eps: float,
) -> Tensor:
    """D [m, n] = a @ b.T with fp32 sums, then bias, BlockNorm and activation in fp32; deterministic.

    Args:
        a: [m, k] bf16, fp16 or fp32, any stride; converted to the compute dtype as it is read.
        b: [n, k], the same.
        bias: [n] of any float dtype, or None.
        out_dtype: bf16, fp16 or fp32.
        compute_dtype: What is multiplied: bf16, fp16, or fp32 (in full precision, without TF32).
        activation: A value of `ACTIVATIONS`.
        norm_block: Columns of a BlockNorm, a power of two; 0 for none.
        eps: Added to BlockNorm's mean square.
    """
    (m, k), n = a.shape, b.shape[0]
    problem = GemmProblem(m, n, k, a_format=Format.BF16, b_format=Format.BF16)
    element_bytes = max(a.element_size(), b.element_size(), compute_dtype.itemsize)
    tiles = tiles_for(problem, "bf16", element_bytes=element_bytes, shared_bytes=shared_bytes_of(a.device))
    return launch_plain(
        a,
        b,
        bias,
        out_dtype=out_dtype,
        compute_dtype=compute_dtype,
        tiles=tiles,
        activation=activation,
        norm_block=norm_block,
        eps=eps,
    )
