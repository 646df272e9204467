"""How long the steps of a run take, leaving out reading, metrics, hooks, checkpoints and warm-up."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

import torch

__all__ = ["StepClock", "StepSpeed"]

_KEPT_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """Speed of the timed steps.

    Attributes:
        steps: Number of timed steps; of a long run the last 100,000.
        steps_per_s: Timed steps over their summed time.
        rows_per_s: Their rows over the same.
        median_step_us: Median time of a step, microseconds.
        p10_step_us: 10 % quantile.
        p90_step_us: 90 % quantile.
    """

    steps: int
    steps_per_s: float
    rows_per_s: float
    median_step_us: float
    p10_step_us: float
    p90_step_us: float


class StepClock:
    """Times from `start` to `stop`: on a GPU by events in its stream, else by the host's clock.

    Args:
        device: Where the steps run.
        warm_up: Steps left out at the front; at most half of all steps are.
    """

    def __init__(self, device: torch.device, *, warm_up: int = 10) -> None:
        self._cuda = device.type == "cuda"
        self._warm_up = warm_up
        self._seen = 0
        # Bounded: a run of months must not keep every step.
        self._times_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._rows: deque[int] = deque(maxlen=_KEPT_STEPS)
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun: float | torch.cuda.Event = 0.0

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """A step begins."""
        self._begun = self._now()

    def stop(self, rows: int) -> None:
        """The step ends; it took in this many rows."""
        end = self._now()
        self._seen += 1
        self._rows.append(rows)
        if isinstance(end, float) and isinstance(self._begun, float):
            self._times_s.append(end - self._begun)
        elif isinstance(end, torch.cuda.Event) and isinstance(self._begun, torch.cuda.Event):
            self._pending.append((self._begun, end))
            while self._pending and self._pending[0][1].query():
                self._collect()

    def _collect(self) -> None:
        begun, end = self._pending.pop(0)
        self._times_s.append(begun.elapsed_time(end) * 1e-3)

    def speed(self) -> StepSpeed | None:
        """Speed of the steps after warm-up, None if there were none. Waits for the device."""
        while self._pending:
            self._pending[0][1].synchronize()
            self._collect()
        warming_up = max(0, self._warm_up - (self._seen - len(self._times_s)))
        skipped = min(warming_up, len(self._times_s) // 2)
        times, rows = list(self._times_s)[skipped:], list(self._rows)[skipped:]
        if not times:
            return None
        total = sum(times)
        tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
        return StepSpeed(
            steps=len(times),
            steps_per_s=len(times) / total,
            rows_per_s=sum(rows) / total,
            median_step_us=statistics.median(times) * 1e6,
            p10_step_us=tenths[0] * 1e6,
            p90_step_us=tenths[8] * 1e6,
        )
