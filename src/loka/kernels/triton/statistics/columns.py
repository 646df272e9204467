"""Sums down the columns of x [R, C]: each program takes a chunk of rows and a block of columns.

What is kept of a chunk: the number of its good rows, and of every column their mean, their squared deviations
from it and the largest magnitude. Histograms are of one tile of rows in HIST: each costs a meeting of all
warps, more than the sums do. Sums are of x minus the chunk's first row, in fp64: no digits are lost to a
large mean, and no square overflows. A row is good where all its elements are finite; WHOLE programs see whole
rows and judge them, others are told.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import triton
import triton.language as tl

from loka.kernels.triton.statistics.magnitudes import BINS, INFINITY, histogram_of, magnitude_of

__all__ = ["columns_kernel"]


@triton.jit
def columns_kernel(
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
    stride,
    chunk_rows,
    WHOLE: tl.constexpr,
    HIST: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Partial statistics of one chunk [chunk_rows, BC].

    Writes counts [P], means, m2s and amaxes [P, C], negatives and zeros [P, blocks], histograms
    [P, blocks, 64] and, where WHOLE, row_histograms [P, 64].
    """
    chunk, block = tl.program_id(0), tl.program_id(1)
    columns = block * BC + tl.arange(0, BC)
    inside = columns < C
    first = chunk * chunk_rows
    last = tl.minimum(first + chunk_rows, R)
    start = tl.load(x + first.to(tl.int64) * stride + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.where(magnitude_of(start) < INFINITY, start, 0.0)

    count = tl.zeros([BR], dtype=tl.int32)
    sums = tl.zeros([BR, BC], dtype=tl.float64)
    squares = tl.zeros([BR, BC], dtype=tl.float64)
    largest = tl.zeros([BR, BC], dtype=tl.int32)
    signs = tl.zeros(
        [BR, BC], dtype=tl.int32
    )  # elements below 0, and zeros times 2^16: a chunk has few tiles
    histogram = tl.zeros([BINS], dtype=tl.int32)
    row_histogram = tl.zeros([BINS], dtype=tl.int32)
    for top in range(first, last, BR):
        rows = top + tl.arange(0, BR)
        at = x + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        values = tl.load(at, mask=(rows < last)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        magnitude = magnitude_of(values)
        if WHOLE:
            row_amax = tl.max(magnitude, axis=1)
            good = (row_amax < INFINITY) & (rows < last)
            if (top - first) // BR % HIST == 0:
                row_histogram += histogram_of(tl.where(good, row_amax, 0), BR)
        else:
            good = tl.load(good_rows + rows, mask=rows < last, other=0) != 0
        count += good.to(tl.int32)
        magnitude = tl.where(good[:, None], magnitude, 0)
        deviation = tl.where(good[:, None], values.to(tl.float64) - shift.to(tl.float64)[None, :], 0.0)
        sums += deviation
        squares += deviation * deviation
        largest = tl.maximum(largest, magnitude)
        signs += (good[:, None] & (values < 0.0)).to(tl.int32)
        signs += (good[:, None] & inside[None, :] & (magnitude == 0)).to(tl.int32) << 16
        if (top - first) // BR % HIST == 0:
            histogram += histogram_of(magnitude, BR * BC)

    n = tl.sum(count)
    total = tl.sum(sums, axis=0)
    mean = total / tl.maximum(n, 1).to(tl.float64)
    out = chunk.to(tl.int64) * C + columns
    tl.store(means + out, shift.to(tl.float64) + mean, mask=inside)
    tl.store(m2s + out, tl.maximum(tl.sum(squares, axis=0) - total * mean, 0.0), mask=inside)
    tl.store(amaxes + out, tl.max(largest, axis=0).to(tl.float32, bitcast=True), mask=inside)
    piece = chunk * tl.num_programs(1) + block
    tl.store(negatives + piece, tl.sum(signs & 0xFFFF))
    tl.store(zeros + piece, tl.sum(signs >> 16))
    tl.store(histograms + piece * BINS + tl.arange(0, BINS), histogram)
    if block == 0:
        tl.store(counts + chunk, n)
        if WHOLE:
            tl.store(row_histograms + chunk * BINS + tl.arange(0, BINS), row_histogram)
