"""Mergeable histograms of every feature of an operand, bounded in bytes.

Two of them. The first has 64 bins: half octaves of both signs and one for exact zeros, in rising order of
the value:

    bin 0 ... 30  negative, magnitude falling     bin 31  exactly 0     bin 32 ... 63  positive, rising

A feature's `origin` is the half octave floor(2 log2 |x|) of its largest magnitude, which belongs to bins 0
and 63. The innermost bins (30 and 32) also hold everything smaller, 15 octaves below the largest. Merging
shifts the histogram with the lower origin by whole bins, so it is exact: counts do not depend on how rows
were split.

A half octave is 41 % wide, and where values lie in it decides how FP8 rounds them: rows that are multiples
of one vector, or nearly constant, are rounded alike, and their errors do not average out. So the second
histogram has up to 32 even bins over the range (see `fine_bins`), and each bin of both, but the innermost
half octaves, keeps the first two moments of the position in it, 0 at its smaller magnitude and 1 at its
larger one, in steps of 1/256.

Beyond four widths of the even bins from 0, quantiles come from those; nearer
to it, where half octaves are narrower, from the half octaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.numerics.digits import FP32_DIGITS, digits_of, rounded
from loka.numerics.fine_bins import (
    FINE_BINS,
    STEPS,
    fine_bounds,
    fine_exponent,
    fine_sums,
    power_of_two,
    rebinned,
)
from loka.numerics.stretches import Stretches, shortened

__all__ = ["MARGINAL_BINS", "Marginals", "half_octave"]

MARGINAL_BINS = 64
_ZERO = 31  # the bin of exact zeros; 31 half octaves below it, 32 above
_LOWEST_ORIGIN = -400  # below the half octave of the smallest fp32 subnormal, -298
_SQRT_HALF = 0.5**0.5
_INNER_BINS = 4  # of their widths: nearer to 0 even bins are wider than half octaves
_ROWS_A_WORD = 2048  # rows whose sums fit side by side in one int64


def half_octave(magnitude: Tensor) -> Tensor:
    """floor(2 log2 m) of positive finite fp32 magnitudes, int32; exact, from the bits. For 0 it is -400."""
    mantissa, exponent = torch.frexp(magnitude)
    upper = (mantissa >= _SQRT_HALF).to(torch.int32)
    return torch.where(magnitude > 0, 2 * (exponent.to(torch.int32) - 1) + upper, _LOWEST_ORIGIN)


@dataclass(slots=True)
class Marginals:
    """Histograms of rows of F features. All tensors live on the data's device.

    Attributes:
        counts: int32 [F, 64], features in bins; rows with a non-finite element are left out.
        inside: fp32 [F, 64], sum of the positions within the bin; 0 in bins 30, 31 and 32.
        inside_squares: fp32 [F, 64], sum of their squares.
        origin: int32 [F], half octave of the largest magnitude; -400 while a feature was always 0.
        low: fp32 [F], smallest value; 0 while there are no rows.
        high: fp32 [F], largest value; 0 while there are no rows.
        fine_counts: int32 [F, 32], rows in even bins between low and high. All 0 beside rows where these
            were read from a file of before there were any; then they stay unknown.
        fine_inside: fp32 [F, 32], sum of the positions within the bin.
        fine_squares: fp32 [F, 32], sum of their squares.
        digits: int32 [F], significant binary digits that the values need: at most 8 where they are bf16, 0
            while all were 0; 24, as fp32 has, where they were read from a file without.
    """

    counts: Tensor
    inside: Tensor
    inside_squares: Tensor
    origin: Tensor
    low: Tensor
    high: Tensor
    fine_counts: Tensor
    fine_inside: Tensor
    fine_squares: Tensor
    digits: Tensor

    @classmethod
    def empty(cls, features: int, device: torch.device | str = "cpu") -> Marginals:
        """The statistics of no rows."""
        return cls(
            counts=torch.zeros(features, MARGINAL_BINS, dtype=torch.int32, device=device),
            inside=torch.zeros(features, MARGINAL_BINS, device=device),
            inside_squares=torch.zeros(features, MARGINAL_BINS, device=device),
            origin=torch.full((features,), _LOWEST_ORIGIN, dtype=torch.int32, device=device),
            low=torch.zeros(features, device=device),
            high=torch.zeros(features, device=device),
            digits=torch.zeros(features, dtype=torch.int32, device=device),
            **_no_fine_bins(features, device),
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Marginals:
        """The inverse of `tensors`; the even bins and the digits may be missing.

        Raises:
            TypeError: where other tensors are missing or unknown.
        """
        origin = tensors.get("origin")
        unknown = {} if origin is None else _no_fine_bins(origin.numel(), origin.device)
        if origin is not None:
            unknown["digits"] = torch.full_like(origin, FP32_DIGITS)
        return cls(**(unknown | dict(tensors)))

    @classmethod
    def of(cls, x: Tensor) -> Marginals:
        """The statistics of the rows of x [rows, F]; no host synchronisation.

        Raises:
            UsageError: if x is not 2-D.
        """
        if x.dim() != 2:
            raise UsageError(f"Marginals.of takes [rows, features], got shape {tuple(x.shape)}")
        rows, features = x.shape
        if rows == 0 or features == 0:
            return cls.empty(features, x.device)
        wide = x.float()
        good = (wide.abs() < torch.inf).all(dim=1, keepdim=True)
        kept = torch.where(good, wide, 0.0)
        any_row = good.any()
        magnitude = kept.abs()
        origin = half_octave(magnitude.amax(dim=0))
        low = torch.where(any_row, torch.where(good, kept, torch.inf).amin(dim=0), 0.0)
        high = torch.where(any_row, torch.where(good, kept, -torch.inf).amax(dim=0), 0.0)
        exponent = fine_exponent(low, high)
        sums = torch.zeros(3, features, MARGINAL_BINS, dtype=torch.int64, device=x.device)
        fine = torch.zeros(3, features, FINE_BINS, dtype=torch.int64, device=x.device)
        for first in range(0, rows, _ROWS_A_WORD):
            part = slice(first, first + _ROWS_A_WORD)
            sums += _bin_sums(kept[part], magnitude[part], good[part], origin)
            fine += fine_sums(kept[part], good[part], low, exponent)
        return cls(
            counts=sums[0].to(torch.int32),
            inside=sums[1].float() / STEPS,
            inside_squares=(sums[2].double() / STEPS**2).float(),
            origin=origin,
            low=low,
            high=high,
            fine_counts=fine[0].to(torch.int32),
            fine_inside=fine[1].float() / STEPS,
            fine_squares=(fine[2].double() / STEPS**2).float(),
            digits=digits_of(kept),
        )

    def merge(self, other: Marginals) -> Marginals:
        """The statistics of both sets of rows.

        Raises:
            UsageError: if they are of different numbers of features.
        """
        if self.features != other.features:
            raise UsageError(
                f"marginals of {self.features} and of {other.features} features cannot be merged"
            )
        origin = torch.maximum(self.origin, other.origin)
        mine, theirs = self._has_rows(), other._has_rows()
        # Without rows the bounds are 0 and say nothing: the other side's hold.
        low = torch.minimum(torch.where(mine, self.low, other.low), torch.where(theirs, other.low, self.low))
        high = torch.maximum(
            torch.where(mine, self.high, other.high), torch.where(theirs, other.high, self.high)
        )
        mine_seen, theirs_seen = self._seen_from(origin), other._seen_from(origin)
        bins = (low, fine_exponent(low, high))
        fine = [a + b for a, b in zip(self._fine_in(bins), other._fine_in(bins), strict=True)]
        return Marginals(
            counts=mine_seen[0] + theirs_seen[0],
            inside=mine_seen[1] + theirs_seen[1],
            inside_squares=mine_seen[2] + theirs_seen[2],
            origin=origin,
            low=low,
            high=high,
            fine_counts=fine[0],
            fine_inside=fine[1],
            fine_squares=fine[2],
            digits=torch.maximum(self.digits, other.digits),
        )

    def quantile(self, u: Tensor) -> Tensor:
        """The values below which a share u [rows, F] of each feature lies; fp32 [rows, F], u in [0, 1].

        Within a bin values are taken as `stretches` has them, and rounded to as many digits as were seen:
        what bf16 values round to in FP8 is decided by ties. Zeros come back exact. A feature without rows
        gives 0.
        """
        return rounded(self.stretches().quantile(u), self.digits)

    def stretches(self) -> Stretches:
        """Between which values how many of the rows lie, within [low, high]; 128 stretches a feature."""
        exponent = fine_exponent(self.low, self.high)
        inner, outer, negative = fine_bounds(self.low, exponent)
        known = (self.fine_counts.sum(dim=1) == self.counts.sum(dim=1))[:, None]
        width = power_of_two(exponent)[:, None]
        beyond = known & (inner >= _INNER_BINS * width)
        even = self._values(inner, outer, negative, (self.fine_counts, self.fine_inside, self.fine_squares))
        below, above = (torch.where(beyond & side, self.fine_counts, 0) for side in (negative, ~negative))
        kept, halves = self._half_octaves(_INNER_BINS * width)
        within = torch.where(kept | ~known, self.counts, 0)
        return Stretches(
            torch.cat([below, within, above], dim=1).double(),
            *(torch.cat([a, b, a], dim=1) for a, b in zip(even, halves, strict=True)),
        )

    def _half_octaves(self, bound: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Of the half octaves [F, 64]: whether they lie within a bound fp64 [F, 1], and their stretches."""
        bins = torch.arange(MARGINAL_BINS, device=self.counts.device)
        half = self.origin[:, None].double() - torch.where(bins > _ZERO, MARGINAL_BINS - 1 - bins, bins)
        inner, outer = torch.exp2(half / 2), torch.exp2((half + 1) / 2)
        zero, innermost = bins == _ZERO, (bins - _ZERO).abs() == 1
        inner = torch.where(innermost, 0.0, inner)
        sums = (self.counts, self.inside, self.inside_squares)
        edges = self._values(inner, outer, bins < _ZERO, sums, unknown=innermost)
        start, mean, stop = (torch.where(zero, 0.0, edge) for edge in edges)
        return zero | innermost | (half < 2 * torch.log2(bound)), (start, mean, stop)

    def _values(
        self,
        inner: Tensor,
        outer: Tensor,
        negative: Tensor,
        sums: tuple[Tensor, Tensor, Tensor],
        *,
        unknown: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Start, mean and stop of the values in bins, fp64.

        Args:
            inner: Smaller magnitude of the bins.
            outer: Larger one.
            negative: Whether their values are below 0.
            sums: Counts, positions and their squares.
            unknown: Bins without positions, which are taken as uniform.
        """
        count = sums[0].double().clamp(min=1)
        share = sums[1].double() / count
        variance = (sums[2].double() / count - share.square()).clamp(min=0)
        width = outer - inner
        mean = inner + (share + 0.5 / STEPS) * width  # positions were rounded down
        near, far, middle = (torch.where(negative, -m, m) for m in (inner, outer, mean))
        low, high = self.low[:, None].double(), self.high[:, None].double()
        left, right = (torch.minimum(torch.maximum(e, low), high) for e in _in_order(near, far))
        middle = torch.minimum(torch.maximum(middle, left), right)
        variance = variance * width.square()
        if unknown is not None:
            middle = torch.where(unknown, (left + right) / 2, middle)
            variance = torch.where(unknown, torch.inf, variance)
        start, stop = shortened(left, middle, right, variance)
        return start, middle, stop

    @property
    def features(self) -> int:
        """F."""
        return self.origin.numel()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Name to tensor, for saving."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to(self, device: torch.device | str) -> Marginals:
        """A copy on another device."""
        return Marginals(**{name: t.to(device) for name, t in self.tensors().items()})

    def _fine_in(self, bins: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of the even bins in those of this smallest value and exponent."""
        own = (self.low, fine_exponent(self.low, self.high))
        # Without rows the bounds are 0, which the bins wanted need not hold: nothing is moved then.
        rows = self._has_rows()
        low, exponent = (torch.where(rows, a, b) for a, b in zip(own, bins, strict=True))
        sums = (self.fine_counts, self.fine_inside, self.fine_squares)
        return rebinned(sums, (low, exponent), bins)

    def _has_rows(self) -> Tensor:
        return self.counts.sum(dim=1) > 0

    def _seen_from(self, origin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sums with a higher origin: every non-zero bin moves inwards, the innermost takes the rest."""
        bins = torch.arange(MARGINAL_BINS, device=self.counts.device)
        shift = (origin - self.origin)[:, None]
        inwards = torch.where(
            bins > _ZERO, (bins - shift).clamp(min=_ZERO + 1), (bins + shift).clamp(max=_ZERO - 1)
        )
        target = torch.where(bins == _ZERO, _ZERO, inwards).long()
        known = ((target - _ZERO).abs() > 1).float()  # the innermost bins keep no positions
        return (
            torch.zeros_like(self.counts).scatter_add_(1, target, self.counts),
            torch.zeros_like(self.inside).scatter_add_(1, target, self.inside * known),
            torch.zeros_like(self.inside).scatter_add_(1, target, self.inside_squares * known),
        )


def _in_order(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.minimum(a, b), torch.maximum(a, b)


def _no_fine_bins(features: int, device: torch.device | str) -> dict[str, Tensor]:
    return {
        "fine_counts": torch.zeros(features, FINE_BINS, dtype=torch.int32, device=device),
        "fine_inside": torch.zeros(features, FINE_BINS, device=device),
        "fine_squares": torch.zeros(features, FINE_BINS, device=device),
    }


def _bin_sums(kept: Tensor, magnitude: Tensor, good: Tensor, origin: Tensor) -> Tensor:
    """int64 [3, F, 64] of rows [rows <= 2,048, F]: counts, positions in 1/256, their squares; one scatter.

    The three go into one word, count << 46 | position << 27 | square: 2,048 * 255^2 is below 2^27 and
    2,048 * 255 below 2^19.
    """
    features = origin.numel()
    half = half_octave(magnitude)
    depth = origin - half
    bins = torch.where(kept > 0, (MARGINAL_BINS - 1 - depth).clamp(min=_ZERO + 1), depth.clamp(max=_ZERO - 1))
    bins = torch.where(kept == 0, _ZERO, bins)
    inner = torch.exp2(half * 0.5)
    position = ((magnitude / inner - 1) * (STEPS / (2**0.5 - 1))).clamp(0, STEPS - 1).long()
    position = torch.where((bins - _ZERO).abs() > 1, position, 0)
    word = torch.where(good, (1 << 46) + (position << 27) + position * position, 0)
    places = bins + torch.arange(features, dtype=torch.int32, device=bins.device) * MARGINAL_BINS
    sums = torch.zeros(features * MARGINAL_BINS, dtype=torch.int64, device=bins.device)
    sums.scatter_add_(0, places.flatten().long(), word.flatten())
    packed = sums.view(features, MARGINAL_BINS)
    return torch.stack([packed >> 46, (packed >> 27) & (2**19 - 1), packed & (2**27 - 1)])
