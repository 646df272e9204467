"""The published model of weights: matrix normal MN(M, U, V), learned by flip-flop steps.

With Wc = W - M, Cholesky factors L_V L_V^T = V + eps I and L_U L_U^T = U + eps I, a step takes

    U' = (1 / N) (Wc L_V^-T) (Wc L_V^-T)^T        V' = (1 / M) (L_U^-1 Wc)^T (L_U^-1 Wc)

for W of M rows and N columns (Dutilleul 1999, "The MLE algorithm for the matrix normal distribution"), mixes
both into the old ones (an exponential mean), makes them symmetric and fixes the scale that U and V share:
s = tr(U) / M, U / s, V * s. A draw is W = mean + L_U Z L_V^T.

It stands here for comparison: trials use the model's own weights, since a drawn weight has lost how it lies
with respect to its input's leading directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka.errors import UsageError

__all__ = ["LARGEST_SIDE", "MatrixNormal"]

LARGEST_SIDE = 2048
_EPS = 1e-6


class MatrixNormal:
    """Mean and covariances of rows and columns of a matrix [rows, columns], in fp64 on the CPU.

    Args:
        rows: M, at most 2,048.
        columns: N, at most 2,048.
        momentum: m: each step keeps this share of what was learned.

    Raises:
        UsageError: for a side of 0 or above 2,048, or a momentum outside [0, 1).
    """

    def __init__(self, rows: int, columns: int, *, momentum: float = 0.95) -> None:
        if not (0 < rows <= LARGEST_SIDE and 0 < columns <= LARGEST_SIDE):
            raise UsageError(
                f"a matrix normal of a {rows} x {columns} weight needs sides of 1 to {LARGEST_SIDE}",
                hint="draw only the inputs and keep the model's own weight",
            )
        if not 0 <= momentum < 1:
            raise UsageError(f"MatrixNormal(momentum={momentum}) must be in [0, 1)")
        self.mean = torch.zeros(rows, columns, dtype=torch.float64)
        self.row_covariance = torch.eye(rows, dtype=torch.float64)
        self.column_covariance = torch.eye(columns, dtype=torch.float64)
        self.momentum = momentum
        self.updates = 0

    def update(self, weight: Tensor, *, steps: int = 1) -> None:
        """Learn from one look at the weight [rows, columns], with `steps` flip-flop steps.

        M is one number, the mean of all elements: a matrix of means would be the weight itself. The first
        look gives the scale; U and V start as multiples of the identity and move by momentum.

        Raises:
            UsageError: for another shape.
        """
        if weight.shape != self.mean.shape:
            raise UsageError(
                f"the matrix normal is of {tuple(self.mean.shape)}, the weight of {tuple(weight.shape)}"
            )
        w = weight.detach().cpu().double()
        if self.updates:
            self.mean = self.momentum * self.mean + (1 - self.momentum) * w.mean()
        else:
            self.mean = w.mean().expand_as(w)
            self.column_covariance *= (w - self.mean).square().mean()
        for _ in range(steps):
            self._flip_flop(w - self.mean)
        self.updates += 1

    def _flip_flop(self, centred: Tensor) -> None:
        rows, columns = centred.shape
        kept = self.momentum
        left = torch.linalg.solve_triangular(self._lower(self.column_covariance), centred.t(), upper=False)
        row_new = left.t() @ left / columns
        self.row_covariance = _symmetric(kept * self.row_covariance + (1 - kept) * row_new)
        right = torch.linalg.solve_triangular(self._lower(self.row_covariance), centred, upper=False)
        column_new = right.t() @ right / rows
        self.column_covariance = _symmetric(kept * self.column_covariance + (1 - kept) * column_new)
        scale = self.row_covariance.trace() / rows
        if scale > 0:
            self.row_covariance = self.row_covariance / scale
            self.column_covariance = self.column_covariance * scale

    @staticmethod
    def _lower(covariance: Tensor) -> Tensor:
        """Cholesky factor of covariance + eps I, eps = 1e-6 of the mean variance."""
        side = covariance.shape[0]
        eps = _EPS * (covariance.trace() / side).clamp(min=1e-30)
        return torch.as_tensor(torch.linalg.cholesky(covariance + eps * torch.eye(side, dtype=torch.float64)))

    def draw(self, generator: torch.Generator) -> Tensor:
        """A weight, fp32 [rows, columns] on the CPU."""
        z = torch.randn(self.mean.shape, generator=generator, dtype=torch.float64)
        drawn = self._lower(self.row_covariance) @ z @ self._lower(self.column_covariance).t()
        return (self.mean + drawn).float()


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.t()) / 2
