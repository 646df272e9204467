"""The built-in click log: rows from (seed, row number), and the true probability of every label.

Any row can be drawn alone: the same whatever the batch size, the shard, the length of the source or the
device (ids and lengths bitwise, dense features to rounding).

Shapes: B rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from loka.errors import UsageError, unknown_name
from loka.recsys.batch import Batch, Schema
from loka.recsys.data.synthetic_columns import DENSE, FIELDS, Columns, Drawn
from loka.recsys.data.synthetic_draws import bits, key_of, unit_interval
from loka.recsys.data.synthetic_teacher import Teacher, binary_entropy
from loka.recsys.source import Split

__all__ = ["BayesNE", "SyntheticSource", "Variant"]

_TASKS = ("label", "conversion")
# Part of `identity`: another number means that the same seed gives other rows.
_GENERATOR_VERSION = 1


class Variant(StrEnum):
    """Which form the dense columns have.

    `log1p`: sign(x) log(1 + |x|). `raw`: as drawn, up to 1.6 million, to stress number formats. `both`: the
    log columns, then the raw ones. A missing value is -1 raw, -log 2 as a logarithm.
    """

    LOG1P = "log1p"
    RAW = "raw"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class BayesNE:
    """The least normalized entropy that any model can reach on a split, from the teacher's probabilities.

    Attributes:
        ne: mean H(p) / H(mean p).
        standard_error: Of `ne` as an estimate for the whole split, from the rows looked at.
        rows: Rows looked at.
    """

    ne: float
    standard_error: float
    rows: int


class SyntheticSource:
    """A reproducible click log with a known teacher.

    Rows are in time order and the splits are stretches of time, as in online training: the first 80 % train,
    the next 10 % validate, the last 10 % test. The teacher drifts slowly.

    Args:
        rows: Length of the log. Row r is the same in logs of all lengths.
        seed: Any integer.
        variant: `log1p`, `raw` or `both`: which form the dense columns have.
        ctr: Mean click probability, between 0 and 1.
        tasks: 1 for the click alone (`label`), 2 for a dict of `label` and `conversion` (of clicks only).
        device: Where batches are drawn.

    Raises:
        UsageError: for fewer than 10 rows, or a ctr or number of tasks out of range.
        UnknownNameError: for a variant that does not exist.
    """

    name = "synthetic"

    def __init__(
        self,
        rows: int = 200_000,
        *,
        seed: int = 0,
        variant: str = "log1p",
        ctr: float = 0.25,
        tasks: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        if rows < 10:
            raise UsageError(
                f"a synthetic click log of {rows} rows has no three splits", hint="use 10 or more"
            )
        if not 0.001 <= ctr <= 0.999:
            raise UsageError(f"the click rate of a synthetic click log is {ctr}, expected 0.001 to 0.999")
        if tasks not in (1, 2):
            raise UsageError(f"a synthetic click log has 1 or 2 tasks, got {tasks}")
        if variant not in list(Variant):
            raise unknown_name("variant", variant, [str(v) for v in Variant], where="the synthetic click log")
        self.total, self.seed, self.ctr = rows, seed, ctr
        self.variant, self.device = Variant(variant), torch.device(device)
        self.schema = Schema(_dense_names(self.variant), tuple(s.schema for s in FIELDS), _TASKS[:tasks])
        columns = Columns(seed=seed)
        self.teacher = Teacher(columns, seed=seed, ctr=ctr).to(self.device)
        self.columns = columns.to(self.device)
        self._label_keys = [key_of(seed, f"label:{task}") for task in _TASKS]

    def _bounds(self, split: Split) -> tuple[int, int]:
        first, second = self.total * 8 // 10, self.total * 9 // 10
        return {
            Split.TRAIN: (0, first),
            Split.VALID: (first, second),
            Split.TEST: (second, self.total),
        }[split]

    def batches(self, split: Split, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        """Batches of one split in time order; see `Source.batches`.

        Raises:
            UsageError: if `batch_size` < 1 or `skip` < 0.
        """
        if batch_size < 1 or skip < 0:
            raise UsageError(f"batch_size is {batch_size} and skip is {skip}, expected at least 1 and 0")
        start, stop = self._bounds(split)
        for first in range(start + skip * batch_size, stop, batch_size):
            yield self.batch(torch.arange(first, min(first + batch_size, stop)))

    def rows(self, split: Split) -> int:
        """How many rows the split has."""
        start, stop = self._bounds(split)
        return stop - start

    @property
    def skipped(self) -> dict[str, int]:
        """Empty: no row is bad."""
        return {}

    def identity(self) -> dict[str, str | int | float]:
        """What makes two synthetic logs the same rows."""
        return {
            "source": self.name,
            "generator_version": _GENERATOR_VERSION,
            "rows": self.total,
            "seed": self.seed,
            "variant": str(self.variant),
            "ctr": self.ctr,
            "tasks": len(self.schema.tasks),
        }

    def batch(self, rows: Tensor) -> Batch:
        """The rows of these numbers, int64 [B], in any order: how a shard draws its own."""
        drawn = self.columns.draw(rows.to(self.device))
        click_logit, conversion_logit = self.teacher.logits(drawn)
        label = self._bernoulli(drawn, click_logit, 0)
        labels: Tensor | Mapping[str, Tensor] = label
        if len(self.schema.tasks) == 2:
            converted = label * self._bernoulli(drawn, conversion_logit, 1)
            labels = dict(zip(_TASKS, (label, converted), strict=True))
        dense = {
            Variant.LOG1P: lambda: drawn.log,
            Variant.RAW: lambda: drawn.raw,
            Variant.BOTH: lambda: torch.cat([drawn.log, drawn.raw], dim=1),
        }[self.variant]()
        return Batch(dense.float(), drawn.ids, labels, None, drawn.rows)

    def _bernoulli(self, drawn: Drawn, logit: Tensor, task: int) -> Tensor:
        uniform = unit_interval(bits(drawn.rows, self._label_keys[task]))
        return (uniform < torch.sigmoid(logit)).float()

    def teacher_logit(self, rows: Tensor, *, task: str = "label") -> Tensor:
        """The logit of the true probability of a 1, float64 [B].

        Args:
            rows: int64 [B], row numbers.
            task: `label`, or `conversion` (the probability of a click that converts).

        Raises:
            UnknownNameError: for a task that the source does not have.
        """
        if task not in self.schema.tasks:
            raise unknown_name("task", task, self.schema.tasks, where="the synthetic click log")
        click, conversion = self.teacher.logits(self.columns.draw(rows.to(self.device)))
        return click if task == "label" else torch.logit(torch.sigmoid(click) * torch.sigmoid(conversion))

    def bayes_ne(self, split: Split, *, task: str = "label", at_most: int = 100_000) -> BayesNE:
        """Normalized entropy of the teacher itself, which no model can beat in expectation.

        Args:
            split: Which rows.
            task: Which label.
            at_most: Rows to look at, evenly spread over the split.

        Raises:
            UnknownNameError: for a task that the source does not have.
            UsageError: if `at_most` < 2.
        """
        if at_most < 2:
            raise UsageError(f"at_most is {at_most}, expected at least 2 rows")
        start, stop = self._bounds(split)
        count = min(stop - start, at_most)
        numbers = start + (torch.arange(count) * (stop - start)) // count
        p = torch.cat([torch.sigmoid(self.teacher_logit(part, task=task)) for part in numbers.split(16_384)])
        entropy, base = binary_entropy(p), p.mean()
        denominator = binary_entropy(base)
        ne = entropy.mean() / denominator
        # Delta method for the ratio; the derivative of H at the base rate is logit(1 - base).
        influence = (entropy - ne * torch.log((1 - base) / base) * (p - base)) / denominator
        error = float(influence.std()) / math.sqrt(count) if count > 1 else math.inf
        return BayesNE(float(ne), error, count)


def _dense_names(variant: Variant) -> tuple[str, ...]:
    raw, log = (tuple(s.name for s in DENSE), tuple(f"log1p_{s.name}" for s in DENSE))
    return {Variant.LOG1P: log, Variant.RAW: raw, Variant.BOTH: log + raw}[variant]
