"""Mergeable covariance of rows, bounded in bytes: full for narrow operands, sketched for wide ones.

With C = sum_i (x_i - mean)(x_i - mean)^T over the rows, an operand of up to 2,048 features keeps C itself. A
wider one keeps Y = C @ Omega with a fixed test matrix Omega [F, 128] of random signs: linear in C, so merging
stays exact, and enough for the Nystroem approximation C ~= Y (Omega^T Y)^-1 Y^T (Tropp, Yurtsever, Udell and
Cevher 2017, "Fixed-rank approximation of a positive-semidefinite matrix from streaming data"), which is taken
only when rows are drawn. Two sets of rows merge by Chan, Golub and LeVeque (1979):

    C' = C_a + C_b + (n_a n_b / n') d d^T        d = mean_b - mean_a

so a sketch gains (n_a n_b / n') d (d^T Omega).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.numerics.exact import exact_products

__all__ = ["FULL_FEATURES", "RANK", "SKETCH", "Covariance", "sketch_signs"]

FULL_FEATURES = 2048  # up to here all F x F elements are kept (decision 7)
SKETCH = 128  # columns of the test matrix: twice the rank, as its error bounds ask
LARGEST = 2.0**48  # a row with a larger element is left out: fp32 squares of such overflow when summed up
RANK = 64  # directions kept of a wide operand when rows are drawn

_WORD = 64


@dataclass(slots=True)
class Covariance:
    """Second moments of rows of F features. All tensors live on the data's device.

    Attributes:
        count: int64 (), rows that entered; left out are rows with an element that is not finite or at least
            2^48, whose squares would overflow.
        mean: fp64 [F].
        m2: fp64 [F], sum of squared deviations: the diagonal of C.
        scatter: fp32 [F, F], C itself; or [F, 128], C @ Omega, above 2,048 features.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    scatter: Tensor

    @classmethod
    def empty(cls, features: int, device: torch.device | str = "cpu") -> Covariance:
        """The statistics of no rows."""
        columns = features if features <= FULL_FEATURES else SKETCH
        return cls(
            count=torch.zeros((), dtype=torch.int64, device=device),
            mean=torch.zeros(features, dtype=torch.float64, device=device),
            m2=torch.zeros(features, dtype=torch.float64, device=device),
            scatter=torch.zeros(features, columns, device=device),
        )

    @classmethod
    def of(cls, x: Tensor) -> Covariance:
        """The statistics of the rows of x [rows, F]; two products, no host synchronisation.

        Raises:
            UsageError: if x is not 2-D.
        """
        if x.dim() != 2:
            raise UsageError(f"Covariance.of takes [rows, features], got shape {tuple(x.shape)}")
        features = x.shape[1]
        if x.shape[0] == 0:
            return cls.empty(features, x.device)
        wide = x.float()
        good = (wide.abs() < LARGEST).all(dim=1, keepdim=True)
        n = good.sum()
        kept = torch.where(good, wide, 0.0)
        mean = kept.sum(dim=0, dtype=torch.float64) / n.clamp(min=1)
        # Taken off in two fp32 steps, so that a large mean costs no digits of a small spread.
        coarse = mean.float()
        deviation = torch.where(good, (kept - coarse) - (mean - coarse).float(), 0.0)
        with exact_products(x.device.type):  # whatever the process allows its own
            if features <= FULL_FEATURES:
                scatter = deviation.t() @ deviation
            else:
                scatter = deviation.t() @ (deviation @ sketch_signs(features, x.device))
        return cls(
            count=n,
            mean=mean,
            m2=deviation.square().sum(dim=0, dtype=torch.float64),
            scatter=scatter,
        )

    def merge(self, other: Covariance) -> Covariance:
        """The statistics of both sets of rows.

        Raises:
            UsageError: if they are of different numbers of features.
        """
        if self.features != other.features:
            raise UsageError(
                f"covariances of {self.features} and of {other.features} features cannot be merged"
            )
        total = self.count + other.count
        delta = other.mean - self.mean
        share = other.count.double() / total.clamp(min=1)
        weight = self.count * share
        between = delta * weight.sqrt()
        with exact_products(self.scatter.device.type):
            if self.is_full:
                step = torch.outer(between, between)
            else:
                step = torch.outer(between, between @ sketch_signs(self.features, delta.device).double())
        return Covariance(
            count=total,
            mean=self.mean + share * delta,
            m2=self.m2 + other.m2 + between.square(),
            scatter=(self.scatter.double() + other.scatter + step).float(),
        )

    @property
    def features(self) -> int:
        """F."""
        return self.mean.numel()

    @property
    def is_full(self) -> bool:
        """Whether `scatter` is C itself, not its sketch."""
        return self.features <= FULL_FEATURES

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Name to tensor, for saving."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to(self, device: torch.device | str) -> Covariance:
        """A copy on another device."""
        return Covariance(**{name: t.to(device) for name, t in self.tensors().items()})


def sketch_signs(features: int, device: torch.device | str = "cpu") -> Tensor:
    """Omega, fp32 [F, 128]: signs that look random and follow from the position alone.

    They are the bits of a hash (the finaliser of splitmix64, Steele, Lea and Flood 2014) of the position, so
    every device and every run has the same ones and nothing is kept between calls.
    """
    words = torch.arange(features * (SKETCH // _WORD), dtype=torch.int64, device=device) + 1
    bits = _mixed(words * -7046029254386353131)  # 0x9E3779B97F4A7C15: the odd number nearest 2^64 / golden
    shifts = torch.arange(_WORD, dtype=torch.int64, device=device)
    signs = (bits[:, None] >> shifts) & 1
    return (2 * signs - 1).float().view(features, SKETCH)


def _mixed(bits: Tensor) -> Tensor:
    """Splitmix64's finaliser on int64, whose products wrap around as the unsigned ones do."""
    bits = (bits ^ _shifted(bits, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    bits = (bits ^ _shifted(bits, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical shift to the right; torch's shift of int64 repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
