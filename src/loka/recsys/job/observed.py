"""Train one model in bf16 with Probe attached: the part that `loka run` and `loka probe` share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from loka.artifacts import Profile, write_profile, write_statistics
from loka.probe import Probe
from loka.recsys.job.config import JobConfig
from loka.recsys.job.evaluate import LossEstimate
from loka.recsys.job.folder import PROFILE_NAME, STATISTICS_NAME
from loka.recsys.models import RecModel, build_model, model_config
from loka.recsys.source import Source, Split
from loka.recsys.training.predict import forward
from loka.recsys.training.step import StepInfo, TrainResult
from loka.recsys.training.trainer import Trainer
from loka.sites import find_sites

__all__ = [
    "ObservedRun",
    "fresh_model",
    "observed_training",
    "write_learned",
]

logger = logging.getLogger("loka")

_LONG_EVERY = 100  # what observe_every gives to a run that is long enough
_SHORT_STEPS = 256  # a longer run is observed every 100 steps without its length being known


def fresh_model(job: JobConfig, source: Source, seed: int) -> RecModel:
    """The job's model with the initial weights of a seed."""
    config = model_config(job.model, preset=job.preset, overrides=job.overrides)
    return build_model(job.model, source.schema, config=config, seed=seed, mods=job.mods)


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """A trained model and what Probe learned meanwhile.

    Attributes:
        trainer: For predictions.
        result: What training said.
        probe: What was learned.
        settled_at: Step after which the errors had settled, or None.
    """

    trainer: Trainer
    result: TrainResult
    probe: Probe
    settled_at: int | None


def observed_training(
    job: JobConfig,
    source: Source,
    *,
    directory: Path | None,
    arm: str,
    resume: bool = False,
    on_ceiling: Callable[[Probe], object] | None = None,
    bar: bool | None = None,
    live_every: int | None = None,
    loss: LossEstimate | None = None,
    on_observed: Callable[[Probe, int], object] | None = None,
) -> ObservedRun:
    """Train the job's model on its first seed with Probe attached; Probe changes no number of it.

    Args:
        job: What to do.
        source: The rows.
        directory: Where the checkpoint goes (Probe's state is in it), or None.
        arm: Name of the run.
        resume: Go on from the checkpoint, if there is one.
        on_ceiling: Told once, as soon as the shares of a step are known.
        bar: As in `Progress`.
        live_every: Observed steps from one full look at a site to the next; by default 10, or 1 in a short
            run, which has too few observed steps to spare any.
        loss: What the profile asks about the change of the loss; None for no estimate.
        on_observed: Told each time every site was looked at in full again, as Probe does.
    """
    seed = job.all_seeds[0]
    model = fresh_model(job, source, seed).to(torch.device(job.train.device))
    every = job.observe_every(_training_rows(job, source))
    is_short = job.probe_every is None and every < _LONG_EVERY
    if is_short:
        logger.info("the run is short: Probe observes every %d steps", every)
    if live_every is None:
        live_every = 1 if every < _LONG_EVERY else 10
    probe = Probe(
        model,
        every=every,
        live_every=live_every,
        # A short run is there to be observed, and a number that was asked for is kept.
        max_overhead=None if is_short or job.probe_every is not None else 0.01,
        evaluate=None if loss is None else loss.evaluate,
        batches=None if loss is None else loss.batches,
        seed=seed,
        on_observed=on_observed,
    )
    settled: list[int] = []
    told: list[bool] = []

    def after_step(info: StepInfo) -> None:
        if probe.step() and not settled:
            settled.append(info.step)
        if on_ceiling is not None and probe.shares is not None and not told:
            told.append(True)
            on_ceiling(probe)

    trainer = Trainer(
        model,
        source,
        job.train.with_seed(seed),
        directory=directory,
        after_step=after_step,
        extras={"probe": probe},
        identity={"arm": arm, "every": every},
        description=f"train {arm}, seed {seed}",
        bar=bar,
    )
    if resume:
        trainer.resume()
    with probe:
        result = trainer.train()
        if not probe.sites:
            _run_once(trainer, source)
    return ObservedRun(trainer, result, probe, settled[0] if settled else None)


def _training_rows(job: JobConfig, source: Source) -> int | None:
    """Training rows where they can be told; a file that does not know is read as far as a short run goes."""
    known = source.rows(Split.TRAIN)
    if known is not None or job.probe_every is not None:
        return known
    rows = 0
    for step, batch in enumerate(source.batches(Split.TRAIN, job.train.batch_size)):
        if step == _SHORT_STEPS:
            return None
        rows += len(batch)
    return rows


def _run_once(trainer: Trainer, source: Source) -> None:
    """Let Probe find the sites of a run that was over before: no step was left that would have shown them."""
    batch = next(iter(source.batches(Split.TRAIN, trainer.config.batch_size)), None)
    if batch is not None:
        tasks, dtype = len(source.schema.tasks), trainer.config.dtype
        trainer.model.train()  # Probe leaves evaluation out
        # It leaves buffers and random numbers as they were.
        find_sites(
            trainer.model, lambda: forward(trainer.model, batch.to(trainer.device), dtype=dtype, tasks=tasks)
        )


def write_learned(run: ObservedRun, directory: Path, *, rows: Sequence[int] = ()) -> Profile:
    """Write `statistics.safetensors` and `profile.json`.

    Args:
        run: What was learned.
        directory: Where to.
        rows: Values of M beside those that the run saw, at which the profile measures too.

    Returns:
        The profile.
    """
    profile = run.probe.profile(rows=rows)
    facts = {"steps_seen": profile.steps_seen, "steps_observed": profile.steps_observed}
    write_statistics(directory / STATISTICS_NAME, run.probe.statistics, facts)
    write_profile(directory / PROFILE_NAME, profile)
    return profile
