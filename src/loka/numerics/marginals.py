"""Mergeable histograms of every feature of an operand, 64 bins each, bounded in bytes.

Bins are half octaves of both signs and one bin for exact zeros, in rising order of the value:

    bin 0 ... 30  negative, magnitude falling     bin 31  exactly 0     bin 32 ... 63  positive, rising

A feature's `origin` is the half octave floor(2 log2 |x|) of its largest magnitude, which belongs to bins 0
and 63. The innermost bins (30 and 32) also hold everything smaller, 15 octaves below the largest. Merging
shifts the histogram with the lower origin by whole bins, so it is exact: counts do not depend on how rows
were split.

A half octave is 41 % wide, and where values lie in it decides how FP8 rounds them: a feature that takes few
values would be smeared. So each bin but the innermost also keeps the first two moments of the position in it,
0 at its smaller magnitude and 1 at its larger one, in steps of 1/256.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from loka.errors import UsageError

__all__ = ["MARGINAL_BINS", "Marginals", "half_octave"]

MARGINAL_BINS = 64
_ZERO = 31  # the bin of exact zeros; 31 half octaves below it, 32 above
_LOWEST_ORIGIN = -400  # below the half octave of the smallest fp32 subnormal, -298
_SQRT_HALF = 0.5**0.5
_STEPS = 256  # of the position within a bin
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
    """

    counts: Tensor
    inside: Tensor
    inside_squares: Tensor
    origin: Tensor
    low: Tensor
    high: Tensor

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
        )

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
        sums = torch.zeros(3, features, MARGINAL_BINS, dtype=torch.int64, device=x.device)
        for first in range(0, rows, _ROWS_A_WORD):
            part = slice(first, first + _ROWS_A_WORD)
            sums += _bin_sums(kept[part], magnitude[part], good[part], origin)
        return cls(
            counts=sums[0].to(torch.int32),
            inside=sums[1].float() / _STEPS,
            inside_squares=(sums[2].double() / _STEPS**2).float(),
            origin=origin,
            low=torch.where(any_row, torch.where(good, kept, torch.inf).amin(dim=0), 0.0),
            high=torch.where(any_row, torch.where(good, kept, -torch.inf).amax(dim=0), 0.0),
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
        return Marginals(
            counts=mine_seen[0] + theirs_seen[0],
            inside=mine_seen[1] + theirs_seen[1],
            inside_squares=mine_seen[2] + theirs_seen[2],
            origin=origin,
            low=low,
            high=high,
        )

    def quantile(self, u: Tensor) -> Tensor:
        """The values below which a share u [rows, F] of each feature lies; fp32 [rows, F], u in [0, 1].

        Within a bin values are taken as uniform over `spans`; zeros come back exact. A feature without rows
        gives 0.
        """
        total = self.counts.sum(dim=1, keepdim=True)
        below = self.counts.cumsum(dim=1)
        wanted = (u.t().to(torch.float64) * total).clamp(min=0).contiguous()
        # The first bin whose cumulated count exceeds what is wanted; at u = 1 the last with anything in it.
        found = torch.searchsorted(below.double(), wanted, right=True)
        last = MARGINAL_BINS - 1 - self.counts.flip(1).ne(0).int().argmax(dim=1, keepdim=True)
        found = torch.minimum(found, last)
        inside = self.counts.gather(1, found)
        part = (wanted - (below.gather(1, found) - inside)) / inside.clamp(min=1)
        left, right = self.spans()
        start, stop = left.gather(1, found), right.gather(1, found)
        return (start + part.clamp(0, 1) * (stop - start)).float().t()

    def spans(self) -> tuple[Tensor, Tensor]:
        """fp64 [F, 64] each: where the values of a bin start and end, within [low, high].

        A uniform stretch with the mean and deviation of the positions in the bin, as far as the bin reaches;
        the innermost bins are uniform down to 0.
        """
        bins = torch.arange(MARGINAL_BINS, device=self.counts.device)
        positive = bins > _ZERO
        depth = torch.where(positive, MARGINAL_BINS - 1 - bins, bins)
        half = self.origin[:, None].double() - depth
        inner, outer = torch.exp2(half / 2), torch.exp2((half + 1) / 2)
        innermost = (bins == _ZERO - 1) | (bins == _ZERO + 1)
        inner = torch.where(innermost, 0.0, inner)
        count = self.counts.clamp(min=1)
        share = self.inside.double() / count
        variance = (self.inside_squares.double() / count - share.square()).clamp(min=0)
        mean = torch.where(innermost, 0.5, share + 0.5 / _STEPS)  # positions were rounded down
        reach = torch.where(
            innermost, 0.5, torch.minimum((3 * variance).sqrt(), torch.minimum(mean, 1 - mean))
        )
        near, far = inner + (mean - reach) * (outer - inner), inner + (mean + reach) * (outer - inner)
        zero = bins == _ZERO
        left = torch.where(zero, 0.0, torch.where(positive, near, -far))
        right = torch.where(zero, 0.0, torch.where(positive, far, -near))
        low, high = self.low[:, None].double(), self.high[:, None].double()
        return torch.minimum(torch.maximum(left, low), high), torch.maximum(torch.minimum(right, high), low)

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
    position = ((magnitude / inner - 1) * (_STEPS / (2**0.5 - 1))).clamp(0, _STEPS - 1).long()
    position = torch.where((bins - _ZERO).abs() > 1, position, 0)
    word = torch.where(good, (1 << 46) + (position << 27) + position * position, 0)
    places = bins + torch.arange(features, dtype=torch.int32, device=bins.device) * MARGINAL_BINS
    sums = torch.zeros(features * MARGINAL_BINS, dtype=torch.int64, device=bins.device)
    sums.scatter_add_(0, places.flatten().long(), word.flatten())
    packed = sums.view(features, MARGINAL_BINS)
    return torch.stack([packed >> 46, (packed >> 27) & (2**19 - 1), packed & (2**27 - 1)])
