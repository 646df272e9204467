"""Elliptical copula: the learned marginals of every feature, held together by correlated numbers.

    x_f = Q_f(F(s z_f))        z ~ N(0, R)

Q_f is the quantile function of feature f (exact zeros, bounded ranges, heavy tails and all), s a scale that
the elements of a row share (see `row_scales`), F the distribution function of s z_f. Without a scale it is
the Gaussian copula. Whether rows have one is decided by the amax of rows drawn with and without.

R is chosen so that x has the learned correlation, not z: squeezing z through Q_f changes it. At one scale s
the Hermite coefficients a_k(f, s) = E[Q_f(F(s z)) He_k(z)] / sqrt(k!) give, by Mehler's formula,

    Cov(x_f, x_h) = sum_k E_s[a_k(f, s) a_k(h, s)] R_fh^k - E[x_f] E[x_h]

which rises with R_fh and is solved for it pair by pair (for the Gaussian copula: Cario and Nelson 1997,
"Modeling and generating random vectors with arbitrary marginal distributions and correlation matrix").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.numerics.covariance import Covariance
from loka.numerics.marginals import Marginals
from loka.probe.distributions.correlated import CorrelatedNormal, correlation_and_std, nystroem_loadings
from loka.probe.distributions.mvn import MultivariateNormal
from loka.probe.distributions.row_scales import RowScales, octaves_apart

__all__ = ["Copula", "hermite_coefficients", "latent_correlation"]

ORDERS = 16
_ITERATIONS = 8
_PAIRS_AT_ONCE = 2**16
_NORMAL_ROWS = 512
_COMPARED_ROWS = 1024
_LEAST_IMPORTANCE = 1e-4
_ELEMENTS_AT_ONCE = 2**22  # quantiles take about 100 bytes an element meanwhile


@dataclass(slots=True)
class Copula:
    """Rows with learned marginals, correlation and row scales.

    Attributes:
        marginals: Histograms of every feature.
        normal: The correlated normal numbers behind them.
        scales: Of the rows.
    """

    marginals: Marginals
    normal: CorrelatedNormal
    scales: RowScales

    @classmethod
    def of(
        cls, covariance: Covariance, marginals: Marginals, *, row_exponents: Tensor | None = None
    ) -> Copula:
        """Fit to the statistics of the same rows: with a scale a row or without, whichever gives their amax.

        Args:
            covariance: Full, or sketched above 2,048 features; then rows have no scale of their own.
            marginals: Histograms of every feature.
            row_exponents: int64 [bins], histogram of floor(log2 amax) of the rows; None for no scale.
        """
        device = marginals.counts.device
        if covariance.is_full:
            plain = cls._with_scales(covariance, marginals, RowScales.none())
            scales = _row_scales(covariance, row_exponents)
            if row_exponents is None or scales.is_none:
                return plain
            scaled = cls._with_scales(covariance, marginals, scales)
            # Rows scatter because they share a scale or because every feature has a heavy tail of its own,
            # as one-signed lognormal ones; the marginals are the same. Which it is shows in the rows' amax.
            plain_apart, scaled_apart = (
                octaves_apart(row_exponents, copula.draw(_COMPARED_ROWS, torch.Generator().manual_seed(0)))
                for copula in (plain, scaled)
            )
            return scaled if scaled_apart < plain_apart else plain
        loadings, std = nystroem_loadings(covariance)
        # To first order a correlation is a_1(f) a_1(h) R_fh: what squeezing takes is given in advance.
        first = hermite_coefficients(marginals, RowScales.none(), orders=1)[1, :, 0].cpu()
        normal = CorrelatedNormal.of_loadings(
            loadings / (std * first).clamp(min=1e-300)[:, None], device=device
        )
        return cls(marginals, normal, RowScales.none())

    @classmethod
    def _with_scales(cls, covariance: Covariance, marginals: Marginals, scales: RowScales) -> Copula:
        device = marginals.counts.device
        correlation, std = correlation_and_std(covariance)
        coefficients = hermite_coefficients(marginals, scales)
        latent = latent_correlation(correlation, coefficients, scales.weights.to(device))
        # Features add to a product and its noise by their variance: where not every pair can have its
        # correlation, as behind a ReLU of heavy-tailed numbers, large ones keep theirs.
        importance = (std / std.max().clamp(min=1e-300)).square().clamp(min=_LEAST_IMPORTANCE)
        normal = CorrelatedNormal.of_matrix(latent, device=device, importance=importance)
        return cls(marginals, normal, scales)

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """fp32 [rows, F] on the marginals' device."""
        z = self.normal.draw(rows, generator)
        if not self.scales.is_none:
            z = z * self.scales.draw(rows, generator).float().to(z.device)
        at_once = max(_ELEMENTS_AT_ONCE // max(z.shape[1], 1), 1)
        parts = [self.marginals.quantile(self.scales.cdf(part)) for part in z.split(at_once)]
        return torch.cat(parts) if parts else z


def _row_scales(covariance: Covariance, row_exponents: Tensor | None) -> RowScales:
    if row_exponents is None:
        return RowScales.none()
    # Which normal rows is of no matter, only how they scatter; always the same ones.
    generator = torch.Generator().manual_seed(0)
    normal = MultivariateNormal.of(covariance).draw(_NORMAL_ROWS, generator).cpu()
    return RowScales.of(row_exponents, normal)


def hermite_coefficients(marginals: Marginals, scales: RowScales, *, orders: int = ORDERS) -> Tensor:
    """a_0 ... a_orders of every feature at every scale, fp64 [orders + 1, F, L].

    Of the feature with mean 0 and variance 1. A stretch counts as its mean, so Q(F(s z)) is a step function
    of z and the integrals are exact: that of He_k phi from z1 to z2 is the difference of He_(k-1) phi there.
    """
    stretches = marginals.stretches()
    share, mean = stretches.shares, stretches.mean
    centred = mean - (share * mean).sum(dim=1, keepdim=True)
    centred = centred / (share * centred.square()).sum(dim=1, keepdim=True).sqrt().clamp(min=1e-300)
    below = torch.nn.functional.pad(share.cumsum(dim=1), (1, 0)).clamp(0, 1)
    bound = scales.quantile(below.cpu()).to(below.device)
    by_level = [_coefficients_at(bound / level, centred, orders) for level in scales.levels.tolist()]
    return torch.stack(by_level, dim=2)


def _coefficients_at(bound: Tensor, values: Tensor, orders: int) -> Tensor:
    """fp64 [orders + 1, F] of step functions with `values` [F, bins] between `bound` [F, bins + 1]."""
    z = bound.clamp(-38, 38)  # phi(38) is 0 in fp64
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    previous, current = torch.zeros_like(z), torch.ones_like(z)  # He_k / sqrt(k!)
    out = [(torch.special.ndtr(bound).diff(dim=1) * values).sum(dim=1)]
    for k in range(1, orders + 1):
        steps = (current * density).diff(dim=1).neg() / math.sqrt(k)
        out.append((steps * values).sum(dim=1))
        previous, current = current, (z * current - math.sqrt(k - 1) * previous) / math.sqrt(k)
    return torch.stack(out)


def latent_correlation(correlation: Tensor, coefficients: Tensor, weights: Tensor) -> Tensor:
    """R [F, F] for which the copula has this correlation [F, F]; the nearest where none gives it.

    Newton's method kept inside a bracket, all pairs at once, a few rows of the matrix at a time so that they
    stay in the cache. What higher orders add is taken as one more odd power, with what variance a feature has
    left.

    Args:
        correlation: fp64 [F, F].
        coefficients: fp64 [orders + 1, F, L], of `hermite_coefficients`.
        weights: fp64 [L], shares of the scales.
    """
    explained = (coefficients.square() * weights).sum(dim=(0, 2))
    rest = (1 - explained).clamp(min=0).sqrt()
    weighted = coefficients * weights
    rows = max(_PAIRS_AT_ONCE // max(correlation.shape[0], 1), 1)
    parts = []
    for first in range(0, correlation.shape[0], rows):
        some = slice(first, first + rows)
        products = [a @ b.t() for a, b in zip(weighted[:, some], coefficients, strict=True)]
        products.append(torch.outer(rest[some], rest))
        parts.append(_solve(correlation[some], products))
    latent = torch.cat(parts)
    latent.diagonal().fill_(1)
    return (latent + latent.t()) / 2


def _solve(wanted: Tensor, products: list[Tensor]) -> Tensor:
    """Solve for x in [-1, 1]: sum_k products[k] x^k = wanted, element by element."""
    latent = wanted.clone()
    low, high = torch.full_like(latent, -1), torch.ones_like(latent)
    for _ in range(_ITERATIONS):
        value, slope = products[-1].clone(), torch.zeros_like(latent)
        for product in products[-2::-1]:  # Horner, highest order first
            slope.mul_(latent).add_(value)
            value.mul_(latent).add_(product)
        excess = value - wanted
        low = torch.where(excess < 0, latent, low)
        high = torch.where(excess > 0, latent, high)
        step = latent - excess / slope.clamp(min=1e-6)
        inside = (step > low) & (step < high)
        latent = torch.where(excess == 0, latent, torch.where(inside, step, (low + high) / 2))
    return latent
