"""What the products' kernels share: which tile a program computes, how a tile ends, how splits are added.

No `from __future__ import annotations` here: Triton reads the annotations of `tl.constexpr`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.errors import UsageError
from loka.kernels.triton.launch import launcher
from loka.kernels.triton.products.tiles import Tiles

__all__ = [
    "ACTIVATIONS",
    "COMPUTE_DTYPES",
    "add_splits",
    "as_compute",
    "check_norm",
    "finished",
    "tile_of_program",
]

# Activations by number: operators of PyTorch's library and constants of Triton take numbers alike.
ACTIVATIONS = {"none": 0, "relu": 1, "hard_swish": 2}

# What `as_compute` turns values into.
COMPUTE_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

_REDUCED = 1024  # elements of the result that one program of the reduction adds up


@triton.jit
def tile_of_program(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column tile of a program: GROUP_M row tiles side by side, then the next columns."""
    in_group = GROUP_M * tiles_n
    group = program // in_group
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    place = program % in_group
    return first + place % height, place // height


@triton.jit
def as_compute(values, COMPUTE: tl.constexpr):
    """Values in the compute dtype: 0 for bf16, 1 for fp16, 2 for fp32."""
    if COMPUTE == 0:
        return values.to(tl.bfloat16)
    elif COMPUTE == 1:
        return values.to(tl.float16)
    else:
        return values.to(tl.float32)


@triton.jit
def finished(
    values,
    bias,
    columns,
    N,
    eps,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The epilogue of a tile, in fp32: bias, BlockNorm over NORM columns (0 for none), activation."""
    if BIAS:
        values += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if NORM > 0:
        blocks = tl.reshape(values, (BLOCK_M, BLOCK_N // NORM, NORM))
        mean_square = tl.sum(blocks * blocks, axis=2) / NORM
        blocks = blocks * (1.0 / tl.sqrt(mean_square + eps))[:, :, None]
        values = tl.reshape(blocks, (BLOCK_M, BLOCK_N))
    if ACTIVATION == 1:
        values = tl.where(values < 0.0, 0.0, values)  # keeps NaN
    elif ACTIVATION == 2:
        values = values * tl.minimum(tl.maximum(values / 6.0 + 0.5, 0.0), 1.0)
    return values


@triton.jit
def _add_splits_kernel(
    partial,
    bias,
    out,
    size,
    N,
    splits,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Elements of the result, each the sum of its splits in one order for every run."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, splits, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        inside = (split < splits)[:, None] & (places < size)[None, :]
        at = split.to(tl.int64)[:, None] * size + places[None, :]
        total += tl.sum(tl.load(partial + at, mask=inside, other=0.0), axis=0)
    columns = (places % N).to(tl.int32)
    total = finished(total[None, :], bias, columns, N, 0.0, BIAS, 0, ACTIVATION, 1, BLOCK)
    total = tl.reshape(total, (BLOCK,))
    tl.store(out + places, total.to(out.dtype.element_ty), mask=places < size)


def add_splits(partial: Tensor, bias: Tensor | None, out: Tensor, *, activation: int = 0) -> None:
    """Add up partial sums [splits, m, n] in fp32 into out [m, n], in a fixed order; then bias, activation.

    Deterministic: no atomics, and the order depends on the number of splits alone.
    """
    splits, m, n = partial.shape
    launcher(_add_splits_kernel)[(triton.cdiv(m * n, _REDUCED),)](
        partial,
        partial if bias is None else bias.contiguous(),
        out,
        m * n,
        n,
        splits,
        BIAS=bias is not None,
        ACTIVATION=activation,
        AT_ONCE=4,
        BLOCK=_REDUCED,
        num_warps=4,
    )


def check_norm(n: int, norm_block: int, tiles: Tiles) -> None:
    """Raise UsageError unless whole blocks of a BlockNorm lie in one tile."""
    if norm_block == 0:
        return
    if norm_block < 0 or norm_block & (norm_block - 1):
        raise UsageError(f"BlockNorm in an epilogue needs a block of a power of two, got {norm_block}")
    if n % norm_block:
        raise UsageError(f"BlockNorm needs N % {norm_block} == 0, got N={n}")
    if tiles.block_n % norm_block:
        raise UsageError(
            f"BlockNorm in an epilogue needs tiles of whole blocks, got {tiles.block_n} columns "
            f"for a block of {norm_block}"
        )
