"""All that is kept of one operand of one site: moments, the course of its amax, drift, distributions.

Everything merges and is bounded in bytes. Moments are exact over all rows; covariance and marginals see the
sampled rows only. Tensors are replaced, never written in place: whoever holds one keeps what it said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.numerics.amax_history import AmaxHistory
from loka.numerics.covariance import Covariance
from loka.numerics.drift import Drift, Window
from loka.numerics.marginals import Marginals
from loka.numerics.moments import Moments

__all__ = ["BatchStatistics", "OperandStatistics", "statistics_bytes"]


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Statistics of one tensor, to be added to every operand that it is.

    Attributes:
        moments: Over all rows.
        amax: fp32 (), largest magnitude of the rows that entered; 0 where there are none.
        covariance: Over the sampled rows; None where no distributions were asked.
        marginals: The same.
    """

    moments: Moments
    amax: Tensor
    covariance: Covariance | None = None
    marginals: Marginals | None = None

    @classmethod
    def of(
        cls,
        x_MK: Tensor,
        *,
        sample_SK: Tensor | None = None,
        moments_of: Callable[[Tensor], Moments] = Moments.of,
    ) -> BatchStatistics:
        """Statistics of x_MK [rows, features]; no host synchronisation.

        Args:
            x_MK: All rows.
            sample_SK: The rows that covariance and marginals see; None for moments alone.
            moments_of: What computes the moments.
        """
        moments = moments_of(x_MK)
        amax = moments.amax.amax() if moments.amax.numel() else moments.amax.new_zeros(())
        if sample_SK is None:
            return cls(moments, amax)
        return cls(moments, amax, Covariance.of(sample_SK), Marginals.of(sample_SK))


@dataclass(slots=True)
class OperandStatistics:
    """What is known of one operand [rows, F].

    Attributes:
        moments: Over all rows.
        history: Amax of the last 64 observed steps.
        window: What came before the current window of observed steps, for `drift`.
        covariance: Second moments of the sampled rows; None where none were sampled.
        marginals: Histograms of every feature, of the sampled rows; None where none were sampled.
    """

    moments: Moments
    history: AmaxHistory = field(default_factory=AmaxHistory)
    window: Window = field(default_factory=Window)
    covariance: Covariance | None = None
    marginals: Marginals | None = None

    @classmethod
    def empty(
        cls, features: int, device: torch.device | str = "cpu", *, distributions: bool = False
    ) -> OperandStatistics:
        """Statistics of no rows.

        Args:
            features: F.
            device: Where its tensors live.
            distributions: With an empty covariance and empty marginals, instead of none.
        """
        return cls(
            moments=Moments.empty(features, device),
            history=AmaxHistory.empty(device),
            window=Window.empty(device),
            covariance=Covariance.empty(features, device) if distributions else None,
            marginals=Marginals.empty(features, device) if distributions else None,
        )

    @property
    def features(self) -> int:
        """F."""
        return self.moments.mean.numel()

    def add(
        self,
        x_MK: Tensor,
        rows: Tensor | None = None,
        *,
        step: int | None = None,
        distributions: bool = True,
    ) -> None:
        """Add the rows of x_MK [rows, F] to these statistics.

        Args:
            x_MK: Any float dtype; rows with a non-finite element are counted and left out.
            rows: int64 [S], numbers of the rows that covariance and marginals see; all of them by default.
            step: The observed step, which decides where in the history the amax belongs; by default the next.
            distributions: Add to covariance and marginals too.
        """
        sample = (x_MK if rows is None else x_MK[rows]) if distributions else None
        batch = BatchStatistics.of(x_MK, sample_SK=sample)
        self.take(batch, step=self.history.latest + 1 if step is None else step)

    def take(
        self,
        batch: BatchStatistics,
        *,
        step: int,
        replaces: bool = False,
        merged: Callable[[Moments, Moments], Moments] = Moments.merge,
    ) -> None:
        """Add what one tensor gave.

        Args:
            batch: Its statistics.
            step: The observed step it belongs to. Several tensors of one step are one entry of the history.
            replaces: Keep the moments of this tensor alone, as for a weight, which is the same operand anew.
            merged: What merges the moments.
        """
        self.window = self.window.add(step, batch.moments.exponents)
        self.moments = batch.moments if replaces else merged(self.moments, batch.moments)
        self.history = self.history.with_amax(step, batch.amax)
        self.take_distributions(batch.covariance, batch.marginals)

    def take_distributions(self, covariance: Covariance | None, marginals: Marginals | None) -> None:
        """Add the distributions of sampled rows, which may be known later than the moments; None for none."""
        self.covariance = _merged_covariance(self.covariance, covariance)
        self.marginals = _merged_marginals(self.marginals, marginals)

    def merge(self, other: OperandStatistics) -> OperandStatistics:
        """The statistics of both sets of rows, as of two ranks or of two parts of a run.

        Raises:
            UsageError: if they are of different numbers of features.
        """
        return OperandStatistics(
            moments=self.moments.merge(other.moments),
            history=self.history.merge(other.history),
            window=self.window.merge(other.window),
            covariance=_merged_covariance(self.covariance, other.covariance),
            marginals=_merged_marginals(self.marginals, other.marginals),
        )

    def drift(self) -> Drift | None:
        """How the current window differs from the one before it; None before there are two.

        Reads numbers from the device.
        """
        return self.window.drift(self.history)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Dotted name to tensor, such as `moments.mean`, for saving."""
        parts = {
            "moments": self.moments.tensors(),
            "history": self.history.tensors(),
            "window": self.window.tensors(),
            "covariance": {} if self.covariance is None else self.covariance.tensors(),
            "marginals": {} if self.marginals is None else self.marginals.tensors(),
        }
        return {f"{part}.{name}": tensor for part, held in parts.items() for name, tensor in held.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> OperandStatistics:
        """The inverse of `tensors`; history and window may be missing, as may the distributions.

        Raises:
            UsageError: for a name that is no part of the statistics, or missing parts of one.
        """
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts.setdefault(part, {})[rest] = tensor
        try:
            found = cls(moments=Moments(**parts.pop("moments")))
            if "history" in parts:
                found.history = AmaxHistory.from_tensors(parts.pop("history"))
            if "window" in parts:
                found.window = Window.from_tensors(parts.pop("window"))
            if "covariance" in parts:
                found.covariance = Covariance(**parts.pop("covariance"))
            if "marginals" in parts:
                found.marginals = Marginals.from_tensors(parts.pop("marginals"))
        except (KeyError, TypeError) as error:
            raise UsageError(f"these tensors are not an operand's statistics: {error}") from error
        if parts:
            raise UsageError(f"`{next(iter(parts))}` is no part of an operand's statistics")
        return found

    def to(self, device: torch.device | str) -> OperandStatistics:
        """A copy on another device."""
        return OperandStatistics(
            moments=self.moments.to(device),
            history=self.history.to(device),
            window=self.window.to(device),
            covariance=None if self.covariance is None else self.covariance.to(device),
            marginals=None if self.marginals is None else self.marginals.to(device),
        )


def statistics_bytes(shapes: Iterable[tuple[int, int]]) -> int:
    """Bytes that the statistics of linears hold at most, known before the first step.

    Args:
        shapes: (n, k) of every site: output and input features.
    """
    total = 0
    for n, k in shapes:
        for features, distributions in ((k, True), (k, False), (n, True)):  # input, weight, grad_output
            total += OperandStatistics.empty(features, "meta", distributions=distributions).nbytes
    return total


def _merged_covariance(a: Covariance | None, b: Covariance | None) -> Covariance | None:
    return b if a is None else a if b is None else a.merge(b)


def _merged_marginals(a: Marginals | None, b: Marginals | None) -> Marginals | None:
    return b if a is None else a if b is None else a.merge(b)
