"""Which rows of a wide x [R, C] are finite, and how large each is."""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import triton
import triton.language as tl

from loka.kernels.triton.statistics.magnitudes import BINS, INFINITY, histogram_of, magnitude_of

__all__ = ["rows_kernel"]


@triton.jit
def rows_kernel(x, good_rows, row_histograms, R, C, stride, BR: tl.constexpr, BC: tl.constexpr):
    """Writes good_rows uint8 [R] and, of each program, the histogram of its rows' amax: [programs, 64]."""
    histogram = tl.zeros([BINS], dtype=tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        rows = tile * BR + tl.arange(0, BR)
        largest = tl.zeros([BR, BC], dtype=tl.int32)
        for left in range(0, C, BC):
            columns = left + tl.arange(0, BC)
            at = x + rows.to(tl.int64)[:, None] * stride + columns[None, :]
            inside = (rows < R)[:, None] & (columns < C)[None, :]
            values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, magnitude_of(values))
        row_amax = tl.max(largest, axis=1)
        good = row_amax < INFINITY
        tl.store(good_rows + rows, good.to(tl.uint8), mask=rows < R)
        histogram += histogram_of(tl.where(good, row_amax, 0), BR)
    tl.store(row_histograms + tl.program_id(0) * BINS + tl.arange(0, BINS), histogram)
