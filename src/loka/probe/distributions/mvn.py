"""Normal rows: features independent, or with the learned covariance (the published model of activations).

x = mean + L z        L L^T = Cov, or loadings @ loadings.T plus a diagonal for wide operands
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.numerics.covariance import Covariance
from loka.numerics.moments import Moments
from loka.probe.distributions.correlated import CorrelatedNormal, correlation_and_std, nystroem_loadings

__all__ = ["IndependentNormal", "MultivariateNormal"]


@dataclass(slots=True)
class IndependentNormal:
    """Every feature normal by itself.

    Attributes:
        mean: fp64 [F].
        std: fp64 [F].
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, moments: Moments) -> IndependentNormal:
        """Fit by moments."""
        return cls(moments.mean, moments.std)

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """fp32 [rows, F] on the moments' device."""
        z = torch.randn(rows, self.mean.numel(), generator=generator, dtype=torch.float64)
        return (self.mean + self.std * z.to(self.mean.device)).float()


@dataclass(slots=True)
class MultivariateNormal:
    """Normal rows with the learned covariance.

    Attributes:
        mean: fp32 [F].
        std: fp32 [F].
        normal: Correlated numbers of variance 1.
    """

    mean: Tensor
    std: Tensor
    normal: CorrelatedNormal

    @classmethod
    def of(cls, covariance: Covariance) -> MultivariateNormal:
        """Fit by the covariance; above 2,048 features by 64 directions and the rest of the diagonal."""
        device = covariance.mean.device
        if covariance.is_full:
            correlation, std = correlation_and_std(covariance)
            normal = CorrelatedNormal.of_matrix(correlation, device=device)
        else:
            loadings, std = nystroem_loadings(covariance)
            unit = loadings / std.clamp(min=1e-300)[:, None]
            normal = CorrelatedNormal.of_loadings(unit, device=device)
        return cls(covariance.mean.float(), std.float().to(device), normal)

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """fp32 [rows, F] on the covariance's device."""
        return self.mean + self.std * self.normal.draw(rows, generator)
