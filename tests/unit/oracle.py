"""A bit-level FP8 oracle, written from the formats' definitions and sharing nothing with the library."""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Layout:
    exponent_bits: int
    mantissa_bits: int
    bias: int
    fnuz: bool
    has_inf: bool


LAYOUTS = {
    "e4m3": Layout(4, 3, 7, False, False),
    "e5m2": Layout(5, 2, 15, False, True),
    "e4m3fnuz": Layout(4, 3, 8, True, False),
    "e5m2fnuz": Layout(5, 2, 16, True, False),
}


def value_of(code: int, name: str) -> Fraction | str:
    """Exact value of a code; `nan`, `inf` or `-inf` where it has none."""
    layout = LAYOUTS[name]
    sign = -1 if code & 0x80 else 1
    exponent = (code >> layout.mantissa_bits) & ((1 << layout.exponent_bits) - 1)
    mantissa = code & ((1 << layout.mantissa_bits) - 1)
    top = (1 << layout.exponent_bits) - 1
    if layout.fnuz and code == 0x80:
        return "nan"
    if layout.has_inf and exponent == top:
        return "nan" if mantissa else ("inf" if sign > 0 else "-inf")
    if not layout.fnuz and not layout.has_inf and (code & 0x7F) == 0x7F:
        return "nan"
    fraction = Fraction(mantissa, 1 << layout.mantissa_bits)
    if exponent == 0:
        return sign * fraction * Fraction(2) ** (1 - layout.bias)
    return sign * (1 + fraction) * Fraction(2) ** (exponent - layout.bias)


@functools.cache
def positive_values(name: str) -> list[tuple[Fraction, int]]:
    """Every finite value >= 0 with its code, ascending."""
    out = []
    for code in range(128):
        value = value_of(code, name)
        if isinstance(value, Fraction):
            out.append((value, code))
    return sorted(out)


def encode(x: Fraction, name: str) -> int:
    """Clamp to the finite range, round to nearest, ties to the even code."""
    table = positive_values(name)
    magnitude = min(abs(x), table[-1][0])
    above = bisect.bisect_left(table, (magnitude, 0))
    near = table[max(0, above - 1) : above + 1]
    best = min(near, key=lambda item: (abs(item[0] - magnitude), item[1] & 1))
    negative = x < 0
    if best[0] == 0 and LAYOUTS[name].fnuz:
        return 0  # FNUZ has one zero
    return best[1] | (0x80 if negative else 0)
