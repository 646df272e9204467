"""The training loop: read a batch, predict, learn, and be able to stop and go on at any step.

A step's random draws (dropout) come from torch's generators seeded from (seed, step) inside a fork, so they
need no saved state, are the same in every arm of a comparison, and leave the caller's generators untouched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loka.errors import DataError, UsageError
from loka.recsys.batch import Batch
from loka.recsys.evaluation.predictions import Predictions
from loka.recsys.evaluation.running import RunningMetrics
from loka.recsys.source import Source, Split
from loka.recsys.training.checkpoint import (
    CHECKPOINT_NAME,
    RunParts,
    Stateful,
    TrainState,
    load_checkpoint,
    save_checkpoint,
)
from loka.recsys.training.config import TrainConfig
from loka.recsys.training.interrupt import InterruptedRunError, StopRequest
from loka.recsys.training.optimizers import build_optimizers
from loka.recsys.training.predict import forward, predict
from loka.recsys.training.progress import Progress
from loka.recsys.training.step import DivergedError, StepInfo, TrainResult, click_loss
from loka.recsys.training.step_clock import StepClock

__all__ = ["Trainer"]

logger = logging.getLogger("loka")

# On a GPU, looking at a loss waits for it; so losses are looked at in groups. On a CPU each one at once.
_LOSSES_A_LOOK = 32


class Trainer:
    """Trains one model on one source, once.

    The model is moved to the device and trained in place; its parameters stay the same objects. It is called
    under autocast where the config says bf16; embedding lookups and the loss stay in fp32.

    Args:
        model: `forward(batch)` gives logits [B, T]; `sparse_parameters()` and `dense_parameters()` share out
            its parameters. A planned model is fine: nothing here looks at module types.
        source: Rows in a fixed order.
        config: See `TrainConfig`.
        directory: Where the checkpoint goes; None for no checkpoints.
        after_step: Called after each step, outside the measured time.
        extras: Kept in the checkpoint beside the model, by name; such as Probe's statistics.
        identity: What else makes this run what it is (the model's name, the plan's hash), plain values; a
            checkpoint with another identity is refused.
        description: What the progress bar says.
        bar: As in `Progress`.

    Raises:
        UsageError: if the parameters are not shared out, or `compile` is asked of a model without `tower`.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        config: TrainConfig,
        *,
        directory: Path | None = None,
        after_step: Callable[[StepInfo], object] | None = None,
        extras: Mapping[str, Stateful] | None = None,
        identity: Mapping[str, Any] | None = None,
        description: str = "train",
        bar: bool | None = None,
    ) -> None:
        self.config = config
        self.source = source
        self.device = torch.device(config.device)
        self.model = model.to(self.device)
        self.state = TrainState()
        self._after_step = after_step
        self._description, self._bar = description, bar
        self._path = None if directory is None else directory / CHECKPOINT_NAME
        self._resumed = False
        self._tasks = source.schema.tasks
        self._metrics = RunningMetrics(len(self._tasks), device=self.device)
        self._optimizers = build_optimizers(model, config)
        about = {
            "config": config.identity(),
            "source": {"name": source.name, **source.identity()},
            "model": type(model).__name__,
            "run": dict(identity or {}),
        }
        self._parts = RunParts(model, self._optimizers, self._metrics, extras or {}, about)
        self._unchecked: list[tuple[int, Tensor]] = []
        if config.compile:
            tower = getattr(model, "tower", None)
            if not isinstance(tower, nn.Module):
                raise UsageError(
                    f"{type(model).__name__} has no module `tower` to compile", hint="compile=False"
                )
            tower.compile()

    @property
    def metrics(self) -> RunningMetrics:
        """Progressive metrics of the training rows so far."""
        return self._metrics

    def resume(self) -> bool:
        """Go back to the checkpoint in the directory, bitwise on a CPU.

        Returns:
            False if there is none (training then begins at the beginning).

        Raises:
            ArtifactError: if it is damaged or of another run.
        """
        if self._path is None or not self._path.exists():
            return False
        self.state = load_checkpoint(self._path, self._parts)
        self._resumed = True
        logger.info("resumed %s after step %d (%d rows)", self._path, self.state.step, self.state.rows)
        return True

    def train(self) -> TrainResult:
        """Train to the end, from the beginning or from where `resume` went.

        Raises:
            UsageError: if the directory holds a checkpoint and `resume` was not called.
            DataError: if the source has no training rows.
            DivergedError: if a loss is not finite; the last checkpoint is from before.
            InterruptedRunError: on Ctrl-C or SIGTERM, after a whole step and a checkpoint.
            ArtifactError: if a checkpoint cannot be written.
        """
        if self._path is not None:
            if self._path.exists() and not self._resumed:
                raise UsageError(f"{self._path} already holds a run", hint="resume it, or use another folder")
            # A folder that cannot be written is an error now, not after hours.
            if not self._path.exists():
                self._save()
                self._resumed = True
        clock = StepClock(self.device)
        self.model.train()
        with ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            stack.enter_context(torch.random.fork_rng(self._cuda_devices()))
            total = self.config.rows_total(self.source.rows(Split.TRAIN))
            progress = stack.enter_context(
                Progress(self._description, total_rows=total, done_rows=self.state.rows, bar=self._bar)
            )
            saved_at = time.monotonic()
            for batch in self._remaining_batches():
                self._step(batch, clock)
                progress.update(self.state.rows, self._metrics.window_ne)
                if stop.signal_number is not None:
                    break
                if self._checkpoint_is_due(saved_at):
                    self._save()
                    saved_at = time.monotonic()
            else:
                self.state.finished = True
            progress.update(self.state.rows, self._metrics.window_ne, last=True)
            self._save()
            if stop.signal_number is not None:
                raise self._interrupted(stop.signal_number)
        return TrainResult(self.state.step, self.state.rows, self._metrics.total, clock.speed())

    def evaluate(self, split: Split) -> Predictions:
        """Predict every row of a split, in evaluation mode and without gradients.

        Raises:
            DivergedError: if a prediction is not finite.
        """
        predictions = predict(
            self.model,
            self.source,
            split,
            batch_size=self.config.eval_batch_size or self.config.batch_size,
            dtype=self.config.dtype,
            device=self.device,
        )
        if not predictions.finite:
            raise DivergedError(
                f"predictions of {split} rows after step {self.state.step} are not finite",
                step=self.state.step,
            )
        return predictions

    def _step(self, batch: Batch, clock: StepClock) -> None:
        batch = batch.to(self.device)
        self._seed(self.state.step)
        clock.start()
        self._optimizers.zero_grad()
        logits = forward(self.model, batch, dtype=self.config.dtype, tasks=len(self._tasks))
        loss = click_loss(logits, batch.labels, batch.weight)
        loss.backward()
        self._optimizers.step()
        clock.stop(len(batch))
        self._metrics.update(logits, batch.labels, batch.weight)
        self.state.step += 1
        self.state.batch += 1
        self.state.rows += len(batch)
        self._unchecked.append((self.state.step, loss.detach()))
        if self.device.type == "cpu" or len(self._unchecked) >= _LOSSES_A_LOOK:
            self._check_losses()
        if self._after_step is not None:
            self._after_step(StepInfo(self.state.step, self.state.rows, loss.detach(), batch))

    def _remaining_batches(self) -> Iterator[Batch]:
        limit = self.config.max_rows or float("inf")
        while self.state.epoch < self.config.epochs and self.state.rows < limit:
            for batch in self.source.batches(Split.TRAIN, self.config.batch_size, skip=self.state.batch):
                yield batch
                if self.state.rows >= limit:
                    return
            if self.state.rows == 0:
                raise DataError(f"the source `{self.source.name}` has no training rows")
            self.state.epoch += 1
            self.state.batch = 0

    def _seed(self, step: int) -> None:
        seed = (self.config.seed * 1_000_003 + step) % 2**63
        torch.default_generator.manual_seed(seed)
        for index in self._cuda_devices():
            torch.cuda.default_generators[index].manual_seed(seed)

    def _cuda_devices(self) -> list[int]:
        if self.device.type != "cuda":
            return []
        return [torch.cuda.current_device() if self.device.index is None else self.device.index]

    def _check_losses(self) -> None:
        if not self._unchecked:
            return
        steps, losses = zip(*self._unchecked, strict=True)
        self._unchecked.clear()
        for step, loss in zip(steps, torch.stack(losses).tolist(), strict=True):
            if not abs(loss) < float("inf"):
                raise DivergedError(f"training diverged: the loss of step {step} is {loss}", step=step)

    def _checkpoint_is_due(self, saved_at: float) -> bool:
        every, seconds = self.config.checkpoint_every_steps, self.config.checkpoint_every_s
        by_steps = every is not None and self.state.step % every == 0
        return by_steps or (seconds is not None and time.monotonic() - saved_at >= seconds)

    def _save(self) -> None:
        self._check_losses()
        if self._path is not None:
            save_checkpoint(self._path, self._parts, self.state)

    def _interrupted(self, number: int) -> InterruptedRunError:
        where = "nothing was saved" if self._path is None else f"the checkpoint is {self._path}"
        hint = "resume goes on from there" if self._path else "give a folder to keep checkpoints in"
        return InterruptedRunError(
            f"stopped after step {self.state.step}; {where}", signal_number=number, hint=hint
        )
