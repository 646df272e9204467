"""The clock: interleaved candidates, cold caches, medians with spread (decision 15).

Candidates are timed in turn within each round, in rotating order, so that a drift of clocks or a noisy
neighbour meets all of them alike. On a GPU each candidate is captured into a CUDA graph once and replayed
between two events, after a write to a buffer larger than the L2 cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from loka.errors import UsageError

__all__ = ["Ratio", "Timing", "measure", "paired_ratio"]

_FLUSH_BYTES = 256 * 1024 * 1024  # several times the 50 to 126 MB of L2 that today's GPUs have
_WARMUP_CALLS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one candidate, in us, in the order of the rounds."""

    samples_us: tuple[float, ...]

    def quantile(self, q: float) -> float:
        """The q-quantile of the samples, in us."""
        ranked = sorted(self.samples_us)
        return ranked[min(len(ranked) - 1, max(0, math.ceil(q * len(ranked)) - 1))]

    @property
    def p50_us(self) -> float:
        """Median, in us."""
        return self.quantile(0.5)


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


def measure(
    candidates: Mapping[str, Callable[[], object]], *, device: torch.device | str, rounds: int = 20
) -> dict[str, Timing]:
    """Time every candidate once in each round.

    Args:
        candidates: Name to a call without arguments. On a GPU it must be capturable into a CUDA
            graph: no host synchronisation.
        device: Where the calls run.
        rounds: Samples per candidate.

    Raises:
        UsageError: for no rounds.
    """
    if rounds < 1:
        raise UsageError(f"measure(rounds={rounds}) needs at least 1")
    where = torch.device(device)
    for call in candidates.values():
        for _ in range(_WARMUP_CALLS):
            call()
    timed = _gpu_timers(candidates, where) if where.type == "cuda" else _cpu_timers(candidates)
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        shift = round_ % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            samples[name].append(timed[name]())
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _cpu_timers(candidates: Mapping[str, Callable[[], object]]) -> dict[str, Callable[[], float]]:
    def timer(call: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6

        return run

    return {name: timer(call) for name, call in candidates.items()}


def _gpu_timers(
    candidates: Mapping[str, Callable[[], object]], where: torch.device
) -> dict[str, Callable[[], float]]:
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=where)

    def timer(call: Callable[[], object]) -> Callable[[], float]:
        replay = _captured(call, where)

        def run() -> float:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            replay()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) * 1e3

        return run

    return {name: timer(call) for name, call in candidates.items()}


def _captured(call: Callable[[], object], where: torch.device) -> Callable[[], object]:
    """The call as a graph replay."""
    torch.cuda.synchronize(where)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()  # outputs live in the graph's pool as long as the closure does

    def replay() -> object:
        graph.replay()
        return kept

    return replay
