"""How two runs differ on the same rows: one pair, one task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.recsys.evaluation.metrics import TaskMetrics, evaluate, log_loss_rows
from loka.recsys.evaluation.predictions import Predictions, same_rows

__all__ = ["PairDifference", "pair_differences"]


@dataclass(frozen=True, slots=True)
class PairDifference:
    """One task of one pair of runs; all differences are candidate - baseline. None: undefined, or diverged.

    Attributes:
        task: The task.
        seed: The seed of the pair, if it has one.
        baseline: Metrics of the baseline; None if it diverged.
        candidate: Metrics of the candidate; None if it diverged.
        relative_ne_percent: 100 (NE_c - NE_b) / NE_b. On the same rows it is also the relative change of the
            log loss, whatever the base rate.
        relative_ne_se_percent: Its standard error from the sampling of rows: that of the mean per-row
            difference of the losses, over the baseline's log loss. It says nothing of the noise of training.
        ne: Difference of NE.
        log_loss: Difference of log loss, nats.
        log_loss_se: Its standard error from the sampling of rows.
        auc: Difference of AUC.
        calibration: Difference of calibration.
    """

    task: str
    seed: int | None
    baseline: TaskMetrics | None
    candidate: TaskMetrics | None
    relative_ne_percent: float | None = None
    relative_ne_se_percent: float | None = None
    ne: float | None = None
    log_loss: float | None = None
    log_loss_se: float | None = None
    auc: float | None = None
    calibration: float | None = None


def _minus(candidate: float | None, baseline: float | None) -> float | None:
    return None if candidate is None or baseline is None else candidate - baseline


def _percent(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else 100.0 * part / whole


def _standard_error(differences: Tensor, weights: Tensor | None) -> float | None:
    """Of the weighted mean of independent rows; sd / sqrt(N) where all weights are 1."""
    n = differences.numel()
    w = torch.ones_like(differences) if weights is None else weights.double()
    total = float(w.sum())
    if n < 2 or total == 0.0:
        return None
    centred = differences - (w * differences).sum() / total
    value = math.sqrt(float((w * centred).square().sum()) * n / (n - 1)) / total
    return value if math.isfinite(value) else None


def pair_differences(
    baseline: Predictions | None,
    candidate: Predictions | None,
    *,
    tasks: Sequence[str],
    seed: int | None = None,
    bases: Sequence[float] | None = None,
) -> tuple[PairDifference, ...]:
    """Compare two runs on the same rows, task by task.

    Args:
        baseline: Predictions of the baseline; None if it diverged.
        candidate: Predictions of the candidate; None if it diverged.
        tasks: Names of the tasks.
        seed: The seed of the pair.
        bases: Background click rate of each task for NE; None takes the mean label of the rows.

    Raises:
        UsageError: if the two are not about the same rows.
    """
    if baseline is not None and candidate is not None and not same_rows(baseline, candidate):
        raise UsageError(
            "the two runs predict different rows", hint="evaluate both on one split of one source"
        )
    ours = None if baseline is None else evaluate(baseline, bases=bases)
    theirs = None if candidate is None else evaluate(candidate, bases=bases)
    if baseline is None or candidate is None or ours is None or theirs is None:
        return tuple(
            PairDifference(task, seed, ours[task] if ours else None, theirs[task] if theirs else None)
            for task in tasks
        )
    result = []
    for t, task in enumerate(tasks):
        b, c = ours[task], theirs[task]
        labels = baseline.labels[:, t]
        rows = log_loss_rows(candidate.logits[:, t], labels) - log_loss_rows(baseline.logits[:, t], labels)
        log_loss, log_loss_se = _minus(c.log_loss, b.log_loss), _standard_error(rows, baseline.weights)
        defined = b.ne is not None
        result.append(
            PairDifference(
                task,
                seed,
                b,
                c,
                relative_ne_percent=_percent(log_loss, b.log_loss) if defined else None,
                relative_ne_se_percent=_percent(log_loss_se, b.log_loss) if defined else None,
                ne=_minus(c.ne, b.ne),
                log_loss=log_loss,
                log_loss_se=log_loss_se,
                auc=_minus(c.auc, b.auc),
                calibration=_minus(c.calibration, b.calibration),
            )
        )
    return tuple(result)
