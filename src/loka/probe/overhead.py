"""What observing costs: a clock of the loop's steps, and how often may be observed for a limit to hold.

On a GPU a step's end is an event in the stream; events are read one observed step later, when they have long
passed, so that no step waits. Elsewhere it is the host's clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from enum import StrEnum

import torch

from loka.artifacts.profile import Overhead

__all__ = ["StepClock", "StepKind", "rounded_up"]

_PLAIN_OF_A_WINDOW = 64  # plain steps clocked between two observed ones
_KEPT_PLAIN, _KEPT_OBSERVED = 1024, 256
_MIN_PLAIN, _MIN_OBSERVED = 10, 3

_Mark = float | torch.cuda.Event


class StepKind(StrEnum):
    """What Probe did in a step."""

    PLAIN = "plain"
    OBSERVED = "observed"
    FULL = "full"
    LATER = "later"  # a plain step beside which trials of an observed one ran
    OTHER = "other"  # finding sites, or profiling: done once


class StepClock:
    """Times of steps by kind, from one `mark` to the next.

    Args:
        where: The device of the model.
    """

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._last: _Mark | None = None
        self._new: list[tuple[StepKind, _Mark, _Mark]] = []
        self._old: list[tuple[StepKind, _Mark, _Mark]] = []
        self._plain_in_window = 0
        self._us: dict[StepKind, deque[float]] = {
            StepKind.PLAIN: deque(maxlen=_KEPT_PLAIN),
            StepKind.OBSERVED: deque(maxlen=_KEPT_OBSERVED),
            StepKind.FULL: deque(maxlen=_KEPT_OBSERVED),
            StepKind.LATER: deque(maxlen=_KEPT_PLAIN),
        }
        self._counts = dict.fromkeys(StepKind, 0)  # read in all
        self._left_out: float | None = None  # the first full step, which compiles and allocates

    def mark(self, kind: StepKind | None) -> None:
        """A step of this kind ends here; None where what came before was no whole step."""
        now = self._now()
        if kind is StepKind.PLAIN:
            self._plain_in_window += 1
        wanted = kind in self._us and (
            kind is not StepKind.PLAIN or self._plain_in_window <= _PLAIN_OF_A_WINDOW
        )
        if self._last is not None and kind is not None and wanted:
            self._new.append((kind, self._last, now))
        self._last = now

    def turn(self) -> None:
        """Called at each observed step: read what was marked before the last call."""
        self._read(self._old)
        self._old, self._new, self._plain_in_window = self._new, [], 0

    def read_all(self) -> None:
        """Read everything; waits for the device. For the end of the loop."""
        self._read(self._old + self._new)
        self._old, self._new = [], []

    def median_plain_us(self) -> float:
        """Of plain steps; 0 where none was read."""
        plain = self._us[StepKind.PLAIN]
        return statistics.median(plain) if plain else 0.0

    def needed_every(self, limit: float, live_every: int) -> int:
        """Steps between observed ones so that their extra cost stays within a share of the training.

        Args:
            limit: That share.
            live_every: Each such observed step is a full one.

        Returns:
            0 until 3 observed and 10 plain steps were read.
        """
        observed = len(self._us[StepKind.OBSERVED]) + len(self._us[StepKind.FULL])
        observed += self._left_out is not None
        plain = self._us[StepKind.PLAIN]
        if len(plain) < _MIN_PLAIN or observed < _MIN_OBSERVED:
            return 0
        return math.ceil(self._extra_us(live_every) / (limit * self.median_plain_us()))

    def overhead(self, *, every: int, live_every: int) -> Overhead | None:
        """What was clocked; None without a plain and an observed step."""
        plain = self.median_plain_us()
        light, full = (self._mean(kind) for kind in (StepKind.OBSERVED, StepKind.FULL))
        if plain <= 0 or (light is None and full is None):
            return None
        return Overhead(
            plain_step_us=plain,
            observed_step_us=light,
            full_step_us=full,
            every=every,
            live_every=live_every,
            percent=100 * self._extra_us(live_every) / (every * plain),
        )

    def _extra_us(self, live_every: int) -> float:
        """Mean extra time of an observed step.

        The first full one compiles, allocates and, on a GPU, loads kernels: it happens once and would hide
        what every other one costs, so it counts only where it is the only observed step.
        """
        full = self._us[StepKind.FULL]
        light = self._mean(StepKind.OBSERVED)
        if light is None:
            mean = self._mean(StepKind.FULL) or 0.0
        elif not full:
            mean = light
        else:
            mean = statistics.fmean(full) / live_every + light * (1 - 1 / live_every)
        return max(0.0, mean - self.median_plain_us()) + self._extra_later_us()

    def _extra_later_us(self) -> float:
        """What trials beside plain steps add, for each observed step."""
        later = self._us[StepKind.LATER]
        observed = self._counts[StepKind.OBSERVED] + self._counts[StepKind.FULL]
        if not later or not observed:
            return 0.0
        extra = max(0.0, statistics.fmean(later) - self.median_plain_us())
        return extra * self._counts[StepKind.LATER] / observed

    def _mean(self, kind: StepKind) -> float | None:
        values = self._us[kind]
        if values:
            return statistics.fmean(values)
        return self._left_out if kind is StepKind.FULL else None

    def _now(self) -> _Mark:
        if self._where.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._where))
        return event

    def _read(self, marked: list[tuple[StepKind, _Mark, _Mark]]) -> None:
        for kind, start, end in marked:
            took = _elapsed_us(start, end)
            if kind is StepKind.FULL and self._left_out is None:
                self._left_out = took
            else:
                self._us[kind].append(took)
            self._counts[kind] += 1


def _elapsed_us(start: _Mark, end: _Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3
    if isinstance(start, float) and isinstance(end, float):
        return (end - start) * 1e6
    raise TypeError("a step begins and ends by the same clock")


def rounded_up(every: int) -> int:
    """To two significant digits, so that the number is easy to say."""
    unit = int(10 ** max(0, len(str(every)) - 2))
    return -(-every // unit) * unit
