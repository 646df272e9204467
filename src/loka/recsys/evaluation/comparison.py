"""One comparison of two arms over all their pairs: what `loka run` prints and writes.

With several pairs (seeds) an interval is Student's t over the pairs: the noise of training. With one pair it
is the normal interval from the sampling of rows, and the noise of training has to be known from elsewhere.
A run that diverged is a result: it is counted, and no mean is given that would leave it out unsaid.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from loka.errors import UsageError
from loka.numerics.intervals import mean_interval
from loka.recsys.evaluation.pair_difference import PairDifference
from loka.vocab import Pass

__all__ = ["Change", "Comparison", "Coverage", "NoiseSource", "TaskComparison", "compare"]


class NoiseSource(StrEnum):
    """What an interval covers."""

    PAIRS = "pairs"
    ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Change:
    """One metric of both arms, as means over the pairs. None: undefined, or a run diverged.

    Attributes:
        baseline: The baseline's.
        candidate: The candidate's.
        difference: Candidate - baseline; for `relative_ne_percent` the relative change in percent.
        low: Lower end of the difference's interval, None where there is none.
        high: Upper end.
        noise: What the interval covers.
    """

    baseline: float | None
    candidate: float | None
    difference: float | None
    low: float | None = None
    high: float | None = None
    noise: NoiseSource | None = None


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """One task.

    Attributes:
        task: Its name.
        rows: Rows that judge.
        relative_ne_percent: Relative change of NE, in percent; the same as that of the log loss.
        ne: Normalized entropy.
        log_loss: Nats.
        auc: Area under the ROC curve.
        calibration: Sum of predictions over sum of labels.
        pairs: Every pair by itself.
    """

    task: str
    rows: int
    relative_ne_percent: Change
    ne: Change
    log_loss: Change
    auc: Change
    calibration: Change
    pairs: tuple[PairDifference, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of one pass the plan put into FP8.

    Attributes:
        gemm_pass: fwd, dgrad or wgrad.
        sites: All sites.
        sites_fp8: Those whose product of this pass is in FP8.
        gemm_flops: FLOPs of all products of this pass in one step.
        gemm_flops_fp8: Those in FP8.
    """

    gemm_pass: Pass
    sites: int
    sites_fp8: int
    gemm_flops: int
    gemm_flops_fp8: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two arms, all metrics. The caller adds the last four by `dataclasses.replace`.

    Attributes:
        baseline: Name of the baseline arm.
        candidate: Name of the other.
        split: Which rows judge.
        pairs: Number of pairs.
        diverged: Runs that diverged, by arm.
        level: Coverage of the intervals.
        tasks: One for each task.
        coverage: FP8 by pass.
        steps_per_s: By arm; only where real kernels ran.
        noise: What is known of the noise of training, said beside the number of one pair.
        notes: Anything else to be said, such as that the plan is by accuracy only.
    """

    baseline: str
    candidate: str
    split: str
    pairs: int
    diverged: Mapping[str, int]
    level: float
    tasks: tuple[TaskComparison, ...]
    coverage: tuple[Coverage, ...] = ()
    steps_per_s: Mapping[str, float] | None = None
    noise: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a number that is not finite becomes None."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    def flat_metrics(self) -> dict[str, float]:
        """Name to number, as benchmark records keep them; what is undefined is left out.

        Such as `ne.<arm>`, `auc.<task>.<arm>` where there are several tasks, `relative_ne_percent`.
        """
        result: dict[str, float | None] = {"pairs": float(self.pairs)}
        for task in self.tasks:
            end = "" if len(self.tasks) == 1 else f".{task.task}"
            for name in ("ne", "log_loss", "auc", "calibration"):
                change: Change = getattr(task, name)
                result[f"{name}{end}.{self.baseline}"] = change.baseline
                result[f"{name}{end}.{self.candidate}"] = change.candidate
            relative = task.relative_ne_percent
            result[f"relative_ne_percent{end}"] = relative.difference
            result[f"relative_ne_percent_low{end}"] = relative.low
            result[f"relative_ne_percent_high{end}"] = relative.high
        for arm, count in self.diverged.items():
            result[f"diverged.{arm}"] = float(count)
        for part in self.coverage:
            result[f"fp8_sites.{part.gemm_pass}"] = float(part.sites_fp8)
            result[f"fp8_flops_share.{part.gemm_pass}"] = part.gemm_flops_fp8 / max(part.gemm_flops, 1)
        for arm, speed in (self.steps_per_s or {}).items():
            result[f"steps_per_s.{arm}"] = speed
        return {k: v for k, v in result.items() if v is not None and math.isfinite(v)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, StrEnum):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(values: Sequence[float | None]) -> float | None:
    """None if one is None: a mean that leaves out what is undefined would mislead."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _change(pairs: Sequence[PairDifference], metric: str, *, level: float) -> Change:
    differences = [getattr(pair, metric) for pair in pairs]
    levels = "ne" if metric == "relative_ne_percent" else metric
    baseline = _mean([getattr(p.baseline, levels) if p.baseline else None for p in pairs])
    candidate = _mean([getattr(p.candidate, levels) if p.candidate else None for p in pairs])
    difference = _mean(differences)
    if difference is None:
        return Change(baseline, candidate, None)
    if len(pairs) > 1:
        interval = mean_interval(differences, level=level)
        return Change(baseline, candidate, difference, interval.low, interval.high, NoiseSource.PAIRS)
    errors = {"relative_ne_percent": pairs[0].relative_ne_se_percent, "log_loss": pairs[0].log_loss_se}
    error = errors.get(metric)
    if error is None:
        return Change(baseline, candidate, difference)
    half = statistics.NormalDist().inv_cdf((1 + level) / 2) * error
    return Change(baseline, candidate, difference, difference - half, difference + half, NoiseSource.ROWS)


def compare(
    pairs: Sequence[Sequence[PairDifference]],
    *,
    baseline: str,
    candidate: str,
    split: str,
    level: float = 0.9,
) -> Comparison:
    """Sum up the pairs of two arms.

    Args:
        pairs: For each pair of runs its tasks, as `pair_differences` gives them.
        baseline: Name of the baseline arm.
        candidate: Name of the other.
        split: Which rows judge.
        level: Coverage of the intervals, in (0, 1).

    Raises:
        UsageError: if there are no pairs, or the level is not in (0, 1).
    """
    if not pairs:
        raise UsageError(f"no pairs of `{baseline}` and `{candidate}` to compare")
    if not 0.0 < level < 1.0:
        raise UsageError(f"the level of an interval must lie in (0, 1), got {level}")
    tasks = []
    for of_task in zip(*pairs, strict=True):
        metrics = [m for p in of_task for m in (p.baseline, p.candidate) if m is not None]
        changes = {
            name: _change(of_task, name, level=level)
            for name in ("relative_ne_percent", "ne", "log_loss", "auc", "calibration")
        }
        rows = metrics[0].rows if metrics else 0
        tasks.append(TaskComparison(of_task[0].task, rows, **changes, pairs=tuple(of_task)))
    diverged = {
        baseline: sum(pair[0].baseline is None for pair in pairs),
        candidate: sum(pair[0].candidate is None for pair in pairs),
    }
    return Comparison(baseline, candidate, str(split), len(pairs), diverged, level, tuple(tasks))
