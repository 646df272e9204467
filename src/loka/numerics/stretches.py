"""Distributions of features as stretches: of each the count, where it starts, its mean and where it stops.

A stretch is uniform from its start to its mean m and, at another height, from there to its stop, both parts
with the mean that they have together: with r and s the lengths before and after m, a share s / (r + s) lies
before it, and the variance is r s / 3. So a bin that reaches from a to b is left with the mean of its values,
and shortened around it by sqrt(3 V / ((m - a)(b - m))), where that is below 1, with their variance V too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Stretches", "shortened"]


def shortened(left: Tensor, mean: Tensor, right: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Start and stop of stretches in bins from left to right with this mean and variance, element by element.

    A variance above (mean - left) (right - mean) / 3 keeps the whole bin.
    """
    most = ((mean - left) * (right - mean) / 3).clamp(min=1e-300)
    part = (variance / most).sqrt().clamp(max=1)
    return mean - part * (mean - left), mean + part * (right - mean)


@dataclass(frozen=True, slots=True)
class Stretches:
    """Of F features, S stretches each in rising order; fp64 [F, S].

    Attributes:
        counts: Rows in each.
        start: Smallest value.
        mean: Mean of the values.
        stop: Largest value.
    """

    counts: Tensor
    start: Tensor
    mean: Tensor
    stop: Tensor

    @property
    def shares(self) -> Tensor:
        """fp64 [F, S], counts as shares of the feature's; 0 where it has none."""
        return self.counts / self.counts.sum(dim=1, keepdim=True).clamp(min=1)

    def quantile(self, u: Tensor) -> Tensor:
        """The values below which a share u [rows, F] of each feature lies; fp32 [rows, F], u in [0, 1]."""
        below = self.counts.cumsum(dim=1)
        wanted = (u.t().double() * below[:, -1:]).clamp(min=0).contiguous()
        # The first whose cumulated count exceeds what is wanted; at u = 1 the last with anything in it.
        found = torch.searchsorted(below, wanted, right=True)
        last = self.counts.shape[1] - 1 - self.counts.flip(1).ne(0).int().argmax(dim=1, keepdim=True)
        found = torch.minimum(found, last)
        inside = self.counts.gather(1, found)
        part = ((wanted - (below.gather(1, found) - inside)) / inside.clamp(min=1)).clamp(0, 1)
        start, mean, stop = (edge.gather(1, found) for edge in (self.start, self.mean, self.stop))
        length = stop - start
        before = torch.where(length > 0, (stop - mean) / length.clamp(min=1e-300), 1.0)
        first = start + (mean - start) * part / before.clamp(min=1e-300)
        second = mean + (stop - mean) * (part - before) / (1 - before).clamp(min=1e-300)
        return torch.where(part <= before, first, second).float().t()
