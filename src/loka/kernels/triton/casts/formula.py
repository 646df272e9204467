"""The cast's formula inside a Triton kernel. Its home is `loka.numerics.cast`; this must equal it bit by bit.

MAX is the format's largest value. FORMAT is 0 for E4M3 and 1 for E5M2.

The kernels are bound by instructions as much as by memory, so that a check an element is dear. Two facts
save it: x + 0 * x is x for a finite x and NaN for an infinity or NaN, and `max` ignores NaN. One fused
multiply-add keeps what is not finite out of every amax and makes the NaN that E4M3 has for an infinity.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import triton
import triton.language as tl

__all__ = ["codes_of", "decode_scale", "fast_reciprocal", "finite_or_nan", "reciprocal"]


@triton.jit
def finite_or_nan(x):
    """fp32 x with infinities made NaN; the amax of its absolute values is over the finite ones."""
    return x * 0.0 + x


@triton.jit
def decode_scale(amax, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """RN(amax / MAX), rounded up to a power of two if asked, at least 2^-100; 1 where amax is 0 or NaN."""
    # RN(amax / MAX) without a division, whose rare branches every thread would carry: where c = RN(1 / MAX),
    # one correction of amax * c by its exact remainder gives the correctly rounded quotient (Markstein,
    # "IA-64 and Elementary Functions"). Quotients so small that it could fail lie below the floor.
    quotient = amax * (1.0 / MAX)
    scale = tl.fma(tl.fma(quotient, -MAX, amax), 1.0 / MAX, quotient)
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
def fast_reciprocal(scale, HARDWARE: tl.constexpr):
    """`reciprocal` without branches, for kernels that take many: equal to it for every scale there is.

    The hardware's reciprocal is off by up to two units in the last place. One Newton step brings it within
    one unit; the next then rounds correctly (Markstein), but for a scale whose mantissa is all ones, where
    the result is one unit above a power of two. Nothing over- or underflows: scales lie in 2^-100 .. 2^120.
    """
    if HARDWARE:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
        y = tl.fma(tl.fma(-scale, y, 1.0), y, y)
        y = tl.fma(tl.fma(-scale, y, 1.0), y, y)
        all_ones = (scale.to(tl.int32, bitcast=True) & 0x007FFFFF) == 0x007FFFFF
        r = (y.to(tl.int32, bitcast=True) | all_ones.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        r = reciprocal(scale)
    return r


@triton.jit
def codes_of(x, clean, r, FORMAT: tl.constexpr):
    """RNE(clamp(x * r)) of fp32 x; NaN stays NaN, an infinity becomes NaN in E4M3 and stays one in E5M2.

    `clean` is `finite_or_nan(x)`. The clamp is the conversion's own: it is `cvt.rn.satfinite`, which turns a
    magnitude above MAX into MAX and lets NaN through (a test looks for it in the machine code).
    """
    if FORMAT == 0:
        codes = (clean * r).to(tl.float8e4nv)
    else:
        # It would saturate an infinity too, which E5M2 has: that is put in as its bits.
        bits = (clean * r).to(tl.float8e5).to(tl.uint8, bitcast=True)
        infinity = tl.where(x > 0.0, 0x7C, 0xFC).to(tl.uint8)
        codes = tl.where(tl.abs(x) == float("inf"), infinity, bits).to(tl.float8e5, bitcast=True)
    return codes
