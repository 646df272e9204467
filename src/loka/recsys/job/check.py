"""What can be known to be wrong with a job before anything is written or trained."""

from __future__ import annotations

from loka.errors import DataError, UsageError
from loka.kernels import check_patterns, device_of, kernel
from loka.recsys.data import open_source
from loka.recsys.job.config import JobConfig
from loka.recsys.models import build_model, model_config
from loka.recsys.source import Source, Split

__all__ = ["check_job"]


def check_job(job: JobConfig, *, observed: bool = False) -> Source:
    """Check the names, the device, the model against the columns, and the first training rows.

    Args:
        job: What to do.
        observed: Whether Probe has to observe a step of it.

    Returns:
        The source, unread.

    Raises:
        LokaError: whatever the job would have met in its first step.
    """
    device_of(job.train.device)
    check_patterns((*job.requirement.allow, *job.requirement.deny))
    for name in job.requirement.pin.values():
        kernel(name)
    config = model_config(job.model, preset=job.preset, overrides=job.overrides)
    trial = open_source(job.data, on_bad_row=job.on_bad_row)
    build_model(job.model, trial.schema, config=config, device="meta", mods=job.mods)
    if next(iter(trial.batches(Split.TRAIN, job.train.batch_size)), None) is None:
        raise DataError(f"the source `{trial.name}` has no training rows", hint="give more rows")
    if observed:
        _check_observed(job, trial.rows(Split.TRAIN))
    # A fresh one, whose count of bad rows begins at none.
    return open_source(job.data, on_bad_row=job.on_bad_row)


def _check_observed(job: JobConfig, rows: int | None) -> None:
    """A run in which Probe would observe nothing fails now, not after the training."""
    total, every = job.train.rows_total(rows), job.observe_every(rows)
    if total is None:
        return
    steps = -(-total // job.train.batch_size)
    if steps < every:
        raise UsageError(
            f"the run has {steps} step{'' if steps == 1 else 's'} of {job.train.batch_size} rows, and Probe "
            f"would observe none with probe_every={every}",
            hint="take smaller batches, more epochs, or a smaller probe_every",
        )
