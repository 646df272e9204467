"""The numbers of live and sampled trials, kept on the device and read one observed step later.

What is kept of them is bounded: a few sums for each recipe at each site, however long the training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka.artifacts.profile import ErrorTable
from loka.numerics import sqnr_db
from loka.numerics.intervals import Interval, interval_around
from loka.probe.trial import ERROR_FIELDS, Trial
from loka.vocab import Pass

__all__ = ["ErrorLog"]

_Key = tuple[str, Pass, str, str, str, str]  # site, pass, spec_a, spec_b, accumulation, source
_AVERAGED = ("row_p50", "row_p99", "bias", "mere", "underflow", "saturation")
_LEVEL = 0.9


@dataclass(slots=True)
class _Pending:
    site: str
    trials: list[Trial]
    source: str
    values: Tensor
    copied: torch.cuda.Event | None


@dataclass(slots=True)
class _Sums:
    """What is kept of the observations of one recipe at one site."""

    count: int = 0
    mean_db: float = 0.0
    m2_db: float = 0.0  # squared deviations from the mean (Welford 1962)
    row_max: float = 0.0
    averaged: list[float] = field(default_factory=lambda: [0.0] * len(_AVERAGED))

    def add(self, row: tuple[float, ...]) -> None:
        numbers = dict(zip(ERROR_FIELDS, row, strict=True))
        level = sqnr_db(numbers["signal"], numbers["noise"])
        self.count += 1
        before = level - self.mean_db
        self.mean_db += before / self.count
        self.m2_db += before * (level - self.mean_db)
        worst = numbers["row_max"]
        self.row_max = max(self.row_max, worst if worst == worst else math.inf)  # max() may drop a NaN
        self.averaged = [total + numbers[name] for total, name in zip(self.averaged, _AVERAGED, strict=True)]

    def sqnr(self) -> Interval:
        """Mean SQNR in dB with its 90 % interval; one value has no spread."""
        if self.count < 2:
            return Interval(self.mean_db, self.mean_db, self.mean_db, _LEVEL, self.count)
        deviation = math.sqrt(self.m2_db / (self.count - 1))
        return interval_around(self.mean_db, deviation, count=self.count, level=_LEVEL)


class ErrorLog:
    """Errors by (site, pass, recipe, source), summed up over observations."""

    def __init__(self) -> None:
        self._sums: dict[_Key, _Sums] = defaultdict(_Sums)
        self._pending: list[_Pending] = []

    def add(self, site: str, trials: list[Trial], values: Tensor, *, source: str = "live") -> None:
        """Keep the numbers [trials, 9] of one observation; the copy to the host does not wait."""
        host, copied = values, None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(values.device))
        self._pending.append(_Pending(site, trials, source, host, copied))

    def collect(self) -> None:
        """Read what was added; waits only for copies that have not arrived (none, an observed step later)."""
        for pending in self._pending:
            if pending.copied is not None:
                pending.copied.synchronize()
            for trial, row in zip(pending.trials, pending.values.tolist(), strict=True):
                # No signal: nothing was multiplied (all rows bad, or a dead layer), so nothing is known.
                if math.isfinite(row[0]) and row[0] > 0:
                    self._sums[(pending.site, *trial.key, pending.source)].add(tuple(row))
        self._pending.clear()

    def drop(self, source: str) -> None:
        """Forget what came from this source, so that it can be measured anew."""
        self.collect()
        for key in [key for key in self._sums if key[-1] == source]:
            del self._sums[key]

    def intervals(self) -> Iterator[tuple[_Key, Interval]]:
        """(key, SQNR in dB with its 90 % interval) of everything collected; one value has no spread."""
        for key, sums in self._sums.items():
            yield key, sums.sqnr()

    def table(self) -> ErrorTable:
        """The profile's error table: means over observations, the worst for `row_max`."""
        table = ErrorTable()
        for key, sums in sorted(self._sums.items(), key=lambda item: item[0]):  # a resumed run's order too
            site, pass_, spec_a, spec_b, accumulation, source = key
            sqnr = sums.sqnr()
            table.site.append(site)
            table.pass_.append(pass_)
            table.spec_a.append(spec_a)
            table.spec_b.append(spec_b)
            table.accumulation.append(accumulation)
            table.source.append(source)
            table.observations.append(sums.count)
            table.sqnr_db.append(sqnr.mean)
            table.sqnr_db_low.append(sqnr.low)
            table.sqnr_db_high.append(sqnr.high)
            table.row_max.append(_finite(sums.row_max))
            for name, total in zip(_AVERAGED, sums.averaged, strict=True):
                getattr(table, name).append(_finite(total / sums.count))
        return table

    def state(self) -> dict[str, Tensor]:
        """Plain tensors: one fp64 [10] a key."""
        self.collect()
        return {
            "\t".join(key): torch.tensor(
                [sums.count, sums.mean_db, sums.m2_db, sums.row_max, *sums.averaged], dtype=torch.float64
            )
            for key, sums in self._sums.items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take up what `state` gave."""
        for text, tensor in state.items():
            site, pass_, spec_a, spec_b, accumulation, source = text.split("\t")
            count, mean_db, m2_db, row_max, *averaged = tensor.tolist()
            sums = _Sums(int(count), mean_db, m2_db, row_max, averaged)
            self._sums[(site, Pass(pass_), spec_a, spec_b, accumulation, source)] = sums


def _finite(value: float) -> float:
    """Files hold finite numbers only; a ruined row (infinite error) becomes 1e30."""
    return value if math.isfinite(value) else math.copysign(1e30, value if value == value else 1.0)
