"""Normalization and hard swish inside a Triton kernel; their home is `loka.numerics.block_norm`. In fp32."""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import triton
import triton.language as tl

__all__ = ["activated", "inverse_rms", "place_of", "slope_of"]


@triton.jit
def place_of(block, width, wider, UNEVEN: tl.constexpr):
    """First feature of a block, and how many it has: the first `wider` blocks have one more."""
    start = block * width
    size = width
    if UNEVEN:
        start += tl.minimum(block, wider)
        size += (block < wider).to(tl.int32)
    return start, size


@triton.jit
def inverse_rms(x, size, eps):
    """1 / sqrt(mean(x^2) + eps) of each row of one block [rows, 1]; what lies outside of it is 0."""
    return tl.rsqrt(tl.sum(x * x, axis=1) / size.to(tl.float32) + eps)[:, None]


@triton.jit
def activated(z, SWISH: tl.constexpr):
    """Hard swish of z, or z: z * clamp(z + 3, 0, 6) / 6."""
    if SWISH:
        # NaN must come through, and a clamp by minima would drop it; z * NaN keeps it.
        z = z * (tl.minimum(tl.maximum(z + 3.0, 0.0), 6.0) * (1.0 / 6.0))
    return z


@triton.jit
def slope_of(z):
    """Derivative of hard swish; at -3 and 3 torch's choice, 0 and 1."""
    inner = z * (1.0 / 3.0) + 0.5
    return tl.where(z <= -3.0, 0.0, tl.where(z >= 3.0, 1.0, inner))
