"""Which kernel a pass is given: decided on one half of the samples, judged on the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from loka.kernels import HIGH_PRECISION
from loka.timing import Ratio, Timing, paired_ratio
from loka.vocab import Requirement

__all__ = ["CHOSEN_ON", "JUDGED_ON", "SLOWER", "fastest", "judged", "pick"]

CHOSEN_ON, JUDGED_ON = 0, 1
SLOWER = 0.98  # a median ratio under this is "slower"; above it the difference is noise (decision 15)

_MIN_SPEEDUP = Requirement().min_speedup or 1.0


def fastest(totals: Mapping[str, Timing], among: Collection[str]) -> str | None:
    """The one of least median on the first half; None where none of them was timed."""
    timed = [name for name in totals if name in among]
    return min(timed, key=lambda name: totals[name].half(CHOSEN_ON).p50_us, default=None)


def judged(totals: Mapping[str, Timing], name: str) -> Ratio:
    """Speed of a kernel over bf16 on the half that chose nothing."""
    return paired_ratio(totals[HIGH_PRECISION].half(JUDGED_ON), totals[name].half(JUDGED_ON))


def pick(totals: Mapping[str, Timing], quantized: Collection[str]) -> str:
    """The kernel of a pass.

    FP8 is picked only where its fastest kernel, casts included, is 1.05 times as fast as bf16 (the default
    of `Requirement.min_speedup`), and the whole interval of the ratio lies above 1. bf16 here is the fastest
    of the bf16 products; another one than PyTorch's own counts where its interval lies above 1.

    Args:
        totals: Timings of the same rounds; `high_precision.bf16` is among them.
        quantized: Names of the FP8 kernels.
    """
    first = {name: timing.half(CHOSEN_ON) for name, timing in totals.items()}
    ordinary = first[HIGH_PRECISION]
    wins = [n for n in first if n not in quantized and paired_ratio(ordinary, first[n]).is_win]
    base = fastest(totals, wins) or HIGH_PRECISION
    fp8 = fastest(totals, quantized)
    if fp8 is None:
        return base
    gain = paired_ratio(first[base], first[fp8])
    return fp8 if gain.is_win and gain.median >= _MIN_SPEEDUP else base
