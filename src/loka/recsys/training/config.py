"""The settings of a training run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum

import torch

from loka.errors import UsageError

__all__ = ["ComputeDtype", "DenseOptimizer", "SparseOptimizer", "TrainConfig"]


class ComputeDtype(StrEnum):
    """In what the tower multiplies. Embeddings, loss and master weights are fp32 in both."""

    BF16 = "bf16"
    FP32 = "fp32"


class DenseOptimizer(StrEnum):
    """Optimizer of everything but the embedding tables."""

    ADAM = "adam"
    ADAGRAD = "adagrad"
    SGD = "sgd"


class SparseOptimizer(StrEnum):
    """Optimizer of the embedding tables; only rows that a batch looks up are updated."""

    ADAGRAD = "adagrad"
    SGD = "sgd"


# Settings that change when something happens, never what is computed; a resumed run may differ in them.
_OPERATIONAL = ("checkpoint_every_s", "checkpoint_every_steps", "eval_batch_size")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How to train. Two runs with equal settings, model and source are bitwise equal on a CPU.

    Attributes:
        batch_size: Rows a step.
        epochs: Passes over the training rows; 1 is the one-pass online training of the field.
        max_rows: Stop after the batch that reaches this many rows; None for no limit.
        lr_dense: Learning rate of the dense optimizer.
        lr_sparse: Learning rate of the sparse optimizer.
        dense_optimizer: For all parameters but embedding tables.
        sparse_optimizer: For embedding tables.
        dtype: bf16 runs the model under autocast.
        seed: Of every random draw in training (dropout); initial weights are the model's own matter.
        device: Where to train, such as `cpu` or `cuda`.
        compile: Compile the tower (`model.tower.compile()`); pays on a GPU only.
        eval_batch_size: Rows a batch in evaluation; None takes batch_size.
        checkpoint_every_s: Seconds between checkpoints; None for none by time.
        checkpoint_every_steps: Steps between checkpoints; None for none by steps.

    Raises:
        UsageError: if a number is out of range or the device is not known to torch.
    """

    batch_size: int = 1024
    epochs: int = 1
    max_rows: int | None = None
    lr_dense: float = 1e-3
    lr_sparse: float = 2e-2
    dense_optimizer: DenseOptimizer = DenseOptimizer.ADAM
    sparse_optimizer: SparseOptimizer = SparseOptimizer.ADAGRAD
    dtype: ComputeDtype = ComputeDtype.BF16
    seed: int = 0
    device: str = "cpu"
    compile: bool = False
    eval_batch_size: int | None = None
    checkpoint_every_s: float | None = 60.0
    checkpoint_every_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "max_rows", "eval_batch_size", "checkpoint_every_steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, got {value}")
        for name in ("lr_dense", "lr_sparse", "checkpoint_every_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} must be a finite number above 0, got {value}")
        for name, kind in (
            ("dense_optimizer", DenseOptimizer),
            ("sparse_optimizer", SparseOptimizer),
            ("dtype", ComputeDtype),
        ):
            if not isinstance(getattr(self, name), kind):
                known = ", ".join(kind)
                raise UsageError(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}", hint=known)
        if self.seed < 0:
            raise UsageError(f"seed must not be negative, got {self.seed}")
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise UsageError(f"unknown device `{self.device}`", hint="cpu, cuda or cuda:<number>") from error

    def identity(self) -> dict[str, str | int | float | bool | None]:
        """The settings that decide what is computed, as plain values."""
        plain = dataclasses.asdict(self)
        return {k: str(v) if isinstance(v, StrEnum) else v for k, v in plain.items() if k not in _OPERATIONAL}

    def with_seed(self, seed: int) -> TrainConfig:
        """The same settings with another seed."""
        return dataclasses.replace(self, seed=seed)

    def rows_total(self, rows: int | None) -> int | None:
        """Rows the run will see (before rounding up to a whole batch), or None where that is not known.

        Args:
            rows: Rows of the training split, if known.
        """
        if rows is None:
            return self.max_rows
        return min(rows * self.epochs, self.max_rows or rows * self.epochs)
