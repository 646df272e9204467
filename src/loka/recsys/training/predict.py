"""Asking a model: one batch in the run's precision, or every row of a split."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from loka.errors import UsageError
from loka.recsys.batch import Batch
from loka.recsys.evaluation.predictions import Predictions
from loka.recsys.source import Source, Split
from loka.recsys.training.config import ComputeDtype

__all__ = ["forward", "predict"]


def forward(model: nn.Module, batch: Batch, *, dtype: ComputeDtype, tasks: int) -> Tensor:
    """Logits of a batch, as training sees them.

    Args:
        model: `model(batch)` gives logits [B, T]; under autocast where dtype is bf16, which leaves embedding
            lookups in fp32.
        batch: B rows on the model's device.
        dtype: bf16 or fp32.
        tasks: T.

    Raises:
        UsageError: if the model gives another shape.
    """
    bf16 = dtype is ComputeDtype.BF16
    with torch.autocast(batch.dense.device.type, dtype=torch.bfloat16, enabled=bf16):
        logits = cast(Tensor, model(batch))
    if logits.shape != (len(batch), tasks):
        raise UsageError(f"the model gives logits {tuple(logits.shape)}, expected {(len(batch), tasks)}")
    return logits


def predict(
    model: nn.Module,
    source: Source,
    split: Split,
    *,
    batch_size: int,
    dtype: ComputeDtype,
    device: torch.device,
) -> Predictions:
    """Predict every row of a split, in evaluation mode and without gradients; the model's mode is restored.

    Rows that the source does not number are numbered from 0.

    Args:
        model: As in `forward`, on the device.
        source: Where the rows come from.
        split: Which rows.
        batch_size: Rows a batch.
        dtype: bf16 or fp32.
        device: Where to compute.

    Returns:
        On the CPU; of no rows if the split has none.
    """
    tasks = source.schema.tasks
    pieces: list[Predictions] = []
    was_training, seen = model.training, 0
    model.eval()
    try:
        with torch.no_grad():
            for batch in source.batches(split, batch_size):
                rows = batch.rows if batch.rows.numel() else torch.arange(seen, seen + len(batch))
                logits = forward(model, batch.to(device), dtype=dtype, tasks=len(tasks)).float().cpu()
                pieces.append(Predictions(tasks, rows.cpu(), logits, batch.labels.cpu(), batch.weight))
                seen += len(batch)
    finally:
        model.train(was_training)
    return _joined(tasks, pieces)


def _joined(tasks: tuple[str, ...], pieces: list[Predictions]) -> Predictions:
    if not pieces:
        none = torch.empty(0, len(tasks))
        return Predictions(tasks, torch.empty(0, dtype=torch.int64), none, none)
    weights = [torch.ones(len(p)) if p.weights is None else p.weights.cpu() for p in pieces]
    return Predictions(
        tasks,
        torch.cat([p.rows for p in pieces]),
        torch.cat([p.logits for p in pieces]),
        torch.cat([p.labels for p in pieces]),
        None if all(p.weights is None for p in pieces) else torch.cat(weights),
    )
