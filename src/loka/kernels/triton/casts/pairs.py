"""Codes of two neighbouring rows as one 16-bit number: how tiles of codes are transposed here.

A tile of 8-bit codes crosses shared memory byte by byte when Triton 3.6 transposes it, and for some layouts
it even arrives wrong. Numbers of 16 bits do not: so even and odd rows are cast apart, their codes are put
together, and the pairs are transposed. The transposed output is then a matrix of pairs.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import triton
import triton.language as tl

from loka.kernels.triton.casts.formula import codes_of, finite_or_nan

__all__ = ["pairs_in_row", "pairs_of_codes"]


@triton.jit
def _bytes(codes):
    return codes.to(tl.uint8, bitcast=True).to(tl.uint16)


@triton.jit
def pairs_of_codes(first, second, r, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """The code of `first` in the low byte, of `second` in the high one, as int16."""
    first_clean, second_clean = finite_or_nan(first), finite_or_nan(second)
    if HARDWARE and FORMAT == 0:
        # One instruction converts two numbers into two bytes; Triton pairs neighbours of a row, we two rows.
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,f,f",
            [first_clean * r, second_clean * r],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        )
    else:
        low = _bytes(codes_of(first, first_clean, r, FORMAT))
        high = _bytes(codes_of(second, second_clean, r, FORMAT))
        pairs = (low | (high << 8)).to(tl.int16, bitcast=True)
    return pairs


@triton.jit
def pairs_in_row(padded_R, ALIGNED: tl.constexpr):
    """Pairs in a row of the transposed output; ALIGNED tells the compiler of a multiple of 16 bytes."""
    return padded_R // 16 * 8 if ALIGNED else padded_R // 2
