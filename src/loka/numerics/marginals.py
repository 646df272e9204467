"""Mergeable histograms of every feature of an operand, 64 bins each, bounded in bytes.

Bins are half octaves of both signs and one bin for exact zeros, in rising order of the value:

    bin 0 ... 30  negative, magnitude falling     bin 31  exactly 0     bin 32 ... 63  positive, rising

A feature's `origin` is the half octave floor(2 log2 |x|) of its largest magnitude, which belongs to bins 0
and 63. The innermost bins (30 and 32) also hold everything smaller, 15 octaves below the largest. Merging
shifts the histogram with the lower origin by whole bins, so it is exact: counts do not depend on how rows
were split.
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


def half_octave(magnitude: Tensor) -> Tensor:
    """floor(2 log2 m) of positive finite fp32 magnitudes, int32; exact, from the bits. For 0 it is -400."""
    mantissa, exponent = torch.frexp(magnitude)
    upper = (mantissa >= _SQRT_HALF).to(torch.int32)
    return torch.where(magnitude > 0, 2 * (exponent.to(torch.int32) - 1) + upper, _LOWEST_ORIGIN)


@dataclass(slots=True)
class Marginals:
    """Histograms of rows of F features. All tensors live on the data's device.

    Attributes:
        counts: int32 [F, 64]; rows with a non-finite element are left out.
        origin: int32 [F], half octave of the largest magnitude; -400 while a feature was always 0.
        low: fp32 [F], smallest value; 0 while there are no rows.
        high: fp32 [F], largest value; 0 while there are no rows.
    """

    counts: Tensor
    origin: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def empty(cls, features: int, device: torch.device | str = "cpu") -> Marginals:
        """The statistics of no rows."""
        return cls(
            counts=torch.zeros(features, MARGINAL_BINS, dtype=torch.int32, device=device),
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
        origin = half_octave(kept.abs().amax(dim=0))
        depth = origin - half_octave(kept.abs())
        bins = torch.where(
            kept > 0,
            MARGINAL_BINS - 1 - depth.clamp(max=MARGINAL_BINS - 2 - _ZERO),
            depth.clamp(max=_ZERO - 1),
        )
        bins = torch.where(kept == 0, _ZERO, bins)
        places = bins + torch.arange(features, dtype=torch.int32, device=x.device) * MARGINAL_BINS
        counts = torch.zeros(features * MARGINAL_BINS, dtype=torch.int32, device=x.device)
        ones = good.to(torch.int32).expand(rows, features)
        counts.scatter_add_(0, places.flatten().long(), ones.reshape(-1))
        return cls(
            counts=counts.view(features, MARGINAL_BINS),
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
        return Marginals(
            counts=self._seen_from(origin) + other._seen_from(origin),
            origin=origin,
            low=low,
            high=high,
        )

    def quantile(self, u: Tensor) -> Tensor:
        """The values below which a share u [rows, F] of each feature lies; fp32 [rows, F], u in [0, 1].

        Within a bin values are taken as uniform, bounded by the smallest and the largest value seen; zeros
        come back exact. A feature without rows gives 0.
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
        left, right = self.edges()
        start, stop = left.gather(1, found), right.gather(1, found)
        return (start + part.clamp(0, 1) * (stop - start)).float().t()

    def edges(self) -> tuple[Tensor, Tensor]:
        """fp64 [F, 64] each: where the values of a bin start and end, within [low, high]."""
        steps = torch.arange(MARGINAL_BINS, device=self.counts.device)
        depth = torch.where(steps > _ZERO, MARGINAL_BINS - 1 - steps, steps)
        half = self.origin[:, None].double() - depth
        inner, outer = torch.exp2(half / 2), torch.exp2((half + 1) / 2)
        innermost = (steps == _ZERO - 1) | (steps == _ZERO + 1)
        inner = torch.where(innermost, 0.0, inner)
        zero = steps == _ZERO
        left = torch.where(zero, 0.0, torch.where(steps > _ZERO, inner, -outer))
        right = torch.where(zero, 0.0, torch.where(steps > _ZERO, outer, -inner))
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

    def _seen_from(self, origin: Tensor) -> Tensor:
        """The counts with a higher origin: every non-zero bin moves inwards, the innermost takes the rest."""
        steps = torch.arange(MARGINAL_BINS, device=self.counts.device)
        shift = (origin - self.origin)[:, None]
        inwards = torch.where(
            steps > _ZERO, (steps - shift).clamp(min=_ZERO + 1), (steps + shift).clamp(max=_ZERO - 1)
        )
        target = torch.where(steps == _ZERO, _ZERO, inwards)
        return torch.zeros_like(self.counts).scatter_add_(1, target.long(), self.counts)
