"""What a clock gives: samples, their quantiles, their halves, and the ratio of two candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loka.errors import UsageError

__all__ = ["Ratio", "Timing", "paired_ratio"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one candidate, in us, in the order of the rounds.

    Attributes:
        samples_us: One a round.
        captured: True where the samples are replays of a CUDA graph, so that launching from Python costs
            nothing; False for plain calls.
    """

    samples_us: tuple[float, ...]
    captured: bool = False

    def quantile(self, q: float) -> float:
        """The q-quantile of the samples, in us."""
        ranked = sorted(self.samples_us)
        return ranked[min(len(ranked) - 1, max(0, math.ceil(q * len(ranked)) - 1))]

    @property
    def p50_us(self) -> float:
        """Median, in us."""
        return self.quantile(0.5)

    def half(self, which: int) -> Timing:
        """The even (0) or the odd (1) rounds.

        A choice is made on one half and judged on the other: the fastest of many noisy candidates looks
        faster than it is on the very samples that chose it. Alternate rounds meet the same drift.

        Raises:
            UsageError: for another half, or too few samples for two halves.
        """
        if which not in (0, 1):
            raise UsageError(f"Timing.half({which}) is not known, samples have the halves 0 and 1")
        if len(self.samples_us) < 2:
            raise UsageError(f"halves need at least 2 samples, got {len(self.samples_us)}")
        return Timing(self.samples_us[which::2], self.captured)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed of one candidate over another: median of the rounds' ratios, 90 % interval of that median."""

    median: float
    low: float
    high: float

    @property
    def is_win(self) -> bool:
        """True when the whole interval lies above 1; inside the noise nothing is a win."""
        return self.low > 1.0


def paired_ratio(base: Timing, other: Timing) -> Ratio:
    """Speed of `other` over `base`, round by round: base / other, above 1 where `other` is faster.

    The interval is the distribution-free one of the median: order statistics at n/2 +- 1.645 sqrt(n)/2.

    Raises:
        UsageError: if the two were not measured in the same rounds.
    """
    if len(base.samples_us) != len(other.samples_us) or not base.samples_us:
        raise UsageError(
            "a ratio needs timings of the same rounds, "
            f"got {len(base.samples_us)} and {len(other.samples_us)} samples"
        )
    ratios = sorted(b / o for b, o in zip(base.samples_us, other.samples_us, strict=True))
    n = len(ratios)
    half = 1.645 * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - half))
    high = min(n - 1, math.ceil(n / 2 + half))
    middle = (ratios[(n - 1) // 2] + ratios[n // 2]) / 2
    return Ratio(middle, ratios[low], ratios[high])
