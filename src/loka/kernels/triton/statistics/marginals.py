"""The host's side of the histograms of every feature."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from loka.kernels.triton.statistics.feature_bins import (
    ROWS_A_WORD,
    bins_kernel,
    extents_kernel,
    unpack_kernel,
)
from loka.kernels.triton.statistics.host import judged_rows
from loka.numerics import FINE_BINS, MARGINAL_BINS, Marginals

__all__ = ["column_marginals"]

_ROWS, _COLUMNS = 32, 64  # of a tile, of which 8 warps hold 8 elements a thread
_UNPACKED = 1024


def column_marginals(x: Tensor) -> Marginals:
    """`Marginals.of(x)` of x [S, F] in bf16, fp16 or fp32, not empty.

    Counts, bounds, origins and digits are equal; positions are, but where plain torch rounds a quotient.
    Five launches; no host synchronisation.
    """
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    with torch.cuda.device_of(x):
        return _column_marginals(x)


def _column_marginals(x: Tensor) -> Marginals:
    S, F = x.shape
    good_rows, _ = judged_rows(x)
    low, high = x.new_empty((2, F), dtype=torch.float32)
    origin, k, digits = x.new_empty((3, F), dtype=torch.int32)
    blocks = triton.cdiv(F, _COLUMNS)
    extents_kernel[(blocks,)](
        x, good_rows, low, high, origin, k, digits, S, F, x.stride(0), BR=_ROWS, BC=_COLUMNS, num_warps=8
    )
    parts = triton.cdiv(S, ROWS_A_WORD)
    halves = x.new_zeros((parts, F, MARGINAL_BINS), dtype=torch.int64)
    evens = x.new_zeros((parts, F, FINE_BINS), dtype=torch.int64)
    for part in range(parts):
        first = part * ROWS_A_WORD
        end = min(S, first + ROWS_A_WORD)
        bins_kernel[(triton.cdiv(end - first, _ROWS), blocks)](
            x,
            good_rows,
            low,
            origin,
            k,
            halves[part],
            evens[part],
            end,
            F,
            x.stride(0),
            first,
            BR=_ROWS,
            BC=_COLUMNS,
            num_warps=8,
        )
    counts, inside, squares = _unpacked(halves)
    fine_counts, fine_inside, fine_squares = _unpacked(evens)
    return Marginals(
        counts=counts,
        inside=inside,
        inside_squares=squares,
        origin=origin,
        low=low,
        high=high,
        fine_counts=fine_counts,
        fine_inside=fine_inside,
        fine_squares=fine_squares,
        digits=digits,
    )


def _unpacked(words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts, F, bins = words.shape
    counts = words.new_empty((F, bins), dtype=torch.int32)
    inside, squares = words.new_empty((2, F, bins), dtype=torch.float32)
    unpack_kernel[(triton.cdiv(F * bins, _UNPACKED),)](
        words, counts, inside, squares, F * bins, parts, BLOCK=_UNPACKED, num_warps=4
    )
    return counts, inside, squares
