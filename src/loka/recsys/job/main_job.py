"""The main job: train with Probe, write a profile, make a plan, train by the plan, compare.

Every stage leaves its file in the job's folder, and a stage whose file is complete is not done again when
the job is resumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loka.artifacts import Plan, Profile, read_plan, read_profile, write_plan, write_record
from loka.dispatch import apply_plan, make_plan
from loka.kernels import kernel
from loka.probe import Probe
from loka.recsys.evaluation.comparison import Comparison, TaskComparison
from loka.recsys.job.check import check_job
from loka.recsys.job.config import JobConfig
from loka.recsys.job.coverage import coverage_of
from loka.recsys.job.folder import COMPARISON_NAME, PLAN_NAME, PROFILE_NAME, held_folder
from loka.recsys.job.observed import fresh_model, observed_training, write_learned
from loka.recsys.pairs.noise import PairNoise, known_noise
from loka.recsys.pairs.paired import run_arm
from loka.recsys.pairs.paired_result import JUDGED_SPLITS, ArmRun, PairedResult
from loka.recsys.source import Source
from loka.recsys.training.step import DivergedError
from loka.vocab import Pass, Site

__all__ = ["BASELINE", "PLANNED", "JobResult", "plan_digest", "run_job"]

BASELINE, PLANNED = "bf16", "planned"

_Z90 = 1.645  # of a two-sided 90 % interval

logger = logging.getLogger("loka")


@dataclass(frozen=True, slots=True)
class JobResult:
    """What the main job leaves behind, as objects.

    Attributes:
        profile: What was measured.
        plan: What was chosen.
        comparison: Planned against bf16.
        paired: Every run.
        noise: Of one pair, where there is only one.
    """

    profile: Profile
    plan: Plan
    comparison: Comparison
    paired: PairedResult
    noise: PairNoise | None = None

    @property
    def keeps_the_loss(self) -> bool | None:
        """Whether the relative NE change may lie within the requirement.

        None where it has no limit, or where no NE is defined (no test rows, or all of one class). False only
        when the whole interval lies above the limit, or the planned run alone diverged. The interval of one
        pair knows the sampling of rows alone; the known noise of pairs is added to it.
        """
        limit = self.plan.requirement.max_loss_increase
        if limit is None:
            return None
        if self.comparison.diverged[PLANNED] > self.comparison.diverged[BASELINE]:
            return False
        lowest = [self.least_change_percent(task) for task in self.comparison.tasks]
        judged = [value for value in lowest if value is not None]
        return all(value <= 100 * limit for value in judged) if judged else None

    def least_change_percent(self, task: TaskComparison) -> float | None:
        """Lower end of the 90 % interval of a task's relative NE change, all known noise in it."""
        change = task.relative_ne_percent
        if change.difference is None:
            return None
        from_rows = 0.0 if change.low is None else change.difference - change.low
        from_training = 0.0 if self.noise is None else _Z90 * self.noise.sd_percent
        return change.difference - math.hypot(from_rows, from_training)


def run_job(
    job: JobConfig,
    directory: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_ceiling: Callable[[Probe], object] | None = None,
    on_plan: Callable[[Plan], object] | None = None,
    bar: bool | None = None,
) -> JobResult:
    """Do the whole main job.

    Args:
        job: What to do.
        directory: Its folder; made if it does not exist, and empty unless resumed.
        resume: Go on with the job that was stopped in this folder.
        overwrite: Delete the run in this folder first.
        on_ceiling: Told the shares of a step as soon as they are known.
        on_plan: Told the plan before the planned model is trained.
        bar: As in `Progress`.

    Raises:
        UsageError: for a folder that holds something else, or another job's.
        LokaError: whatever the stages raise.
    """
    source = check_job(job, observed=True)
    with held_folder(directory, job.identity(), resume=resume, overwrite=overwrite):
        baseline, profile = _observe(job, source, directory, resume=resume, on_ceiling=on_ceiling, bar=bar)
        plan = _plan(job, profile, directory, resume=resume)
        if on_plan is not None:
            on_plan(plan)
        paired = _train_pairs(
            job, source, plan, baseline, directory, sites=profile.sites.sites(), resume=resume, bar=bar
        )
        noise = known_noise(job.model, source.name) if job.seeds == 1 else None
        comparison = _compare(source, profile, plan, paired, noise)
        paired.write_predictions(directory)
        write_record(directory / COMPARISON_NAME, "loka.comparison", comparison.to_dict())
    return JobResult(profile, plan, comparison, paired, noise)


def _observe(
    job: JobConfig,
    source: Source,
    directory: Path,
    *,
    resume: bool,
    on_ceiling: Callable[[Probe], object] | None,
    bar: bool | None,
) -> tuple[ArmRun, Profile]:
    seed = job.all_seeds[0]
    run = observed_training(
        job,
        source,
        directory=directory / f"seed-{seed}" / BASELINE,
        arm=BASELINE,
        resume=resume,
        on_ceiling=on_ceiling,
        bar=bar,
    )
    path = directory / PROFILE_NAME
    profile = read_profile(path) if resume and path.exists() else write_learned(run, directory)
    try:
        predictions = {split: run.trainer.evaluate(split) for split in JUDGED_SPLITS}
    except DivergedError as error:
        return ArmRun(BASELINE, seed, None, {}, error.what), profile
    return ArmRun(BASELINE, seed, run.result, predictions), profile


def _plan(job: JobConfig, profile: Profile, directory: Path, *, resume: bool) -> Plan:
    path = directory / PLAN_NAME
    if resume and path.exists():
        return read_plan(path)
    plan = make_plan(profile, job.requirement)
    write_plan(path, plan)
    return plan


def _train_pairs(
    job: JobConfig,
    source: Source,
    plan: Plan,
    baseline: ArmRun,
    directory: Path,
    *,
    sites: Sequence[Site],
    resume: bool,
    bar: bool | None,
) -> PairedResult:
    runs = [baseline]
    digest = plan_digest(plan)
    for seed in job.all_seeds:
        for arm in (BASELINE, PLANNED):
            if (arm, seed) == (baseline.arm, baseline.seed):
                continue
            model = fresh_model(job, source, seed).to(job.train.device)
            if arm == PLANNED:
                apply_plan(model, plan, sites=sites)
            runs.append(
                run_arm(
                    model,
                    source,
                    job.train.with_seed(seed),
                    arm=arm,
                    directory=directory / f"seed-{seed}" / arm,
                    resume=resume,
                    identity={"plan": digest} if arm == PLANNED else None,
                    bar=bar,
                )
            )
    return PairedResult((BASELINE, PLANNED), job.all_seeds, source.schema.tasks, tuple(runs))


def plan_digest(plan: Plan) -> str:
    """SHA-256 over what the plan runs at each site, in hex."""
    sites: Any = msgspec.to_builtins(plan.sites)
    return hashlib.sha256(msgspec.json.encode(sites)).hexdigest()


def _compare(
    source: Source, profile: Profile, plan: Plan, paired: PairedResult, noise: PairNoise | None
) -> Comparison:
    comparison = paired.compare(PLANNED, baseline=BASELINE)
    notes = []
    if plan.basis == "accuracy":
        notes.append("The plan is by accuracy only: no times of kernels were measured on this device.")
    used = {
        choice.kernel
        for site in plan.sites
        for pass_ in Pass
        for choice in site.choices(pass_)
        if choice.spec_a.is_quantized
    }
    real = bool(used) and not any(kernel(name).emulated for name in used)
    if used and not real:
        notes.append("FP8 was emulated: the numbers are those of FP8, the speed is not, so none is given.")
    if not used:
        notes.append("No product passed the requirement: the plan is bf16 everywhere.")
    notes += [f"{count:,} rows left out: {reason}" for reason, count in source.skipped.items()]
    return dataclasses.replace(
        comparison,
        coverage=coverage_of(plan, profile),
        steps_per_s=paired.steps_per_s() if real else None,
        noise=None if noise is None else noise.text,
        notes=tuple(notes),
    )
