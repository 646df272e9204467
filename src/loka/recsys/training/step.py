"""One training step: its loss, what is told of it, and how it can fail."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.errors import LokaError
from loka.recsys.batch import Batch
from loka.recsys.evaluation.metrics import ClickSums
from loka.recsys.training.step_clock import StepSpeed

__all__ = ["DivergedError", "StepInfo", "TrainResult", "click_loss"]


class DivergedError(LokaError, ArithmeticError):
    """A run whose loss, or whose predictions, are no longer finite.

    Attributes:
        step: The step whose loss was not finite first (1 is the first).
    """

    exit_code = 1

    def __init__(self, what: str, *, step: int) -> None:
        super().__init__(what, hint="lower the learning rates; of a planned model, keep more sites in bf16")
        self.step = step


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A step that is done: gradients are still there, weights are already updated.

    Attributes:
        step: Its number, from 1.
        rows: Rows trained on so far, this step's included.
        loss: 0-dim, on the device.
        batch: Its rows, on the device.
    """

    step: int
    rows: int
    loss: Tensor
    batch: Batch


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a finished training says.

    Attributes:
        steps: Steps in all.
        rows: Rows in all.
        progressive: Sums over all training rows, each predicted before it was learned from.
        speed: Of the steps of this process; None if there were none.
    """

    steps: int
    rows: int
    progressive: ClickSums
    speed: StepSpeed | None


def click_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Weighted mean of the binary cross entropy over rows, then the mean over tasks, in fp32.

    Args:
        logits: [B, T].
        labels: In [0, 1], [B, T].
        weights: [B], not negative; a batch whose weights are all 0 has loss 0.

    Returns:
        0-dim fp32, in nats.
    """
    losses = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(
        dim=1
    )
    if weights is None:
        return losses.mean()
    return (losses * weights).sum() / weights.sum().clamp_min(torch.finfo(torch.float32).tiny)
