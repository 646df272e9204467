"""The host's side of an FP8 product: its sizes, its tiles and its workspace."""

from __future__ import annotations

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.kernels.triton.products.blocks import check_norm
from loka.kernels.triton.products.tiles import Tiles
from loka.numerics.dtypes import format_of
from loka.vocab import GemmProblem

__all__ = ["prepared", "problem_of", "workspace_for"]


def problem_of(a: Tensor, b: Tensor) -> GemmProblem:
    """The problem of operands a [m, k] and b [n, k]."""
    m, k = a.shape
    return GemmProblem(m, b.shape[0], k, a_format=format_of(a.dtype), b_format=format_of(b.dtype))


def prepared(a: Tensor, b: Tensor, tiles: Tiles, norm_block: int) -> tuple[int, int, int, Tiles]:
    """m, n, k and the tiles; a normalized tile is whole blocks wide and is not split.

    Raises:
        UsageError: for operands that disagree in k or are not contiguous along it, or for a BlockNorm that no
            tile holds.
    """
    (m, k), n = a.shape, b.shape[0]
    if b.shape[1] != k:
        raise UsageError(f"the operands disagree in k: A holds {k}, B holds {b.shape[1]}")
    if k > 1 and (a.stride(1) != 1 or b.stride(1) != 1):
        raise UsageError(
            f"an FP8 product reads operands contiguous along k, got strides {a.stride()} and {b.stride()}"
        )
    tiles = tiles.for_norm(norm_block)
    check_norm(n, norm_block, tiles)
    return m, n, k, tiles


def workspace_for(out: Tensor, tiles: Tiles) -> Tensor:
    """Where tiles are stored: the result itself, or a plane of fp32 for each split."""
    if tiles.splits == 1:
        return out
    return out.new_empty((tiles.splits, *out.shape), dtype=torch.float32)
