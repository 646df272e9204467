"""Gaussian copula: the learned marginals of every feature, held together by correlated normal numbers.

    x_f = Q_f(Phi(z_f))        z ~ N(0, R)

Q_f is the quantile function of feature f (exact zeros, bounded ranges, heavy tails and all), Phi the normal
distribution function. R is chosen so that x has the learned correlation, not z: squeezing z through Q_f
weakens it. With the Hermite coefficients a_k(f) = E[Q_f(Phi(z)) He_k(z)] / sqrt(k!), by Mehler's formula,

    Cov(x_f, x_h) = sum_k a_k(f) a_k(h) R_fh^k

which rises with R_fh and is solved for it pair by pair (Cario and Nelson 1997, "Modeling and generating
random vectors with arbitrary marginal distributions and correlation matrix").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.numerics.covariance import Covariance
from loka.numerics.marginals import Marginals
from loka.probe.distributions.correlated import CorrelatedNormal, correlation_and_std, nystroem_loadings

__all__ = ["Copula", "hermite_coefficients", "latent_correlation"]

ORDERS = 16
_ITERATIONS = 10
_ELEMENTS_AT_ONCE = 2**23  # quantiles take about 50 bytes an element meanwhile


@dataclass(slots=True)
class Copula:
    """Rows with learned marginals and correlation.

    Attributes:
        marginals: Histograms of every feature.
        normal: The correlated normal numbers behind them.
    """

    marginals: Marginals
    normal: CorrelatedNormal

    @classmethod
    def of(cls, covariance: Covariance, marginals: Marginals) -> Copula:
        """Fit by covariance and marginals of the same rows."""
        device = marginals.counts.device
        orders = ORDERS if covariance.is_full else 1
        coefficients = hermite_coefficients(marginals.to("cpu"), orders)
        if covariance.is_full:
            correlation, _ = correlation_and_std(covariance)
            latent = latent_correlation(correlation, coefficients)
            return cls(marginals, CorrelatedNormal.of_matrix(latent, device=device))
        loadings, std = nystroem_loadings(covariance)
        # To first order a correlation is a_1(f) a_1(h) R_fh: what squeezing takes is given in advance.
        lost = (std * coefficients[:, 0]).clamp(min=1e-300)
        normal = CorrelatedNormal.of_loadings(loadings / lost[:, None], device=device)
        return cls(marginals, normal)

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """fp32 [rows, F] on the marginals' device."""
        z = self.normal.draw(rows, generator)
        at_once = max(_ELEMENTS_AT_ONCE // max(z.shape[1], 1), 1)
        parts = [self.marginals.quantile(torch.special.ndtr(part.double())) for part in z.split(at_once)]
        return torch.cat(parts) if parts else z


def hermite_coefficients(marginals: Marginals, orders: int = ORDERS) -> Tensor:
    """a_1 ... a_orders of every feature scaled to variance 1, fp64 [F, orders].

    A bin counts as its mean, so Q(Phi(z)) is a step function and the integrals are exact:
    integral of He_k phi from z1 to z2 = He_(k-1)(z1) phi(z1) - He_(k-1)(z2) phi(z2).
    """
    left, right = marginals.spans()
    middle = (left + right) / 2
    total = marginals.counts.sum(dim=1, keepdim=True).clamp(min=1)
    share = marginals.counts.double() / total
    mean = (share * middle).sum(dim=1, keepdim=True)
    std = (share * (middle - mean).square()).sum(dim=1).sqrt()
    bound = torch.nn.functional.pad(share.cumsum(dim=1), (1, 0)).clamp(0, 1)
    z = torch.special.ndtri(bound).clamp(-38, 38)  # phi(38) is 0 in fp64
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    previous, current = torch.zeros_like(z), torch.ones_like(z)  # normalised: h_(k-1) / sqrt((k-1)!)
    out = []
    for k in range(1, orders + 1):
        steps = (current * density).diff(dim=1).neg() / math.sqrt(k)
        out.append((steps * (middle - mean)).sum(dim=1))
        previous, current = current, (z * current - math.sqrt(k - 1) * previous) / math.sqrt(k)
    return torch.stack(out, dim=1) / std.clamp(min=1e-300)[:, None]


def latent_correlation(correlation: Tensor, coefficients: Tensor) -> Tensor:
    """R [F, F] for which the copula has this correlation [F, F]; the nearest where none gives it.

    Newton's method kept inside a bracket, all pairs at once. What the orders left out add is taken as one
    more odd power.
    """
    orders = coefficients.shape[1]
    rest = (1 - coefficients.square().sum(dim=1)).clamp(min=0).sqrt()
    products = [torch.outer(coefficients[:, k], coefficients[:, k]) for k in range(orders)]
    products.append(torch.outer(rest, rest))
    latent = correlation.clone()
    low, high = torch.full_like(latent, -1), torch.ones_like(latent)
    for _ in range(_ITERATIONS):
        value, slope = products[-1].clone(), torch.zeros_like(latent)
        for product in products[-2::-1]:  # Horner, highest order first
            slope = slope * latent + value
            value = value * latent + product
        slope = slope * latent + value
        excess = value * latent - correlation
        low = torch.where(excess < 0, latent, low)
        high = torch.where(excess > 0, latent, high)
        step = latent - excess / slope.clamp(min=1e-6)
        inside = (step > low) & (step < high)
        latent = torch.where(excess == 0, latent, torch.where(inside, step, (low + high) / 2))
    latent.diagonal().fill_(1)
    return (latent + latent.t()) / 2
