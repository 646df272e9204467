"""What a paired training gives: every run of every arm, and their comparisons."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loka.errors import unknown_name
from loka.recsys.evaluation.comparison import Comparison, compare
from loka.recsys.evaluation.pair_difference import pair_differences
from loka.recsys.evaluation.predictions import Predictions, write_predictions
from loka.recsys.source import Split
from loka.recsys.training.step import TrainResult

__all__ = ["JUDGED_SPLITS", "ArmRun", "PairedResult"]

JUDGED_SPLITS = (Split.VALID, Split.TEST)
"""The rows that are predicted after training: validation rows choose, test rows judge."""


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One arm of one seed.

    Attributes:
        arm: Its name.
        seed: Its seed.
        result: What training said; None if it diverged.
        predictions: Of the validation and test rows; empty if it diverged.
        diverged: Why it did, or None.
    """

    arm: str
    seed: int
    result: TrainResult | None
    predictions: Mapping[Split, Predictions]
    diverged: str | None = None


@dataclass(frozen=True, slots=True)
class PairedResult:
    """All runs of all arms.

    Attributes:
        arms: Names; the first is the baseline.
        seeds: One pair each.
        tasks: Names of the tasks.
        runs: Every arm of every seed.
    """

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]
    runs: tuple[ArmRun, ...]

    def run(self, arm: str, seed: int) -> ArmRun:
        """One run.

        Raises:
            UnknownNameError: if there is no such arm or seed.
        """
        for run in self.runs:
            if (run.arm, run.seed) == (arm, seed):
                return run
        if arm not in self.arms:
            raise unknown_name("arm", arm, self.arms)
        raise unknown_name("seed", str(seed), [str(s) for s in self.seeds])

    def compare(
        self,
        candidate: str | None = None,
        *,
        baseline: str | None = None,
        split: Split = Split.TEST,
        level: float = 0.9,
        bases: Sequence[float] | None = None,
    ) -> Comparison:
        """Compare two arms over all seeds.

        Args:
            candidate: An arm; None takes the second.
            baseline: An arm; None takes the first.
            split: Choose on validation rows, judge on test rows.
            level: Coverage of the intervals.
            bases: Background click rate of each task for NE; None takes the mean label of the rows.

        Raises:
            UnknownNameError: if there is no such arm.
        """
        first, second = baseline or self.arms[0], candidate or self.arms[1]
        pairs = [
            pair_differences(
                self.run(first, seed).predictions.get(split),
                self.run(second, seed).predictions.get(split),
                tasks=self.tasks,
                seed=seed,
                bases=bases,
            )
            for seed in self.seeds
        ]
        return compare(pairs, baseline=first, candidate=second, split=split, level=level)

    def steps_per_s(self) -> dict[str, float]:
        """Median over the seeds of each arm's speed; arms without a measured speed are left out.

        A run's speed is that of its median step: steps that Probe observes run eagerly and are no measure of
        the arm. It says something of FP8 only where real kernels ran.
        """
        speeds: dict[str, list[float]] = {}
        for run in self.runs:
            if run.result is not None and run.result.speed is not None:
                speeds.setdefault(run.arm, []).append(1e6 / run.result.speed.median_step_us)
        return {arm: statistics.median(values) for arm, values in speeds.items()}

    def write_predictions(self, directory: Path) -> list[Path]:
        """Write `predictions-<split>-seed-<seed>.parquet` for each split and seed, a column for each arm.

        Runs that diverged have no predictions and no column.

        Returns:
            The files written.

        Raises:
            ArtifactError: if a file cannot be written.
        """
        paths = []
        for seed in self.seeds:
            for split in JUDGED_SPLITS:
                runs = {arm: self.run(arm, seed) for arm in self.arms}
                arms = {arm: run.predictions[split] for arm, run in runs.items() if split in run.predictions}
                if arms:
                    path = directory / f"predictions-{split}-seed-{seed}.parquet"
                    write_predictions(path, arms)
                    paths.append(path)
        return paths
