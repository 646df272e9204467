"""Dense features: the logarithm that tames heavy tails, and standardisation fitted on training rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["DenseTransform", "Standardization", "signed_log1p", "transform"]


class DenseTransform(StrEnum):
    """What is done to dense features before they reach a model."""

    LOG1P = "log1p"
    RAW = "raw"


def signed_log1p(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """sign(x) * log(1 + |x|): log1p for x >= 0, and its odd continuation below. Any shape, elementwise."""
    return np.copysign(np.log1p(np.abs(x)), x)


def transform(x: NDArray[np.float32], kind: DenseTransform) -> NDArray[np.float32]:
    """Apply a transform to dense features of any shape."""
    return signed_log1p(x) if kind is DenseTransform.LOG1P else x


@dataclass(frozen=True, slots=True)
class Standardization:
    """x -> (x - mean) / std for each of D columns.

    Attributes:
        mean: float64 [D].
        std: float64 [D], population standard deviation; 1 where a column is constant.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]

    @classmethod
    def fit(cls, parts: Iterable[NDArray[np.float32]], columns: int) -> Standardization:
        """Moments of the rows given, merged part by part (Chan, Golub, LeVeque 1979), in float64.

        Args:
            parts: float32 [n, D] each; rows of the training split only.
            columns: D.
        """
        count, mean, squares = 0, np.zeros(columns), np.zeros(columns)
        for part in parts:
            if not len(part):
                continue
            x = part.astype(np.float64)
            part_mean = x.mean(axis=0)
            shift = part_mean - mean
            total = count + len(x)
            squares += ((x - part_mean) ** 2).sum(axis=0) + shift**2 * (count * len(x) / total)
            mean = mean + shift * (len(x) / total)
            count = total
        std = np.sqrt(squares / max(count, 1))
        return cls(mean, np.where(std > 0, std, 1.0))

    def apply(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Standardise float32 [n, D]."""
        return ((x - self.mean) / self.std).astype(np.float32)
