"""The numbers of live and sampled trials, kept on the device and read one observed step later."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.artifacts.profile import ErrorTable
from loka.numerics import sqnr_db
from loka.numerics.intervals import Interval, mean_interval
from loka.probe.trial import ERROR_FIELDS, Trial
from loka.vocab import Pass

__all__ = ["ErrorLog"]

_Key = tuple[str, Pass, str, str, str, str]  # site, pass, spec_a, spec_b, accumulation, source


@dataclass(slots=True)
class _Pending:
    site: str
    trials: list[Trial]
    source: str
    values: Tensor


class ErrorLog:
    """Errors by (site, pass, recipe, source), one row of numbers an observation."""

    def __init__(self) -> None:
        self._rows: dict[_Key, list[tuple[float, ...]]] = defaultdict(list)
        self._pending: list[_Pending] = []

    def add(self, site: str, trials: list[Trial], values: Tensor, *, source: str = "live") -> None:
        """Keep the numbers [trials, 9] of one observation; the copy to the host does not wait."""
        host = values
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
        self._pending.append(_Pending(site, trials, source, host))

    def collect(self) -> None:
        """Read what earlier steps left. Call it when those steps are long done."""
        for pending in self._pending:
            for trial, row in zip(pending.trials, pending.values.tolist(), strict=True):
                if math.isfinite(row[0]):
                    self._rows[(pending.site, *trial.key, pending.source)].append(tuple(row))
        self._pending.clear()

    def drop(self, source: str) -> None:
        """Forget what came from this source, so that it can be measured anew."""
        self.collect()
        for key in [key for key in self._rows if key[-1] == source]:
            del self._rows[key]

    def intervals(self) -> Iterator[tuple[_Key, Interval]]:
        """(key, SQNR in dB with its 90 % interval) of everything collected; one value has no spread."""
        for key, rows in self._rows.items():
            values = [sqnr_db(r[0], r[1]) for r in rows]
            one = Interval(values[0], values[0], values[0], 0.9, 1)
            yield key, mean_interval(values) if len(values) > 1 else one

    def table(self) -> ErrorTable:
        """The profile's error table: means over observations, the worst for `row_max`."""
        table = ErrorTable()
        for key, sqnr in self.intervals():
            count = sqnr.count
            site, pass_, spec_a, spec_b, accumulation, source = key
            columns = dict(zip(ERROR_FIELDS, zip(*self._rows[key], strict=True), strict=True))
            table.site.append(site)
            table.pass_.append(pass_)
            table.spec_a.append(spec_a)
            table.spec_b.append(spec_b)
            table.accumulation.append(accumulation)
            table.source.append(source)
            table.observations.append(count)
            table.sqnr_db.append(sqnr.mean)
            table.sqnr_db_low.append(sqnr.low)
            table.sqnr_db_high.append(sqnr.high)
            table.row_max.append(_finite(max(columns["row_max"])))
            for name in ("row_p50", "row_p99", "bias", "mere", "underflow", "saturation"):
                getattr(table, name).append(_finite(math.fsum(columns[name]) / count))
        return table

    def state(self) -> dict[str, Tensor]:
        """Plain tensors: one fp64 [observations, 9] a key."""
        self.collect()
        return {"\t".join(key): torch.tensor(rows, dtype=torch.float64) for key, rows in self._rows.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take up what `state` gave."""
        for text, rows in state.items():
            site, pass_, spec_a, spec_b, accumulation, source = text.split("\t")
            self._rows[(site, Pass(pass_), spec_a, spec_b, accumulation, source)] = [
                tuple(row) for row in rows.tolist()
            ]


def _finite(value: float) -> float:
    """Files hold finite numbers only; a ruined row (infinite error) becomes 1e30."""
    return value if math.isfinite(value) else math.copysign(1e30, value if value == value else 1.0)
