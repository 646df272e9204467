"""How click predictions are judged: normalized entropy, log loss, AUC and calibration.

Shapes: N rows, T tasks. Sums are kept in fp64. Cross entropies are in nats; normalized entropy (NE) does
not depend on the base of the logarithm.

Normalized entropy (He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014,
equation 1) is the mean cross entropy of the predictions over the entropy of the background click rate p:

    NE = (1/N) sum_i CE(y_i, p_i) / -(p ln p + (1 - p) ln(1 - p))

Here p is by default the mean label of the evaluated rows and probabilities are clamped to
[1e-12, 1 - 1e-12], as torchrec's NE metric does; `base` takes the click rate of the training rows instead.
A metric that has no value (NE of rows of one class, calibration without a positive) is None, never a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.errors import UsageError
from loka.recsys.evaluation.predictions import Predictions

__all__ = ["PROBABILITY_FLOOR", "ClickSums", "TaskMetrics", "auc", "evaluate", "log_loss_rows"]

PROBABILITY_FLOOR = 1e-12
"""Probabilities are clamped to [PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR]."""

# The same clamp said of logits: sigmoid is monotone, so clamping z is clamping p, without cancellation.
_LOGIT_LIMIT = math.log1p(-PROBABILITY_FLOOR) - math.log(PROBABILITY_FLOOR)


def log_loss_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each row in nats.

    Args:
        logits: Any float dtype and shape.
        labels: In [0, 1], shaped like the logits.

    Returns:
        fp64, shaped like the logits; NaN where a logit is NaN.
    """
    z = logits.double().clamp(-_LOGIT_LIMIT, _LOGIT_LIMIT)
    y = labels.double()
    return -(y * nn.functional.logsigmoid(z) + (1.0 - y) * nn.functional.logsigmoid(-z))


def _ratio(numerator: float, denominator: float) -> float | None:
    """The quotient, or None where it is not a finite number."""
    if denominator == 0.0:
        return None
    value = numerator / denominator
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class ClickSums:
    """The sums that NE, log loss and calibration are made of; adding two is exact merging of their rows.

    Attributes:
        sums: fp64 [4, T]: weight, weight * label, weight * cross entropy (nats), weight * probability.
    """

    sums: Tensor

    @classmethod
    def zeros(cls, tasks: int, *, device: torch.device | str = "cpu") -> ClickSums:
        """The sums of no rows."""
        return cls(torch.zeros(4, tasks, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> ClickSums:
        """The sums of some rows, on the device of the logits and without waiting for it.

        Args:
            logits: Float [N, T].
            labels: In [0, 1], [N, T].
            weights: [N], not negative; None for 1 everywhere.

        Raises:
            UsageError: if the shapes do not agree.
        """
        if logits.dim() != 2 or labels.shape != logits.shape:
            raise UsageError(
                f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} must both be [rows, tasks]"
            )
        if weights is not None and weights.shape != logits.shape[:1]:
            raise UsageError(f"weights {tuple(weights.shape)} do not fit {logits.shape[0]} rows")
        z = logits.detach().double().clamp(-_LOGIT_LIMIT, _LOGIT_LIMIT)
        y = labels.double()
        per_row = torch.stack([torch.ones_like(y), y, log_loss_rows(z, y), torch.sigmoid(z)])
        if weights is not None:
            per_row = per_row * weights.double()[:, None]
        return cls(per_row.sum(dim=1))

    def __add__(self, other: ClickSums) -> ClickSums:
        return ClickSums(self.sums + other.sums)

    def _columns(self) -> list[tuple[float, float, float, float]]:
        return [(c[0], c[1], c[2], c[3]) for c in self.sums.T.tolist()]

    def base_rate(self) -> list[float | None]:
        """Weighted mean label of each task."""
        return [_ratio(label, weight) for weight, label, _, _ in self._columns()]

    def log_loss(self) -> list[float | None]:
        """Weighted mean cross entropy of each task in nats."""
        return [_ratio(entropy, weight) for weight, _, entropy, _ in self._columns()]

    def calibration(self) -> list[float | None]:
        """Sum of predicted probabilities over sum of labels; 1 is perfect, None without a positive label."""
        return [_ratio(predicted, label) for _, label, _, predicted in self._columns()]

    def normalized_entropy(self, *, base: float | None = None) -> list[float | None]:
        """NE of each task (He et al. 2014, equation 1).

        Args:
            base: Background click rate in (0, 1), such as that of the training rows; None takes the mean
                label of these rows.

        Returns:
            None for a task whose rows are all of one class (the entropy of the base rate is 0) or none.

        Raises:
            UsageError: if base is not in (0, 1).
        """
        if base is not None and not 0.0 < base < 1.0:
            raise UsageError(f"the base rate of NE must lie in (0, 1), got {base}")
        values: list[float | None] = []
        for loss, own_rate in zip(self.log_loss(), self.base_rate(), strict=True):
            rate = own_rate if base is None else base
            if loss is None or rate is None or not 0.0 < rate < 1.0:
                values.append(None)
            else:
                values.append(_ratio(loss, -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))))
        return values


def auc(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float | None:
    """Area under the ROC curve over all rows, ties counted half, by torchmetrics (no binning).

    torchmetrics has no weighted AUC, so rows of weight 0 are left out and all others count equally.

    Args:
        logits: Float [N]; only their order matters.
        labels: 0 or 1, [N].
        weights: [N], or None.

    Returns:
        None where it is undefined: rows of one class, labels that are not 0 or 1, or a NaN logit.
    """
    from torchmetrics.functional.classification import binary_auroc

    if weights is not None:
        kept = weights > 0
        logits, labels = logits[kept], labels[kept]
    positive = labels == 1
    if not bool((positive | (labels == 0)).all()) or bool(logits.isnan().any()):
        return None
    if not bool(positive.any()) or bool(positive.all()):
        return None
    # Ranks in place of probabilities: sigmoid in fp32 would tie all logits above 17.
    _, ranks = torch.unique(logits, return_inverse=True)
    scores = ranks.double() / ranks.numel()
    return float(binary_auroc(scores, positive.long(), thresholds=None, validate_args=False))


@dataclass(frozen=True, slots=True)
class TaskMetrics:
    """What is said of one task over some rows. None: undefined there.

    Attributes:
        rows: Number of rows.
        base_rate: Weighted mean label.
        ne: Normalized entropy.
        log_loss: Weighted mean cross entropy in nats.
        auc: Area under the ROC curve.
        calibration: Sum of predictions over sum of labels.
    """

    rows: int
    base_rate: float | None
    ne: float | None
    log_loss: float | None
    auc: float | None
    calibration: float | None


def evaluate(predictions: Predictions, *, bases: Sequence[float] | None = None) -> dict[str, TaskMetrics]:
    """All metrics of each task.

    Args:
        predictions: Of N rows and T tasks.
        bases: Background click rate of each task for NE; None takes the mean label of these rows.

    Raises:
        UsageError: if there is not one base rate a task, or one is outside (0, 1).
    """
    tasks = predictions.tasks
    if bases is not None and len(bases) != len(tasks):
        raise UsageError(f"{len(bases)} base rates for {len(tasks)} tasks ({', '.join(tasks)})")
    sums = ClickSums.of(predictions.logits, predictions.labels, predictions.weights)
    result = {}
    for t, task in enumerate(tasks):
        own = ClickSums(sums.sums[:, t : t + 1])
        result[task] = TaskMetrics(
            rows=len(predictions),
            base_rate=own.base_rate()[0],
            ne=own.normalized_entropy(base=None if bases is None else bases[t])[0],
            log_loss=own.log_loss()[0],
            auc=auc(predictions.logits[:, t], predictions.labels[:, t], predictions.weights),
            calibration=own.calibration()[0],
        )
    return result
