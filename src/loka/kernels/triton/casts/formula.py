"""The cast's formula inside a Triton kernel. Its home is `loka.numerics.cast`; this must equal it bit by bit.

MAX is the format's largest value. FORMAT is 0 for E4M3 and 1 for E5M2.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import triton
import triton.language as tl

__all__ = ["codes_of", "decode_scale", "finite_magnitude", "reciprocal"]


@triton.jit
def finite_magnitude(x):
    """|x| in fp32, 0 where x is not finite: infinities and NaN never enter an amax."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def decode_scale(amax, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """RN(amax / MAX), rounded up to a power of two if asked, at least 2^-100; 1 where amax is 0."""
    scale = tl.math.div_rn(amax, MAX)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x007FFFFF) != 0).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    scale = tl.maximum(scale, 7.888609052210118e-31)  # 2^-100
    return tl.where(amax > 0.0, scale, 1.0)


@triton.jit
def reciprocal(scale):
    """RN(1 / s): hardware multiplies, and the formula says so."""
    return tl.math.div_rn(1.0, scale)


@triton.jit
def codes_of(x, r, MAX: tl.constexpr, FORMAT: tl.constexpr):
    """RNE(clamp(x * r)) of fp32 x; NaN stays NaN, an infinity becomes NaN in E4M3 and stays one in E5M2."""
    magnitude = tl.abs(x)
    held = tl.where(magnitude < float("inf"), tl.clamp(x * r, -MAX, MAX), float("nan"))
    if FORMAT == 0:
        codes = held.to(tl.float8e4nv)
    else:
        # Hardware saturates the cast, so that an infinity has to be put in as its bits.
        bits = held.to(tl.float8e5).to(tl.uint8, bitcast=True)
        infinity = tl.where(x > 0.0, 0x7C, 0xFC).to(tl.uint8)
        codes = tl.where(magnitude == float("inf"), infinity, bits).to(tl.float8e5, bitcast=True)
    return codes
