"""Even bins over the range that a feature takes: histograms that resolve what half octaves smear.

The bins are 2^k wide, start at multiples of 2^k and count outwards from 0: a positive value is in bin
floor(x / 2^k), a negative one in -1 - floor(-x / 2^k), the first used bin being that of the smallest value.
k is the least with which `FINE_BINS` bins hold the range, so 16 to 32 of them are in use. It follows from the
smallest and the largest value, grows with the range, and a wider bin is a union of narrower ones: histograms
of two sets of rows merge without a loss.

Each bin also keeps the first two moments of the position in it, 0 at its smaller magnitude and 1 at its
larger one, as the half octaves do.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "FINE_BINS",
    "STEPS",
    "fine_bounds",
    "fine_exponent",
    "fine_numbers",
    "fine_sums",
    "power_of_two",
    "rebinned",
]

FINE_BINS = 32
STEPS = 256  # of the position within a bin

_DIGITS = 24  # of an fp32 number: finer bins would tell nothing apart
_NO_RANGE = -200  # below what 24 digits of the smallest fp32 subnormal need
_OCTAVES_IN_USE = 5  # 2^5 bins


def fine_exponent(low: Tensor, high: Tensor) -> Tensor:
    """k, int32 [F], of features with values from low [F] to high [F], fp32."""
    bottom, top = low.double(), high.double()
    magnitude = torch.maximum(bottom.abs(), top.abs())
    range_exponent = torch.frexp(top - bottom)[1]
    least = torch.where(magnitude > 0, torch.frexp(magnitude)[1] - _DIGITS, _NO_RANGE)
    k = torch.maximum(torch.where(top > bottom, range_exponent - _OCTAVES_IN_USE, _NO_RANGE), least)
    used = fine_numbers(top, k) - fine_numbers(bottom, k)
    return (k + (used >= FINE_BINS)).to(torch.int32)


def fine_numbers(x: Tensor, k: Tensor) -> Tensor:
    """The bin of x in bins 2^k wide, int64, counted from 0 outwards; exact for fp32 numbers."""
    outwards = (x.double().abs() * power_of_two(-k)).floor().long()
    return torch.where(x < 0, ~outwards, outwards)


def fine_sums(kept: Tensor, good: Tensor, low: Tensor, k: Tensor) -> Tensor:
    """int64 [3, F, 32] of rows [rows <= 2,048, F]: counts, positions in 1/256, their squares; one scatter.

    The three go into one word as for the half octaves, see `marginals`.

    Args:
        kept: fp32 rows.
        good: bool [rows, 1], those that count.
        low: fp32 [F], smallest value of all that count.
        k: int32 [F].
    """
    features = low.numel()
    scaled = kept.double().abs() * power_of_two(-k)
    outwards = scaled.floor()
    position = ((scaled - outwards) * STEPS).long()
    numbers = outwards.long()
    numbers = torch.where(kept < 0, ~numbers, numbers) - fine_numbers(low, k)
    word = torch.where(good, (1 << 46) + (position << 27) + position * position, 0)
    places = numbers.clamp(0, FINE_BINS - 1) + torch.arange(features, device=kept.device) * FINE_BINS
    sums = torch.zeros(features * FINE_BINS, dtype=torch.int64, device=kept.device)
    sums.scatter_add_(0, places.flatten(), word.flatten())
    packed = sums.view(features, FINE_BINS)
    return torch.stack([packed >> 46, (packed >> 27) & (2**19 - 1), packed & (2**27 - 1)])


def rebinned(
    sums: tuple[Tensor, Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, positions and their squares [F, 32] in wider bins, or in bins that start lower.

    Args:
        sums: int32 and twice fp32 [F, 32].
        own: Smallest value fp32 [F] and exponent int32 [F] of these bins.
        wanted: Those of the bins wanted, which hold all of these.
    """
    counts, inside, squares = sums
    number = _numbers(*own)
    negative = number < 0
    outwards = torch.where(negative, ~number, number).double()
    wider = (wanted[1] - own[1])[:, None]
    width = power_of_two(-wider)  # of a narrow bin, in wide ones
    scaled = outwards * width
    target = scaled.floor()
    start = scaled - target
    target_number = target.long()
    place = torch.where(negative, ~target_number, target_number) - fine_numbers(*wanted)[:, None]
    place = place.clamp(0, FINE_BINS - 1)  # empty bins may lie outside
    n, first, second = counts.double(), inside.double(), squares.double()
    moved = n * start + first * width
    moved_squares = n * start.square() + 2 * start * width * first + second * width.square()
    zeros = torch.zeros_like(n)
    return (
        torch.zeros_like(counts).scatter_add_(1, place, counts),
        zeros.scatter_add(1, place, moved).float(),
        zeros.scatter_add(1, place, moved_squares).float(),
    )


def fine_bounds(low: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every bin: smaller magnitude and larger magnitude, fp64 [F, 32], and whether it is negative."""
    number = _numbers(low, k)
    negative = number < 0
    outwards = torch.where(negative, ~number, number).double()
    width = power_of_two(k)[:, None]
    return outwards * width, (outwards + 1) * width, negative


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, fp64, of whole exponents from -1022 to 1023; from the bits, so exact on every device."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _numbers(low: Tensor, k: Tensor) -> Tensor:
    """int64 [F, 32]."""
    return fine_numbers(low, k)[:, None] + torch.arange(FINE_BINS, device=low.device)
