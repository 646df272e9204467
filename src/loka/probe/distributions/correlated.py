"""Correlated normal numbers: a factor of a correlation matrix, full or of low rank, and draws from it.

Shapes: F features, R directions. Worked out in fp64; factors are made unique (a Cholesky factor, the signs of
directions), so that they are the same on every device but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.numerics.covariance import RANK, Covariance, sketch_signs
from loka.numerics.exact import exact_products

__all__ = ["CorrelatedNormal", "correlation_and_std", "normal_numbers", "nystroem_loadings"]

_JITTERS = (1e-9, 1e-7, 1e-6, 1e-5)
_CORE_FLOOR = 1e-6  # eigenvalues of a sketch's core below this share of the largest are fp32 rounding


@dataclass(slots=True)
class CorrelatedNormal:
    """Rows of F normal numbers of mean 0 and variance 1, correlated across features.

    Attributes:
        factor: fp32 [F, R]; factor @ factor.T is the correlation, or all of it but its diagonal.
        own: fp32 [F], deviation of what each feature has for itself; None where the factor says all.
    """

    factor: Tensor
    own: Tensor | None

    @classmethod
    def of_matrix(
        cls, correlation: Tensor, *, device: torch.device, importance: Tensor | None = None
    ) -> CorrelatedNormal:
        """From a symmetric matrix fp64 [F, F] with a unit diagonal; the nearest one that can be is taken.

        A matrix that is no correlation has its negative eigenvalues set to 0 and its diagonal scaled back
        to 1 (one step of Higham 2002, "Computing the nearest correlation matrix").

        Args:
            correlation: May have negative eigenvalues.
            device: Where draws shall lie.
            importance: fp64 [F], positive: how closely each feature is to be kept where not all can be; all
                alike by default.
        """
        matrix = correlation.double()
        factor = _cholesky(matrix)
        if factor is None:
            by = torch.ones_like(matrix[0]) if importance is None else importance.double()
            values, vectors = torch.linalg.eigh(matrix * by[:, None] * by)
            root = vectors * values.clamp(min=0).sqrt() / by[:, None]
            root = root / root.square().sum(dim=1, keepdim=True).sqrt().clamp(min=1e-12)
            # Eigenvectors are not unique, a Cholesky factor is: every machine draws alike.
            lower = _cholesky(root @ root.t())
            factor = root if lower is None else lower
        return cls(factor.float().to(device), None)

    @classmethod
    def of_loadings(cls, loadings: Tensor, *, device: torch.device) -> CorrelatedNormal:
        """From loadings [F, R]; longer rows are cut to length 1, what is missing to 1 is each one's own."""
        wide = loadings.cpu().double()
        length = wide.square().sum(dim=1, keepdim=True)
        wide = wide / length.sqrt().clamp(min=1)
        own = (1 - wide.square().sum(dim=1)).clamp(min=0).sqrt()
        return cls(wide.float().to(device), own.float().to(device))

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """fp32 [rows, F] on the factor's device, decided by the CPU `generator` (see `normal_numbers`)."""
        device = self.factor.device
        z = normal_numbers(rows, self.factor.shape[1], generator, device=device)
        with exact_products(device.type):
            out = z @ self.factor.t()
        if self.own is None:
            return out
        return out.addcmul_(normal_numbers(rows, self.own.numel(), generator, device=device), self.own)


def normal_numbers(rows: int, columns: int, generator: torch.Generator, *, device: torch.device) -> Tensor:
    """fp32 [rows, columns] of independent N(0, 1).

    On a GPU they come from a generator of its own, seeded by the CPU `generator`: a wide site takes hundreds
    of millions, for which a CPU needs minutes. So a draw repeats itself on one kind of device, not across.
    """
    if device.type == "cpu":
        return torch.randn(rows, columns, generator=generator)
    seed = int(torch.randint(2**62, (), generator=generator))
    own = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, generator=own, device=device)


def correlation_and_std(covariance: Covariance) -> tuple[Tensor, Tensor]:
    """Of a full covariance: correlation fp64 [F, F] and sample standard deviation fp64 [F].

    A constant feature has deviation 0 and correlates with nothing.
    """
    freedom = max(int(covariance.count) - 1, 1)
    matrix = covariance.scatter.double() / freedom
    matrix = (matrix + matrix.t()) / 2
    std = matrix.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(std > 0, 1 / std.clamp(min=1e-300), 0.0)
    correlation = matrix * inverse[:, None] * inverse[None, :]
    correlation.clamp_(-1, 1)
    correlation.diagonal().fill_(1)
    return correlation, std


def nystroem_loadings(covariance: Covariance, rank: int = RANK) -> tuple[Tensor, Tensor]:
    """Of a sketched covariance: loadings fp64 [F, rank] and standard deviation fp64 [F], on the CPU.

    loadings @ loadings.T is the Nystroem approximation Y (Omega^T Y)^-1 Y^T of the covariance, cut to its
    leading directions (Tropp et al. 2017, algorithm 3, in eigenvalues of the 128 x 128 core). The largest
    element of each direction is positive, which makes the factor unique.
    """
    freedom = max(int(covariance.count) - 1, 1)
    sketch = covariance.scatter.cpu().double() / freedom
    std = (covariance.m2.cpu() / freedom).clamp(min=0).sqrt()
    core = sketch_signs(covariance.features).double().t() @ sketch
    values, vectors = torch.linalg.eigh((core + core.t()) / 2)
    kept = values > _CORE_FLOOR * values[-1].clamp(min=1e-300)
    root = sketch @ (vectors[:, kept] / values[kept].sqrt())
    _, directions = torch.linalg.eigh(root.t() @ root)
    loadings = root @ directions.flip(1)[:, :rank]
    if loadings.shape[1]:
        largest = loadings.abs().argmax(dim=0, keepdim=True)
        loadings = loadings * torch.where(loadings.gather(0, largest) < 0, -1.0, 1.0)
    return loadings, std


def _cholesky(matrix: Tensor) -> Tensor | None:
    """A lower factor of the matrix with as little added to its diagonal as it needs, or None beyond 1e-5."""
    for jitter in _JITTERS:
        scaled = matrix / (1 + jitter)
        scaled.diagonal().fill_(1)
        lower, info = torch.linalg.cholesky_ex(scaled)
        if int(info) == 0:
            return torch.as_tensor(lower)
    return None
