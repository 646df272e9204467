"""Histograms of every feature of sampled rows, as `loka.numerics.Marginals` has them.

All that decides a bin is worked out from the bits of fp64 copies, in which every fp32 number is a normal one
or 0, so it is exact. The three sums of a bin share one int64 word, see `loka.numerics.marginals`; words are
added with atomics, whose order cannot be seen in integers.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import triton
import triton.language as tl

__all__ = ["ROWS_A_WORD", "bins_kernel", "extents_kernel", "unpack_kernel"]

ROWS_A_WORD = 2048

_FRACTION = tl.constexpr((1 << 52) - 1)
_SQRT_HALF = tl.constexpr(0x6A09E60000000)  # fp64 fraction of fp32's sqrt(1/2), 0x3F3504F3
_SQRT_TWO = tl.constexpr(1.41421353816986083984375)  # in fp32
_PER_HALF_OCTAVE = tl.constexpr(256 / (2**0.5 - 1))
_NO_ORIGIN = tl.constexpr(-400)
_NO_RANGE = tl.constexpr(-200)


@triton.jit
def _bits(x):
    return x.to(tl.float64).to(tl.int64, bitcast=True)


@triton.jit
def _exponent(bits):
    """floor(log2 |x|) of fp64 bits of a number that is not 0, int32."""
    return (((bits >> 52) & 0x7FF) - 1023).to(tl.int32)


@triton.jit
def _power(exponent):
    """2^exponent, fp64."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _half_octave(x):
    """floor(2 log2 |x|) of fp32 x, int32; -400 for 0."""
    bits = _bits(x)
    upper = (bits & _FRACTION) >= _SQRT_HALF
    return tl.where(x == 0.0, _NO_ORIGIN, 2 * _exponent(bits) + upper.to(tl.int32))


@triton.jit
def _number(x, k):
    """`fine_numbers` of fp32 x: the bin 2^k wide, counted from 0 outwards; int64."""
    outwards = (tl.abs(x.to(tl.float64)) * _power(-k)).to(tl.int64)
    return tl.where(x < 0.0, -1 - outwards, outwards)


@triton.jit
def extents_kernel(
    x, good_rows, low, high, origin, k, digits, S, F, stride, BR: tl.constexpr, BC: tl.constexpr
):
    """What a column spans: low and high fp32 [F]; origin, exponent k of its even bins, digits int32."""
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = columns < F
    least = tl.full([BR, BC], float("inf"), dtype=tl.float32)
    most = tl.full([BR, BC], float("-inf"), dtype=tl.float32)
    last = tl.full([BR, BC], 1 << 24, dtype=tl.int32)
    for top in range(0, S, BR):
        rows = top + tl.arange(0, BR)
        good = (tl.load(good_rows + rows, mask=rows < S, other=0) != 0)[:, None] & inside[None, :]
        at = x + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        value = tl.load(at, mask=good, other=0.0).to(tl.float32)
        least = tl.where(good, tl.minimum(least, value), least)
        most = tl.where(good, tl.maximum(most, value), most)
        whole = (((_bits(value) & _FRACTION) >> 29) | (1 << 23)).to(tl.int32)
        last = tl.where(value == 0.0, last, tl.minimum(last, whole & -whole))
    bottom, top_ = tl.min(least, axis=0), tl.max(most, axis=0)
    bottom = tl.where(bottom <= top_, bottom, 0.0)  # no good row
    top_ = tl.where(tl.max(most, axis=0) >= bottom, top_, 0.0)
    magnitude = tl.maximum(tl.abs(bottom), tl.abs(top_))
    span = top_.to(tl.float64) - bottom.to(tl.float64)
    finest = tl.where(magnitude > 0.0, _exponent(_bits(magnitude)) + 1 - 24, _NO_RANGE)
    narrow = tl.where(span > 0.0, _exponent(span.to(tl.int64, bitcast=True)) + 1 - 5, _NO_RANGE)
    exponent = tl.maximum(finest, narrow)
    used = _number(top_, exponent) - _number(bottom, exponent)
    tl.store(low + columns, bottom, mask=inside)
    tl.store(high + columns, top_, mask=inside)
    tl.store(origin + columns, _half_octave(magnitude), mask=inside)
    tl.store(k + columns, exponent + (used >= 32).to(tl.int32), mask=inside)
    place = _exponent(_bits(tl.min(last, axis=0).to(tl.float32)))
    tl.store(digits + columns, 24 - place, mask=inside)


@triton.jit
def _add(words, place, position, mask):
    position = position.to(tl.int64)
    word = (1 << 46) + (position << 27) + position * position
    tl.atomic_add(words + place, word, mask=mask, sem="relaxed")


@triton.jit
def bins_kernel(
    x, good_rows, low, origin, k, halves, evens, S, F, stride, FIRST, BR: tl.constexpr, BC: tl.constexpr
):
    """Adds the words of rows FIRST ... S to halves int64 [F, 64] and evens int64 [F, 32]."""
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = columns < F
    rows = FIRST + tl.program_id(0) * BR + tl.arange(0, BR)
    good = (tl.load(good_rows + rows, mask=rows < S, other=0) != 0)[:, None] & inside[None, :]
    at = x + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    value = tl.load(at, mask=good, other=0.0).to(tl.float32)
    column = tl.zeros([BR, BC], dtype=tl.int64) + columns.to(tl.int64)[None, :]

    half = _half_octave(value)
    depth = tl.load(origin + columns, mask=inside, other=0)[None, :] - half
    place = tl.where(value > 0.0, tl.maximum(63 - depth, 32), tl.minimum(depth, 30))
    place = tl.where(value == 0.0, 31, place)
    root = tl.where((half & 1) != 0, _SQRT_TWO, 1.0)
    inner = (_power(tl.where(value == 0.0, 0, half >> 1)) * root).to(tl.float32)
    position = (tl.div_rn(tl.abs(value), inner) - 1.0) * _PER_HALF_OCTAVE
    position = tl.minimum(tl.maximum(position, 0.0), 255.0).to(tl.int32)
    position = tl.where((place >= 30) & (place <= 32), 0, position)
    _add(halves, column * 64 + place, position, good)

    exponent = tl.load(k + columns, mask=inside, other=0)
    scaled = tl.abs(value.to(tl.float64)) * _power(-exponent)[None, :]
    outwards = scaled.to(tl.int64)
    position = ((scaled - outwards.to(tl.float64)) * 256.0).to(tl.int32)
    first = _number(tl.load(low + columns, mask=inside, other=0.0), exponent)
    number = tl.where(value < 0.0, -1 - outwards, outwards) - first[None, :]
    number = tl.minimum(tl.maximum(number, 0), 31)
    _add(evens, column * 32 + number, position, good)


@triton.jit
def unpack_kernel(words, counts, inside, squares, SIZE, PARTS, BLOCK: tl.constexpr):
    """Words int64 [PARTS, SIZE] as counts int32, positions and their squares fp32, in shares of a bin."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], dtype=tl.int64)
    first = tl.zeros([BLOCK], dtype=tl.int64)
    second = tl.zeros([BLOCK], dtype=tl.int64)
    for part in range(PARTS):
        word = tl.load(words + part * SIZE.to(tl.int64) + places, mask=places < SIZE, other=0)
        count += word >> 46
        first += (word >> 27) & ((1 << 19) - 1)
        second += word & ((1 << 27) - 1)
    tl.store(counts + places, count.to(tl.int32), mask=places < SIZE)
    tl.store(inside + places, first.to(tl.float32) / 256.0, mask=places < SIZE)
    tl.store(squares + places, (second.to(tl.float64) / 65536.0).to(tl.float32), mask=places < SIZE)
