"""Predictions of rows by row number, and the Parquet file that keeps them.

The logits are written exactly as the model gave them (fp32), so that anyone can recompute a comparison.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from loka.errors import ArtifactError, UsageError

__all__ = ["Predictions", "read_predictions", "same_rows", "write_predictions"]

_METADATA_KEY = b"loka.predictions"


@dataclass(frozen=True, slots=True)
class Predictions:
    """What one model says of N rows, T tasks.

    Attributes:
        tasks: Names of the tasks.
        rows: int64 [N], the row numbers in the source.
        logits: float32 [N, T].
        labels: float32 [N, T].
        weights: float32 [N], or None for 1 everywhere.
    """

    tasks: tuple[str, ...]
    rows: Tensor
    logits: Tensor
    labels: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    @property
    def finite(self) -> bool:
        """True if no logit is NaN or infinite."""
        return bool(self.logits.isfinite().all())


def same_rows(first: Predictions, second: Predictions) -> bool:
    """True if two models were asked about the same rows in the same order."""
    if first.tasks != second.tasks or not torch.equal(first.rows, second.rows):
        return False
    if (first.weights is None) != (second.weights is None):
        return False
    weights_agree = first.weights is None or torch.equal(first.weights, second.weights)  # type: ignore[arg-type]
    return weights_agree and torch.equal(first.labels, second.labels)


def _columns(prefix: str, tasks: Sequence[str]) -> list[str]:
    return [prefix] if len(tasks) == 1 else [f"{prefix}.{task}" for task in tasks]


def write_predictions(path: Path, arms: Mapping[str, Predictions]) -> None:
    """Write the predictions of several models about the same rows; the file appears whole or not at all.

    Columns: `row` int64; `label` float32; `weight` float32 (1 where there are none); `logit.<arm>` float32
    for each arm. With several tasks: `label.<task>` and `logit.<arm>.<task>`.

    Args:
        path: A `.parquet` file; an older one is replaced.
        arms: Predictions by the name of the arm.

    Raises:
        UsageError: if there are no arms, or they are not about the same rows.
        ArtifactError: if the file cannot be written.
    """
    if not arms:
        raise UsageError(f"no predictions to write to {path}")
    first_name, first = next(iter(arms.items()))
    table: dict[str, Tensor] = {"row": first.rows}
    table |= dict(zip(_columns("label", first.tasks), first.labels.T, strict=True))
    table["weight"] = torch.ones(len(first)) if first.weights is None else first.weights
    for name, predictions in arms.items():
        if not same_rows(first, predictions):
            raise UsageError(f"arms `{first_name}` and `{name}` predict different rows")
        table |= dict(zip(_columns(f"logit.{name}", first.tasks), predictions.logits.T, strict=True))
    about = {"arms": list(arms), "tasks": list(first.tasks), "weighted": first.weights is not None}
    arrays = {name: pa.array(column.cpu().contiguous().numpy()) for name, column in table.items()}
    content = pa.table(arrays).replace_schema_metadata({_METADATA_KEY: json.dumps(about)})
    part = path.with_name(path.name + ".part")
    try:
        pq.write_table(content, part)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a read-only file system even this fails
            part.unlink(missing_ok=True)
        raise ArtifactError(
            f"cannot write predictions to {path}: {error.strerror or error}",
            hint="check that the folder exists, can be written and has room",
        ) from error


def read_predictions(path: Path) -> dict[str, Predictions]:
    """Read what `write_predictions` wrote.

    Returns:
        Predictions by the name of the arm, in the order they were written.

    Raises:
        ArtifactError: if the file is missing or was not written by `write_predictions`.
    """
    try:
        content = pq.read_table(path)
    except FileNotFoundError as error:
        raise ArtifactError(f"no predictions at {path}", hint="`loka run` writes them") from error
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path} is not a Parquet file: {error}") from error
    text = (content.schema.metadata or {}).get(_METADATA_KEY)
    if text is None:
        raise ArtifactError(f"{path} holds no predictions", hint="give a file that `loka run` wrote")
    about = json.loads(text)
    tasks = tuple(about["tasks"])

    def column(name: str) -> Tensor:
        return torch.from_numpy(content[name].to_numpy().copy())

    def matrix(prefix: str) -> Tensor:
        return torch.stack([column(name) for name in _columns(prefix, tasks)], dim=1)

    rows, labels = column("row"), matrix("label")
    weights = column("weight") if about["weighted"] else None
    return {arm: Predictions(tasks, rows, matrix(f"logit.{arm}"), labels, weights) for arm in about["arms"]}
