"""What Probe needs to say what the loss feels: the loss of each held-out row, and the rows themselves.

The rows are those of the validation split, so that nothing is chosen on the rows that judge (test).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.errors import DataError, UsageError
from loka.recsys.batch import Batch
from loka.recsys.evaluation.metrics import log_loss_rows
from loka.recsys.job.config import JobConfig
from loka.recsys.source import Source, Split
from loka.recsys.training.config import ComputeDtype
from loka.recsys.training.predict import forward

__all__ = ["DEFAULT_LOSS_ROWS", "HeldOutBatches", "LossEstimate", "loss_estimate", "row_loss"]

logger = logging.getLogger("loka")

DEFAULT_LOSS_ROWS = 65_536
"""Held-out rows where their number is not given."""


def row_loss(*, dtype: ComputeDtype, tasks: int) -> Callable[[nn.Module, Any], Tensor]:
    """The function `evaluate(model, batch)` for reference models.

    The loss of a row is its cross entropy in nats, the mean over tasks, times the row's weight where the
    batch has weights: the relative change of the sum is then that of the weighted mean that training
    minimises. Gradients flow through it; the model's mode is the caller's to set.

    Args:
        dtype: In what the tower multiplies, as in training.
        tasks: Labels of a row.

    Returns:
        A function giving fp64 [rows] on the batch's device.
    """

    def evaluate(model: nn.Module, batch: Batch) -> Tensor:
        logits = forward(model, batch, dtype=dtype, tasks=tasks)
        losses = log_loss_rows(logits, batch.labels).mean(dim=1)
        return losses if batch.weight is None else losses * batch.weight.double()

    return evaluate


class HeldOutBatches:
    """Batches of a split that can be read again and again: read once from the source, then kept on the host.

    Args:
        source: Where the rows come from.
        rows: Read whole batches until there are this many, from the front of the split.
        batch_size: Rows a batch.
        device: Where each batch is sent as it is read.
        split: Which rows.

    Raises:
        UsageError: for fewer than one row.
    """

    def __init__(
        self,
        source: Source,
        *,
        rows: int,
        batch_size: int,
        device: torch.device | str,
        split: Split = Split.VALID,
    ) -> None:
        if rows < 1:
            raise UsageError(f"held-out rows must be at least 1, got {rows}")
        self._source, self._split = source, split
        self._limit, self._batch_size = rows, batch_size
        self._device = torch.device(device)
        self._kept: list[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """The same batches in the same order each time, on the device."""
        for batch in self._batches():
            yield batch.to(self._device)

    @property
    def rows(self) -> int:
        """Rows in all; reads them where they were not read yet."""
        return sum(len(batch) for batch in self._batches())

    def _batches(self) -> list[Batch]:
        if self._kept is None:
            kept: list[Batch] = []
            left = self._limit
            for batch in self._source.batches(self._split, min(self._batch_size, self._limit)):
                kept.append(batch)
                left -= len(batch)
                if left <= 0:
                    break
            self._kept = kept
        return self._kept


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """What `Probe(evaluate=, batches=)` takes for a job.

    Attributes:
        evaluate: Loss of each row, [rows].
        batches: The held-out rows.
    """

    evaluate: Callable[[nn.Module, Any], Tensor]
    batches: HeldOutBatches


def loss_estimate(job: JobConfig, source: Source, rows: int | None) -> LossEstimate | None:
    """The held-out loss of a job's model, for `Probe(model, evaluate=..., batches=...)`.

    Args:
        job: Says precision, batch size and device.
        source: Its validation rows are used.
        rows: Held-out rows; 0 switches the estimate off. None takes `DEFAULT_LOSS_ROWS`, and does without
            an estimate (and says so) where the source has no validation rows.

    Returns:
        None where there is no estimate.

    Raises:
        UsageError: for a negative number of rows.
        DataError: where rows were asked for and the source has no validation rows.
    """
    if rows == 0:
        return None
    batches = HeldOutBatches(
        source,
        rows=DEFAULT_LOSS_ROWS if rows is None else rows,
        batch_size=job.train.eval_batch_size or job.train.batch_size,
        device=job.train.device,
    )
    if batches.rows == 0:
        missing = f"the source `{source.name}` has no validation rows to estimate the change of the loss on"
        if rows is not None:
            raise DataError(missing, hint="ask for no estimate, with 0 rows")
        logger.warning("%s", missing)
        return None
    evaluate = row_loss(dtype=job.train.dtype, tasks=len(source.schema.tasks))
    return LossEstimate(evaluate, batches)
