"""The host's side of the statistics: how a tensor is cut up, and what is launched.

Launched as plain kernels, not as operators: hooks call them, and hooks do not run inside compiled code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from loka.kernels.triton.statistics.columns import columns_kernel
from loka.kernels.triton.statistics.merging import COUNTERS, pair_kernel, partials_kernel
from loka.kernels.triton.statistics.rows import rows_kernel
from loka.numerics import HISTOGRAM_BINS, Moments

__all__ = [
    "HISTOGRAM_ALL",
    "HISTOGRAM_EVERY",
    "Cut",
    "column_moments",
    "cut_of",
    "judged_rows",
    "merged_moments",
]

HISTOGRAM_ALL = 1 << 22  # elements; the histograms of larger tensors are of one tile of rows in
HISTOGRAM_EVERY = 8
MOST_REGISTERS = 128  # two programs of 256 threads a multiprocessor

_PROGRAMS = 1056  # 132 multiprocessors times 8
_WIDEST_WHOLE = 1024  # up to here a program holds whole rows, and one read is enough
_TILE = (
    2048  # elements; with 8 warps 8 a thread, whose fp64 sums leave registers for two programs a processor
)
_MERGE_COLUMNS = 128


class Cut(NamedTuple):
    """How x [R, C] is cut up.

    Attributes:
        whole: Programs hold whole rows.
        rows: Rows of a tile, a power of two.
        columns: Columns of a tile, a power of two.
        chunk_rows: Rows of a chunk, a multiple of `rows`.
        chunks: Chunks of rows, P.
        blocks: Blocks of columns.
        warps: Warps of a program.
    """

    whole: bool
    rows: int
    columns: int
    chunk_rows: int
    chunks: int
    blocks: int
    warps: int


def cut_of(R: int, C: int) -> Cut:
    """Tiles of 2,048 elements, and about 1,056 programs where there are rows enough."""
    whole = C <= _WIDEST_WHOLE
    columns = max(16, triton.next_power_of_2(C)) if whole else 128
    rows = max(1, _TILE // columns)
    rows = min(rows, max(1, triton.next_power_of_2(R)))
    blocks = triton.cdiv(C, columns)
    chunks = max(1, _PROGRAMS // blocks)
    chunk_rows = triton.cdiv(triton.cdiv(R, chunks), rows) * rows
    return Cut(whole, rows, columns, chunk_rows, triton.cdiv(R, chunk_rows), blocks, 8)


def column_moments(x: Tensor) -> Moments:
    """`Moments.of(x)` of x [R, C] in bf16, fp16 or fp32, not empty: the same counts, the same sums in fp64.

    Two launches up to 1,024 columns, three above, where x is read twice. Deterministic; no host
    synchronisation.
    """
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    with torch.cuda.device_of(x):
        return _column_moments(x)


def _column_moments(x: Tensor) -> Moments:
    (R, C), cut = x.shape, cut_of(*x.shape)
    P, pieces = cut.chunks, cut.chunks * cut.blocks
    good_rows, row_histograms = (x, _counts(x, P, HISTOGRAM_BINS)) if cut.whole else judged_rows(x)
    counts, negatives, zeros = _counts(x, P), _counts(x, pieces), _counts(x, pieces)
    histograms = _counts(x, pieces, HISTOGRAM_BINS)
    means, m2s = x.new_empty((2, P, C), dtype=torch.float64)
    amaxes = x.new_empty((P, C), dtype=torch.float32)
    columns_kernel[P, cut.blocks](
        x,
        good_rows,
        counts,
        means,
        m2s,
        amaxes,
        negatives,
        histograms,
        row_histograms,
        zeros,
        R,
        C,
        x.stride(0),
        cut.chunk_rows,
        WHOLE=cut.whole,
        HIST=HISTOGRAM_EVERY if R * C > HISTOGRAM_ALL else 1,
        BR=cut.rows,
        BC=cut.columns,
        num_warps=cut.warps,
        maxnreg=MOST_REGISTERS,
    )
    out = _Out.empty(x, C)
    many = P > 16
    block = 16 if many else _MERGE_COLUMNS
    partials_kernel[(triton.cdiv(C, block) + 3,)](
        counts,
        means,
        m2s,
        amaxes,
        negatives,
        histograms,
        row_histograms,
        zeros,
        *out,
        R,
        C,
        P,
        pieces,
        row_histograms.shape[0],
        PB=128 if many else 16,
        BC=block,
        num_warps=8 if many else 4,
    )
    return out.moments()


def judged_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Good rows uint8 [R], and histograms of the rows' amax int32 [programs, 64]."""
    R, C = x.shape
    rows, columns = (1, 4096) if C >= 4096 else (2, 2048)
    programs = min(_PROGRAMS, triton.cdiv(R, rows))
    good_rows, histograms = x.new_empty((R,), dtype=torch.uint8), _counts(x, programs, HISTOGRAM_BINS)
    rows_kernel[(programs,)](x, good_rows, histograms, R, C, x.stride(0), BR=rows, BC=columns, num_warps=8)
    return good_rows, histograms


def merged_moments(a: Moments, b: Moments) -> Moments:
    """`a.merge(b)` in one launch, where both lie as `column_moments` lays them out; of as many features."""
    counters = _counters_of(a), _counters_of(b)
    C = a.mean.numel()
    with torch.cuda.device_of(a.mean):
        out = _Out.empty(a.mean, C)
        pair_kernel[(triton.cdiv(C, _MERGE_COLUMNS) + 1,)](
            a.mean,
            a.m2,
            a.amax,
            counters[0],
            b.mean,
            b.m2,
            b.amax,
            counters[1],
            *out,
            C,
            COUNTS=COUNTERS,
            BC=_MERGE_COLUMNS,
            num_warps=4,
        )
    return out.moments()


class _Out(NamedTuple):
    mean: Tensor
    m2: Tensor
    amax: Tensor
    counters: Tensor

    @classmethod
    def empty(cls, like: Tensor, features: int) -> _Out:
        mean, m2 = like.new_empty((2, features), dtype=torch.float64)
        return cls(
            mean,
            m2,
            like.new_empty((features,), dtype=torch.float32),
            like.new_empty((COUNTERS,), dtype=torch.int64),
        )

    def moments(self) -> Moments:
        """The counters taken apart, as views."""
        count, zeros, negatives, nonfinite_rows = self.counters[:4]
        exponents, row_exponents = self.counters[4:].view(2, HISTOGRAM_BINS)
        return Moments(
            count=count,
            mean=self.mean,
            m2=self.m2,
            amax=self.amax,
            zeros=zeros,
            negatives=negatives,
            exponents=exponents,
            row_exponents=row_exponents,
            nonfinite_rows=nonfinite_rows,
        )


def _counters_of(moments: Moments) -> Tensor:
    """The counters as one tensor: the very memory that they are views of, or a copy put together."""
    base = moments.count._base
    if base is not None and base.shape == (COUNTERS,) and moments.row_exponents._base is base:
        return base
    numbers = (moments.count, moments.zeros, moments.negatives, moments.nonfinite_rows)
    return torch.cat([torch.stack(numbers), moments.exponents, moments.row_exponents])


def _counts(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)
