"""The numbers of live and sampled trials, kept on the device and read once they have arrived.

What is kept of them is bounded: a mean and a sum of squares for each number of a trial, however long the
training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from loka.artifacts.profile import ErrorTable
from loka.errors import UsageError
from loka.numerics import sqnr_db
from loka.numerics.intervals import Interval, interval_around
from loka.probe.trial import ERROR_FIELDS, Trial
from loka.vocab import Pass

__all__ = ["ErrorKey", "ErrorLog"]

# The numbers of the profile's error table, each with an interval of its mean.
_NUMBERS = (
    "sqnr_db", "rel_err", "row_p50", "row_p99", "row_max", "bias", "mere", "underflow", "saturation"
)  # fmt: skip
_ROW_MAX = _NUMBERS.index("row_max")
_LEVEL = 0.9


class ErrorKey(NamedTuple):
    """What an error belongs to.

    Attributes:
        site: Its name.
        pass_: The product.
        spec_a: Recipe key of A.
        spec_b: Recipe key of B.
        accumulation: exact or fast.
        kernel: What stood for the recipe.
        source: live or sampled.
        m: The contracted length that a wgrad was tried at; 0 where that is the training's own.
    """

    site: str
    pass_: Pass
    spec_a: str
    spec_b: str
    accumulation: str
    kernel: str
    source: str
    m: int

    def text(self) -> str:
        """One line, its parts separated by tabs."""
        return "\t".join(str(part) for part in self)

    @classmethod
    def of_text(cls, text: str) -> ErrorKey:
        """The inverse of `text`.

        Raises:
            UsageError: for the keys of another version.
        """
        parts = text.split("\t")
        if len(parts) != len(cls._fields):
            raise UsageError(
                f"the state of a Probe holds the error `{text}`, whose parts are not {len(cls._fields)}",
                hint="it was saved by another version of LoKA: probe again",
            )
        site, pass_, *rest, m = parts
        if pass_ not in list(Pass) or not m.isdecimal():
            raise UsageError(f"the state of a Probe holds the error `{text}` of no pass or at no M")
        return cls(site, Pass(pass_), *rest, m=int(m))  # type: ignore[arg-type,misc]


@dataclass(slots=True)
class _Pending:
    site: str
    trials: list[Trial]
    source: str
    m: int
    values: Tensor
    copied: torch.cuda.Event | None


@dataclass(slots=True)
class _Sums:
    """What is kept of the observations of one key: means, squared deviations from them (Welford 1962)."""

    count: int = 0
    worst: float = 0.0  # of row_max
    means: list[float] = field(default_factory=lambda: [0.0] * len(_NUMBERS))
    m2s: list[float] = field(default_factory=lambda: [0.0] * len(_NUMBERS))

    def add(self, row: Sequence[float]) -> None:
        numbers = _numbers_of(row)
        self.count += 1
        worst = numbers[_ROW_MAX]
        self.worst = max(self.worst, worst if worst == worst else math.inf)  # max() may drop a NaN
        for i, number in enumerate(numbers):
            before = number - self.means[i]
            self.means[i] += before / self.count
            self.m2s[i] += before * (number - self.means[i])

    def merge(self, other: _Sums) -> None:
        """Take in what another rank saw (Chan, Golub and LeVeque 1979)."""
        total = self.count + other.count
        for i in range(len(_NUMBERS)):
            delta = other.means[i] - self.means[i]
            self.means[i] += delta * other.count / total
            self.m2s[i] += other.m2s[i] + delta * delta * self.count * other.count / total
        self.worst = max(self.worst, other.worst)
        self.count = total

    def interval(self, name: str) -> Interval:
        """Mean of a number with its 90 % interval; one value has no spread."""
        place = _NUMBERS.index(name)
        mean = self.means[place]
        if self.count < 2:
            return Interval(mean, mean, mean, _LEVEL, self.count)
        deviation = math.sqrt(max(0.0, self.m2s[place]) / (self.count - 1))
        return interval_around(mean, deviation, count=self.count, level=_LEVEL)

    def packed(self) -> list[float]:
        return [self.count, self.worst, *self.means, *self.m2s]

    @classmethod
    def unpacked(cls, numbers: Sequence[float]) -> _Sums:
        half = 2 + len(_NUMBERS)
        if len(numbers) != half + len(_NUMBERS) or not (math.isfinite(numbers[0]) and numbers[0] >= 1):
            raise UsageError(
                f"an error in this state of a Probe is not a count and {half + len(_NUMBERS) - 1} numbers: "
                f"{len(numbers)} that begin with {numbers[:1]}",
                hint="it was saved by another version of LoKA, or is damaged: probe again",
            )
        return cls(int(numbers[0]), numbers[1], list(numbers[2:half]), list(numbers[half:]))


def _numbers_of(row: Sequence[float]) -> tuple[float, ...]:
    found = dict(zip(ERROR_FIELDS, row, strict=True))
    noise, signal = found["noise"], found["signal"]
    # A product that overflowed has no finite noise; so has one with a NaN.
    rel_err = math.sqrt(noise / signal) if noise >= 0 else math.inf
    return (sqnr_db(signal, noise), rel_err, *(found[name] for name in _NUMBERS[2:]))


class ErrorLog:
    """Errors by (site, pass, recipe, kernel, source, M), summed up over observations."""

    def __init__(self) -> None:
        self._sums: dict[ErrorKey, _Sums] = defaultdict(_Sums)
        self._pending: list[_Pending] = []
        self._marked = 0

    def add(
        self, site: str, trials: list[Trial], values: Tensor, *, source: str = "live", m: int = 0
    ) -> None:
        """Keep the numbers [trials, 9] of one observation; the copy to the host does not wait.

        Args:
            site: Where.
            trials: What was tried.
            values: fp64 [len(trials), 9], see `ERROR_FIELDS`.
            source: live or sampled.
            m: The contracted length of a sampled wgrad.
        """
        host, copied = values, None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(values.device))
        self._pending.append(_Pending(site, trials, source, m, host, copied))

    @property
    def pending(self) -> int:
        """Observations that are still to be collected."""
        return len(self._pending)

    def mark(self) -> None:
        """What is added from here on can be forgotten, as long as it is not collected."""
        self._marked = len(self._pending)

    def forget_since_mark(self) -> None:
        """Drop what was added since `mark`, as far as it was not collected."""
        del self._pending[self._marked :]

    def collect(self, *, wait: bool = True) -> int:
        """Read what was added.

        Args:
            wait: For copies that have not arrived; else they and all behind them are left for later. To wait
                costs the host its lead over the device, and then the device stands still.

        Returns:
            How many observations were read.
        """
        arrived = len(self._pending) if wait else self._arrived()
        for pending in self._pending[:arrived]:
            if pending.copied is not None:
                pending.copied.synchronize()
            for trial, row in zip(pending.trials, pending.values.tolist(), strict=True):
                # No signal: nothing was multiplied (all rows bad, or a dead layer), so nothing is known.
                if math.isfinite(row[0]) and row[0] > 0:
                    kernel = trial.kernel.name
                    key = ErrorKey(pending.site, *trial.key, kernel, pending.source, pending.m)
                    self._sums[key].add(row)
        del self._pending[:arrived]
        self._marked = max(0, self._marked - arrived)
        return arrived

    def _arrived(self) -> int:
        """How many, from the oldest on, can be read without a wait."""
        for place, pending in enumerate(self._pending):
            if pending.copied is not None and not pending.copied.query():
                return place
        return len(self._pending)

    def drop(self, source: str) -> None:
        """Forget what came from this source, so that it can be measured anew."""
        self.collect()
        for key in [key for key in self._sums if key.source == source]:
            del self._sums[key]

    def drop_sites(self, sites: Collection[str]) -> None:
        """Forget everything of these sites."""
        self.collect()
        for key in [key for key in self._sums if key.site in sites]:
            del self._sums[key]

    def not_finite(self) -> list[ErrorKey]:
        """What gave an output with a NaN or an infinity where FP32 gave none, in one observation at least."""
        return sorted(key for key, sums in self._sums.items() if math.isinf(sums.worst))

    def interval(self, key: ErrorKey, name: str = "sqnr_db") -> Interval | None:
        """A number's mean with its 90 % interval; None where nothing was collected for the key."""
        return self._sums[key].interval(name) if key in self._sums else None

    def intervals(self, name: str = "sqnr_db") -> Iterator[tuple[ErrorKey, Interval]]:
        """(key, a number's mean with its 90 % interval) of everything collected; one value has no spread."""
        for key, sums in self._sums.items():
            yield key, sums.interval(name)

    def table(self) -> ErrorTable:
        """The profile's error table: means over observations, the worst for `row_max`."""
        table = ErrorTable()
        for key, sums in sorted(self._sums.items(), key=lambda item: item[0]):  # a resumed run's order too
            for name, value in zip(ErrorKey._fields, key, strict=True):
                getattr(table, name).append(value)
            table.observations.append(sums.count)
            for name in _NUMBERS:
                interval = sums.interval(name)
                mean = sums.worst if name == "row_max" else interval.mean
                getattr(table, name).append(_finite(mean))
                if name == "sqnr_db":
                    table.sqnr_db_low.append(_finite(interval.low))
                    table.sqnr_db_high.append(_finite(interval.high))
                else:
                    getattr(table, f"{name}_half").append(_finite(interval.high - interval.mean))
        return table

    def state(self) -> dict[str, Tensor]:
        """Plain tensors: one fp64 [20] a key."""
        self.collect()
        return {
            key.text(): torch.tensor(sums.packed(), dtype=torch.float64) for key, sums in self._sums.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave, in place of what is known.

        Raises:
            UsageError: for the state of another version of LoKA; nothing is changed then.
        """
        sums = {
            ErrorKey.of_text(text): _Sums.unpacked(tensor.flatten().tolist())
            for text, tensor in state.items()
        }
        self._sums = defaultdict(_Sums, sums)
        self._pending.clear()

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Take in what another rank's log holds, given as its `state`."""
        for text, tensor in state.items():
            self._sums[ErrorKey.of_text(text)].merge(_Sums.unpacked(tensor.flatten().tolist()))


def _finite(value: float) -> float:
    """Files hold finite numbers only; a ruined row (infinite error) becomes 1e30."""
    return value if math.isfinite(value) else math.copysign(1e30, value if value == value else 1.0)
