"""The scale that a row's elements share: gradients of rare labels, dense features over six decades.

Rows of one direction and very different length are no Gaussian copula: its features agree in rank, but not in
how far out they are. An elliptical one has a scale a row, z = s g with g correlated normal numbers. The scale
comes from the histogram of the rows' amax, less what normal rows of that correlation scatter by themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.numerics.moments import HISTOGRAM_MIN_EXPONENT

__all__ = ["RowScales", "octaves_apart"]

_TABLE = 4096
_LEAST_OCTAVES = 0.5  # a scale that scatters less than this (standard deviation) is taken as none


@dataclass(frozen=True, slots=True)
class RowScales:
    """A discrete distribution of row scales. All on the CPU, fp64.

    Attributes:
        levels: [L], rising scales around 1.
        weights: [L], their shares; they add up to 1.
    """

    levels: Tensor
    weights: Tensor

    @classmethod
    def none(cls) -> RowScales:
        """One scale for all rows: the Gaussian copula."""
        one = torch.ones(1, dtype=torch.float64)
        return cls(one, one)

    @classmethod
    def of(cls, row_exponents: Tensor, normal_rows: Tensor) -> RowScales:
        """Fit to the rows' amax.

        Args:
            row_exponents: int64 [bins], histogram of floor(log2 amax) of the real rows.
            normal_rows: [n, F], normal rows of the same covariance.
        """
        counts = row_exponents.cpu().double()
        amax = normal_rows.abs().amax(dim=1)
        own = torch.log2(amax[amax > 0]).floor().double()
        if counts.sum() < 2 or own.numel() < 2:
            return cls.none()
        weights = counts / counts.sum()
        bins = torch.arange(counts.numel(), dtype=torch.float64)
        mean = (weights * bins).sum()
        seen = (weights * (bins - mean).square()).sum()
        left = seen - own.var()
        if left < _LEAST_OCTAVES**2:
            return cls.none()
        kept = weights > 0
        levels = torch.exp2((bins - mean) * (left / seen).sqrt())
        return cls(levels[kept], weights[kept])

    @property
    def is_none(self) -> bool:
        """Whether all rows have one scale."""
        return self.levels.numel() == 1

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """Scales fp64 [rows, 1] on the CPU."""
        u = torch.rand(rows, 1, generator=generator, dtype=torch.float64)
        place = torch.searchsorted(self.weights.cumsum(0), u).clamp(max=self.levels.numel() - 1)
        return self.levels.index_select(0, place.flatten()).view_as(u)

    def cdf(self, z: Tensor) -> Tensor:
        """P(s g <= z), fp64, for one feature; any shape and device.

        Many numbers go through a table (off by less than 1e-5): a normal distribution function for each level
        costs more.
        """
        if z.numel() <= 2 * _TABLE or self.is_none:
            return self._exact_cdf(z)
        grid, table = (t.to(z.device) for t in self._table())
        wide = z.double().contiguous()
        place = torch.searchsorted(grid, wide).clamp(1, grid.numel() - 1)
        start, below = grid[place - 1], table[place - 1]
        part = ((wide - start) / (grid[place] - start)).clamp(0, 1)
        return torch.lerp(below, table[place], part)

    def _exact_cdf(self, z: Tensor) -> Tensor:
        out = torch.zeros_like(z, dtype=torch.float64)
        for level, weight in zip(self.levels.tolist(), self.weights.tolist(), strict=True):
            out += weight * torch.special.ndtr(z.double() / level)
        return out

    def quantile(self, u: Tensor) -> Tensor:
        """The z with cdf(z) = u, fp64; +-inf at 0 and 1. From a table, linear in between."""
        if self.is_none:
            return torch.as_tensor(torch.special.ndtri(u.double()) * self.levels[0])
        grid, table = self._table()
        place = torch.searchsorted(table, u.double().contiguous()).clamp(1, grid.numel() - 1)
        below, above = table[place - 1], table[place]
        part = ((u - below) / (above - below).clamp(min=1e-300)).clamp(0, 1)
        z = grid[place - 1] + part * (grid[place] - grid[place - 1])
        z = torch.where(u <= 0, torch.full_like(z, -torch.inf), z)
        return torch.where(u >= 1, torch.full_like(z, torch.inf), z)

    def _table(self) -> tuple[Tensor, Tensor]:
        """Rising z of both signs, evenly spaced in their logarithm, and the distribution function there."""
        least, largest = 1e-3 * float(self.levels.min()), 12 * float(self.levels.max())
        positive = torch.logspace(math.log10(least), math.log10(largest), _TABLE, dtype=torch.float64)
        grid = torch.cat([-positive.flip(0), torch.zeros(1, dtype=torch.float64), positive])
        return grid, self._exact_cdf(grid)


def octaves_apart(row_exponents: Tensor, rows: Tensor) -> float:
    """How far the amax of rows [n, F] is from a histogram int64 [bins] of floor(log2 amax), in octaves.

    The Wasserstein distance of the two distributions: the mean octaves that the amax of a row must move.
    """
    seen = row_exponents.cpu().double()
    amax = rows.abs().amax(dim=1).cpu()
    octave = torch.log2(amax[amax > 0]).floor().long() - HISTOGRAM_MIN_EXPONENT
    drawn = torch.bincount(octave.clamp(0, seen.numel() - 1), minlength=seen.numel()).double()
    shares = [counts / counts.sum().clamp(min=1) for counts in (seen, drawn)]
    return float((shares[0].cumsum(0) - shares[1].cumsum(0)).abs().sum())
