"""The shapes of a reference model's linear layers, from one forward of a synthetic batch."""

from __future__ import annotations

import torch

from loka.bench import Shape
from loka.cli.talk import logger
from loka.errors import UsageError
from loka.recsys import JobConfig, Split, TrainConfig
from loka.recsys.job.check import check_job
from loka.recsys.job.observed import fresh_model
from loka.recsys.training.predict import forward
from loka.sites import find_sites

__all__ = ["model_shapes"]

_SOURCE_BATCHES = 4  # some of the synthetic rows are not for training


def model_shapes(model: str, *, preset: str, batch_size: int, device: str) -> tuple[Shape, ...]:
    """Every different shape that a plan could switch, in the order of the model.

    Args:
        model: A reference model.
        preset: Its size.
        batch_size: Rows of the batch.
        device: Where the forward runs.

    Raises:
        LokaError: for a name, size or device that cannot be.
    """
    if batch_size < 1:
        raise UsageError(f"--batch-size {batch_size} must be at least 1")
    data = f"synthetic?rows={_SOURCE_BATCHES * batch_size}"
    train = TrainConfig(batch_size=batch_size, device=device)
    job = JobConfig(model=model, data=data, preset=preset, train=train)
    source = check_job(job)
    network = fresh_model(job, source, 0).to(device)
    batch = next(iter(source.batches(Split.TRAIN, batch_size))).to(torch.device(device))
    tasks = len(source.schema.tasks)
    sites = find_sites(network, lambda: forward(network, batch, dtype=train.dtype, tasks=tasks))
    left_out = [site.name for site in sites if not site.plannable]
    if left_out:
        logger.debug("not planned, so not timed: %s", ", ".join(left_out))
    shapes: dict[tuple[int, int, int, bool], Shape] = {}
    for site in sites:
        if site.plannable and site.rows:
            key = (site.rows, site.n, site.k, site.bias)
            shapes.setdefault(key, Shape(site.rows, site.n, site.k, bias=site.bias, models=(model,)))
    if not shapes:
        raise UsageError(f"model `{model}` has no linear layer that a plan could switch")
    return tuple(shapes.values())
