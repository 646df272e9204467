"""What is known of one site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from loka.kernels.column_statistics import merge_moments
from loka.numerics import BatchStatistics, Moments, OperandStatistics
from loka.vocab import Operand, Pass

__all__ = ["SiteObservation"]


@dataclass(slots=True)
class SiteObservation:
    """Everything learned at one site.

    Attributes:
        operands: Statistics by operand. The weight's moments are of the last full look; others add up.
        m_seen: Rows of a call to how often they were seen.
        passes: The passes that were seen to run.
        calls: Calls in the last observed step, among which the sampled rows are shared out.
    """

    operands: dict[Operand, OperandStatistics] = field(default_factory=dict)
    m_seen: Counter[int] = field(default_factory=Counter)
    passes: set[Pass] = field(default_factory=set)
    calls: int = 0

    @property
    def moments(self) -> Mapping[Operand, Moments]:
        """The moments by operand, for reading."""
        return MappingProxyType({operand: known.moments for operand, known in self.operands.items()})

    @property
    def nbytes(self) -> int:
        """Bytes that the statistics hold."""
        return sum(known.nbytes for known in self.operands.values())

    def snapshot(self) -> SiteObservation:
        """What is known now, whatever is added later; without `m_seen`. Tensors are shared."""
        operands = {operand: replace(known) for operand, known in self.operands.items()}
        return SiteObservation(operands, passes=set(self.passes), calls=self.calls)

    def take(self, operand: Operand, batch: BatchStatistics, *, step: int) -> None:
        """Add what one tensor of an observed step gave to the operand's statistics."""
        known, features = self.operands.get(operand), batch.moments.mean.numel()
        # A weight that got another shape in the middle of a step: what was known is of another product.
        if known is None or known.moments.mean.numel() != features:
            device = batch.moments.mean.device
            known = self.operands[operand] = OperandStatistics.empty(features, device)
        known.take(batch, step=step, replaces=operand is Operand.WEIGHT, merged=merge_moments)
