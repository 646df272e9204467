"""Mergeable statistics of an operand, bounded in bytes.

merge(a, b) equals the statistics of both. Means and scatter follow Chan, Golub and LeVeque (1979), the
batched form of Welford's update: with batch mean mu_b, n' = n + B and d = mu_b - mu,

    mu' = mu + (B / n') d        M2' = M2 + M2_b + (n B / n') d^2

Rows with a non-finite element are counted and left out, so one bad row cannot poison a feature.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from loka.errors import UsageError

__all__ = ["HISTOGRAM_BINS", "HISTOGRAM_MIN_EXPONENT", "Moments"]

HISTOGRAM_BINS = 64
HISTOGRAM_MIN_EXPONENT = -48  # bin i holds magnitudes in [2^(i - 48), 2^(i - 47)); ends are open

_FIELDS, _BIAS = 256, 127  # of an fp32 exponent
_BLOCK = 2**16  # elements that a CPU takes at once, so that what lies between stays in its caches


@dataclass(slots=True)
class Moments:
    """Statistics of rows of F features. All tensors live on the data's device.

    Attributes:
        count: int64 (), rows that entered.
        mean: fp64 [F].
        m2: fp64 [F], sum of squared deviations from the mean.
        amax: fp32 [F], largest magnitude of each feature.
        zeros: int64 (), exact zeros.
        negatives: int64 (), elements below 0 (fast accumulation is biased on one-signed data).
        exponents: int64 [64], histogram of floor(log2 |x|) of the non-zero elements. A GPU looks at an eighth
            of the rows of large tensors (over 4 Mi elements), spread evenly: read it as shares.
        row_exponents: int64 [64], histogram of floor(log2 amax) of the rows that are not all zero; likewise.
        nonfinite_rows: int64 (), rows left out.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    amax: Tensor
    zeros: Tensor
    negatives: Tensor
    exponents: Tensor
    row_exponents: Tensor
    nonfinite_rows: Tensor

    @classmethod
    def empty(cls, features: int, device: torch.device | str = "cpu") -> Moments:
        """Statistics of no rows."""

        def count() -> Tensor:
            return torch.zeros((), dtype=torch.int64, device=device)

        return cls(
            count=count(),
            mean=torch.zeros(features, dtype=torch.float64, device=device),
            m2=torch.zeros(features, dtype=torch.float64, device=device),
            amax=torch.zeros(features, device=device),
            zeros=count(),
            negatives=count(),
            exponents=torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device),
            row_exponents=torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device),
            nonfinite_rows=count(),
        )

    @classmethod
    def of(cls, x: Tensor) -> Moments:
        """Statistics of the rows of x [rows, F], any float or integer dtype; no host synchronisation.

        Raises:
            UsageError: if x is not 2-D.
        """
        if x.dim() != 2:
            raise UsageError(f"Moments.of takes [rows, features], got shape {tuple(x.shape)}")
        if x.numel() == 0:
            return replace(cls.empty(x.shape[1], x.device), count=_count(x.shape[0], x.device))
        rows = max(1, _BLOCK // x.shape[1])
        if x.device.type == "cpu" and x.shape[0] > rows:
            return functools.reduce(Moments.merge, map(cls._of_block, x.split(rows)))
        return cls._of_block(x)

    @classmethod
    def _of_block(cls, x: Tensor) -> Moments:
        wide = x.float()
        magnitude = wide.abs()
        row_amax = magnitude.amax(dim=1)  # NaN where the row has one
        good = row_amax < torch.inf
        kept = torch.where(good[:, None], wide, 0.0)
        n = good.sum()
        mean = kept.sum(dim=0, dtype=torch.float64) / n.clamp(min=1)
        deviation = torch.where(good[:, None], kept - mean, 0.0)  # fp64: fp32 - fp64
        exponents = _exponent_histogram(kept)
        return cls(
            count=n,
            mean=mean,
            m2=deviation.square_().sum(dim=0),
            amax=kept.abs().amax(dim=0),
            zeros=n * x.shape[1] - exponents.sum(),
            negatives=(kept < 0).sum(),
            exponents=exponents,
            row_exponents=_exponent_histogram(torch.where(good, row_amax, 0.0)),
            nonfinite_rows=(~good).sum(),
        )

    def merge(self, other: Moments) -> Moments:
        """The statistics of both sets of rows; exact but for the rounding of fp64.

        Raises:
            UsageError: if they are of different numbers of features.
        """
        if self.mean.shape != other.mean.shape:
            raise UsageError(
                f"moments of {self.mean.numel()} and of {other.mean.numel()} features cannot be merged"
            )
        total = self.count + other.count
        delta = other.mean - self.mean
        share = other.count.double() / total.clamp(min=1)  # whole / whole would be FP32
        return Moments(
            count=total,
            mean=self.mean + share * delta,
            m2=self.m2 + other.m2 + delta.square() * (self.count * share),
            amax=torch.maximum(self.amax, other.amax),
            zeros=self.zeros + other.zeros,
            negatives=self.negatives + other.negatives,
            exponents=self.exponents + other.exponents,
            row_exponents=self.row_exponents + other.row_exponents,
            nonfinite_rows=self.nonfinite_rows + other.nonfinite_rows,
        )

    @property
    def std(self) -> Tensor:
        """fp64 [F], sample standard deviation (0 below two rows)."""
        return (self.m2 / (self.count - 1).clamp(min=1)).sqrt()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Name to tensor, for saving."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to(self, device: torch.device | str) -> Moments:
        """A copy on another device."""
        return Moments(**{name: t.to(device) for name, t in self.tensors().items()})


def _count(rows: int, device: torch.device) -> Tensor:
    return torch.full((), rows, dtype=torch.int64, device=device)


def _exponent_histogram(x: Tensor) -> Tensor:
    """Of fp32 x, whose bits hold the exponent; zeros are left out."""
    bits = x.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF)
    field = (bits >> 23).flatten()
    if x.device.type == "cpu":  # elsewhere `bincount` would wait for the device
        weight = torch.bincount(field.to(torch.uint8), minlength=_FIELDS)
        weight[0] -= (bits == 0).sum()
        places = torch.arange(_FIELDS)
    else:
        weight, places = (bits != 0).flatten().long(), field.long()
    places = (places - _BIAS - HISTOGRAM_MIN_EXPONENT).clamp(0, HISTOGRAM_BINS - 1)
    return torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=x.device).scatter_add_(0, places, weight)
