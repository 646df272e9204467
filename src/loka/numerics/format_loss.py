"""What a cast would lose, and how far rows and columns spread, read from the statistics of an operand.

The exponent histogram knows magnitudes to an octave. A threshold inside a bin gives a share between two
bounds: none of the bin's elements lie beyond it, or all of them. The share itself takes them as spread evenly
over log2. Bin 0 holds everything below 2^-47 and bin 63 everything from 2^15 up to the amax.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.numerics.cast import decode_scale
from loka.numerics.moments import HISTOGRAM_BINS, HISTOGRAM_MIN_EXPONENT, Moments
from loka.vocab import Format

__all__ = ["FLOAT8_FORMATS", "FormatLoss", "Share", "column_octaves", "format_loss", "row_octaves"]

FLOAT8_FORMATS = (Format.E4M3, Format.E5M2, Format.E4M3FNUZ, Format.E5M2FNUZ)
_SMALLEST = -149  # fp32's smallest magnitude is 2^-149


class Share(NamedTuple):
    """A share of elements, 0 to 1, and what bounds it.

    Attributes:
        value: The share, elements of a bin taken as spread evenly over log2.
        low: At least this share.
        high: At most this share.
    """

    value: float
    low: float
    high: float


class FormatLoss(NamedTuple):
    """What a tensorwise cast to one format would lose.

    Attributes:
        underflow: Of the non-zero elements, those that become 0.
        saturation: Of all elements, those beyond the format's largest value.
    """

    underflow: Share
    saturation: Share


def format_loss(moments: Moments, format_: Format, *, scale: Tensor | float | None = None) -> FormatLoss:
    """What a tensorwise cast would lose; `loka.numerics.cast_loss` says it of one tensor exactly.

    An element becomes 0 where |x| / scale is at most half the format's smallest subnormal (ties go to 0, the
    even one), and saturates above the format's largest value.

    Args:
        moments: Of everything seen. Where the operand's size changes in training, the amax is that of its
            largest step, and underflow is overstated for the others.
        format_: An 8-bit format.
        scale: A decode scale; by default the dynamic one of the amax, with which nothing saturates.

    Raises:
        UsageError: for a format that is not 8-bit, or a scale that is not a positive number.
    """
    if not format_.is_float8:
        raise UsageError(
            f"format_loss takes an 8-bit format, got {format_}", hint=f"one of {', '.join(FLOAT8_FORMATS)}"
        )
    amax = float(moments.amax.amax()) if moments.amax.numel() else 0.0
    given = scale is not None
    step = float(decode_scale(torch.tensor(amax), format_)) if scale is None else float(scale)
    if not (step > 0 and math.isfinite(step)):
        raise UsageError(f"format_loss needs a scale above 0, got {step}")
    counts = [int(n) for n in moments.exponents.tolist()]
    # The histogram may be of a part of the rows; the share of zeros is of all.
    elements = int(moments.count) * moments.mean.numel()
    nonzero = sum(counts)
    everything = nonzero / (1 - int(moments.zeros) / elements) if nonzero else max(elements, 1)
    lost = _below(counts, amax, math.log2(step * format_.smallest_subnormal / 2))
    kept = _below(counts, amax, math.log2(step * format_.max)) if given else Share(nonzero, nonzero, nonzero)
    over = Share(nonzero - kept.value, nonzero - kept.high, nonzero - kept.low)
    return FormatLoss(_divided(lost, nonzero), _divided(over, everything))


def row_octaves(moments: Moments, shares: Sequence[float]) -> list[float] | None:
    """log2 of the rows' amax at these shares of the rows that are not all zero; None without any.

    Known to an octave. How far apart rows lie is what a tensorwise scale costs them, and a rowwise one does
    not.
    """
    counts = [int(n) for n in moments.row_exponents.tolist()]
    if not sum(counts):
        return None
    return [_quantile(counts, share) for share in shares]


def column_octaves(moments: Moments, shares: Sequence[float]) -> list[float] | None:
    """log2 of the features' amax at these shares of the features that were not always 0; None without any."""
    amax = moments.amax.double()
    alive = amax[amax > 0].log2().sort().values
    last = alive.numel() - 1
    return [float(alive[round(share * last)]) for share in shares] if last >= 0 else None


def _below(counts: list[int], amax: float, threshold: float) -> Share:
    """How many of the elements lie at or below 2^threshold: as numbers, not yet as shares."""
    tops = [HISTOGRAM_MIN_EXPONENT + i + 1.0 for i in range(HISTOGRAM_BINS)]
    # The last bin is open: it ends where the largest element lies.
    tops[-1] = max(tops[-2], math.log2(amax)) if amax > 0 else tops[-2]
    value, low, high = 0.0, 0, 0
    bottom = float(_SMALLEST)
    for count, top in zip(counts, tops, strict=True):
        if top <= threshold:
            value, low, high = value + count, low + count, high + count
        elif bottom <= threshold:
            value += count * (threshold - bottom) / (top - bottom)
            high += count
        bottom = top
    return Share(value, low, high)


def _divided(share: Share, count: float) -> Share:
    return Share(*(part / count for part in share)) if count else Share(0.0, 0.0, 0.0)


def _quantile(counts: Sequence[int], share: float) -> float:
    """The exponent of the bin up to which a share of the counts lies."""
    at = bisect_left(list(accumulate(counts)), share * sum(counts))
    while not counts[at]:  # a share of 0 begins at the first that is not empty
        at += 1
    return float(at + HISTOGRAM_MIN_EXPONENT)
