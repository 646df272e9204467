"""Magnitudes as integers: the bits of |x| in fp32 order as the numbers do, and hold the exponent.

NaN is larger than infinity in that order, so one maximum says whether a row is finite.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import triton
import triton.language as tl

__all__ = ["BINS", "INFINITY", "bin_of", "histogram_of", "magnitude_of"]

BINS = tl.constexpr(64)
INFINITY = tl.constexpr(0x7F800000)
_BIAS = tl.constexpr(127 - 48)  # bin 0 is 2^-48, as in `loka.numerics.moments`


@triton.jit
def magnitude_of(x):
    """The bits of |x| of fp32 x, as int32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def bin_of(magnitude):
    """Which of the 64 bins floor(log2 |x|) falls into; the ends are open."""
    return tl.minimum(tl.maximum((magnitude >> 23) - _BIAS, 0), 63)


@triton.jit
def histogram_of(magnitude, SIZE: tl.constexpr):
    """Int32 [64] of a tile of SIZE magnitudes; zeros are left out."""
    flat = tl.reshape(magnitude, [SIZE], can_reorder=True)
    return tl.histogram(bin_of(flat), BINS, mask=flat != 0)
