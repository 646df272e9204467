"""Partial statistics made one, and two sets of statistics merged (Chan, Golub and LeVeque 1979), in fp64.

Counters are int64 [132]: rows, zeros, negative elements, rows left out, 64 bins of elements, 64 bins of rows.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import triton
import triton.language as tl

from loka.kernels.triton.statistics.magnitudes import BINS

__all__ = ["COUNTERS", "pair_kernel", "partials_kernel"]

COUNTERS = 132


@triton.jit
def _column_totals(table, ROWS, PB: tl.constexpr):
    """Int64 [64]: the sums of the columns of int32 table [ROWS, 64]."""
    bins = tl.arange(0, BINS)
    sums = tl.zeros([BINS], dtype=tl.int64)
    for top in range(0, ROWS, PB):
        rows = top + tl.arange(0, PB)
        part = tl.load(table + rows[:, None] * BINS + bins[None, :], mask=(rows < ROWS)[:, None], other=0)
        sums += tl.sum(part.to(tl.int64), axis=0)
    return sums


@triton.jit
def _total(numbers, SIZE, PB: tl.constexpr):
    """Int64: the sum of int32 numbers [SIZE]."""
    sums = tl.zeros([PB], dtype=tl.int64)
    for top in range(0, SIZE, PB):
        places = top + tl.arange(0, PB)
        sums += tl.load(numbers + places, mask=places < SIZE, other=0).to(tl.int64)
    return tl.sum(sums)


@triton.jit
def partials_kernel(
    counts,
    means,
    m2s,
    amaxes,
    negatives,
    histograms,
    row_histograms,
    zeros,
    mean,
    m2,
    amax,
    counters,
    R,
    C,
    P,
    PIECES,
    ROW_PIECES,
    PB: tl.constexpr,
    BC: tl.constexpr,
):
    """The statistics of P chunks from those of each; the last three programs add up what has no columns.

    With the mean of all, m2 = sum m2_p + sum n_p (mean_p - mean)^2: one more loop instead of a chain of
    merges.
    """
    block = tl.program_id(0)
    left = tl.num_programs(0) - block
    bins = tl.arange(0, BINS)
    if left == 1:
        tl.store(counters + 4 + bins, _column_totals(histograms, PIECES, PB))
    elif left == 2:
        tl.store(counters + 4 + BINS + bins, _column_totals(row_histograms, ROW_PIECES, PB))
    elif left == 3:
        n = _total(counts, P, PB)
        tl.store(counters, n)
        tl.store(counters + 1, _total(zeros, PIECES, PB))
        tl.store(counters + 2, _total(negatives, PIECES, PB))
        tl.store(counters + 3, R - n)
    else:
        n = _total(counts, P, PB)
        columns = block * BC + tl.arange(0, BC)
        inside = columns < C
        sums = tl.zeros([BC], dtype=tl.float64)
        largest = tl.zeros([BC], dtype=tl.float32)
        for top in range(0, P, PB):
            chunks = top + tl.arange(0, PB)
            at = chunks.to(tl.int64)[:, None] * C + columns[None, :]
            there = (chunks < P)[:, None] & inside[None, :]
            weight = tl.load(counts + chunks, mask=chunks < P, other=0).to(tl.float64)
            sums += tl.sum(tl.load(means + at, mask=there, other=0.0) * weight[:, None], axis=0)
            largest = tl.maximum(largest, tl.max(tl.load(amaxes + at, mask=there, other=0.0), axis=0))
        middle = sums / tl.maximum(n, 1).to(tl.float64)
        scatter = tl.zeros([BC], dtype=tl.float64)
        for top in range(0, P, PB):
            chunks = top + tl.arange(0, PB)
            at = chunks.to(tl.int64)[:, None] * C + columns[None, :]
            there = (chunks < P)[:, None] & inside[None, :]
            weight = tl.load(counts + chunks, mask=chunks < P, other=0).to(tl.float64)
            away = tl.load(means + at, mask=there, other=0.0) - middle[None, :]
            inner = tl.load(m2s + at, mask=there, other=0.0)
            scatter += tl.sum(inner + weight[:, None] * away * away, axis=0)
        tl.store(mean + columns, middle, mask=inside)
        tl.store(m2 + columns, scatter, mask=inside)
        tl.store(amax + columns, largest, mask=inside)


@triton.jit
def pair_kernel(
    mean_a,
    m2_a,
    amax_a,
    counters_a,
    mean_b,
    m2_b,
    amax_b,
    counters_b,
    mean,
    m2,
    amax,
    counters,
    C,
    COUNTS: tl.constexpr,
    BC: tl.constexpr,
):
    """The statistics of both, as `Moments.merge`; the last program adds the counters."""
    block = tl.program_id(0)
    if block == tl.num_programs(0) - 1:
        places = tl.arange(0, 256)
        a = tl.load(counters_a + places, mask=places < COUNTS, other=0)
        b = tl.load(counters_b + places, mask=places < COUNTS, other=0)
        tl.store(counters + places, a + b, mask=places < COUNTS)
    else:
        columns = block * BC + tl.arange(0, BC)
        inside = columns < C
        n_a, n_b = tl.load(counters_a).to(tl.float64), tl.load(counters_b).to(tl.float64)
        share = n_b / tl.maximum(n_a + n_b, 1.0)
        first = tl.load(mean_a + columns, mask=inside, other=0.0)
        delta = tl.load(mean_b + columns, mask=inside, other=0.0) - first
        scatter = tl.load(m2_a + columns, mask=inside, other=0.0)
        scatter += tl.load(m2_b + columns, mask=inside, other=0.0)
        largest = tl.load(amax_a + columns, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.load(amax_b + columns, mask=inside, other=0.0))
        tl.store(mean + columns, first + share * delta, mask=inside)
        tl.store(m2 + columns, scatter + delta * delta * (n_a * share), mask=inside)
        tl.store(amax + columns, largest, mask=inside)
