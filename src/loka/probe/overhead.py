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
        self._counts = dict.fromkeys(StepKind, 0)  # read in all, but for what is left out
        self._observed_marked = 0  # in this process
        # The first observed step of the process, which compiles and allocates, and what ran later of its
        # trials: they happen once and would hide what every other one costs.
        self._left_out: tuple[StepKind, float] | None = None

    def mark(self, kind: StepKind | None) -> None:
        """A step of this kind ends here; None where what came before was no whole step."""
        now = self._now()
        if kind is StepKind.PLAIN:
            self._plain_in_window += 1
        wanted = kind in self._us and (
            kind is not StepKind.PLAIN or self._plain_in_window <= _PLAIN_OF_A_WINDOW
        )
        if kind in (StepKind.OBSERVED, StepKind.FULL):
            self._observed_marked += 1
        first_round = kind is StepKind.LATER and self._observed_marked <= 1
        if self._last is not None and kind is not None and wanted and not first_round:
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

    def needed_every(self, limit: float) -> int:
        """Steps between observed ones so that their extra cost stays within a share of the training.

        Args:
            limit: That share.

        Returns:
            0 until 3 observed and 10 plain steps were read.
        """
        observed = len(self._us[StepKind.OBSERVED]) + len(self._us[StepKind.FULL])
        observed += self._left_out is not None
        plain = self._us[StepKind.PLAIN]
        if len(plain) < _MIN_PLAIN or observed < _MIN_OBSERVED:
            return 0
        return math.ceil(self._extra_us() / (limit * self.median_plain_us()))

    def overhead(self, *, every: int, live_every: int) -> Overhead | None:
        """What was clocked; None without a plain and an observed step."""
        plain = self.median_plain_us()
        light, full = (self._mean(kind) for kind in (StepKind.OBSERVED, StepKind.FULL))
        if plain <= 0 or (light is None and full is None):
            return None
        return Overhead(
            plain_step_us=plain,
            observed_step_us=light,
            full_step_us=full if light is None or self._us[StepKind.FULL] else None,
            every=every,
            live_every=live_every,
            percent=100 * self._extra_us() / (every * plain),
        )

    def _extra_us(self) -> float:
        """Mean extra time of an observed step.

        The first of the process counts only where it is the only observed step.
        """
        # Sites take turns, so all are alike; with `live_every` 1 all are full.
        light = self._mean(StepKind.OBSERVED)
        mean = light if light is not None else self._mean(StepKind.FULL) or 0.0
        return max(0.0, mean - self.median_plain_us()) + self._extra_later_us()

    def _extra_later_us(self) -> float:
        """What trials beside plain steps add, for each observed step."""
        later = self._us[StepKind.LATER]
        observed = self._counts[StepKind.OBSERVED] + self._counts[StepKind.FULL]
        if not later or not observed:
            return 0.0
        # The mean: pieces are of two sizes, trials and distributions, of which a median would see one.
        extra = max(0.0, statistics.fmean(later) - self.median_plain_us())
        return extra * self._counts[StepKind.LATER] / observed

    def _mean(self, kind: StepKind) -> float | None:
        values = self._us[kind]
        if values:
            return statistics.fmean(values)
        return self._left_out[1] if self._left_out is not None and self._left_out[0] is kind else None

    def _now(self) -> _Mark:
        if self._where.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._where))
        return event

    def _read(self, marked: list[tuple[StepKind, _Mark, _Mark]]) -> None:
        for kind, start, end in marked:
            took = _elapsed_us(start, end)
            if self._left_out is None and kind in (StepKind.OBSERVED, StepKind.FULL):
                self._left_out = kind, took
                continue
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
