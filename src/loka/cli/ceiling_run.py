"""A few training steps, one of them timed: the ceiling before any real run."""

from __future__ import annotations

from loka.artifacts import StepShares
from loka.probe import Probe
from loka.recsys import JobConfig, TrainConfig, Trainer
from loka.recsys.job.check import check_job
from loka.recsys.job.observed import fresh_model

__all__ = ["measure_shares"]

# Probe times one step once the first five have warmed up; it observes none of these.
_STEPS = 8
_NEVER = 1_000_000


def measure_shares(
    model: str, data: str, *, preset: str, batch_size: int, device: str, bar: bool | None = None
) -> StepShares | None:
    """Train a fresh model for a few steps and say where a step's time goes; nothing is written.

    Args:
        model: A reference model.
        data: A source; its rows are repeated where they are too few.
        preset: Size of the model.
        batch_size: Rows a step.
        device: Where.
        bar: As in `Progress`.

    Raises:
        LokaError: for a name, source, size or device that cannot be.
    """
    train = TrainConfig(batch_size=batch_size, epochs=10_000, max_rows=_STEPS * batch_size, device=device)
    job = JobConfig(model=model, data=data, preset=preset, train=train)
    source = check_job(job)
    network = fresh_model(job, source, 0).to(device)
    probe = Probe(network, every=_NEVER)
    trainer = Trainer(
        network,
        source,
        train,
        after_step=lambda _: probe.step(),
        description=f"time {model}",
        bar=bar,
    )
    with probe:
        trainer.train()
    return probe.shares
