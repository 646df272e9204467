"""Relative changes of a mean loss from paired differences of rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from loka.errors import UsageError

__all__ = ["Change", "relative_change"]


class Change(NamedTuple):
    """Relative change of the mean loss (2e-4 is 0.02 %) and its standard error."""

    delta: float
    se: float


def relative_change(differences: Tensor, losses: Tensor) -> Change:
    """mean(differences) / mean(losses), rows taken as independent.

    The standard error is that of a ratio of two means over the same rows (delta method).

    Args:
        differences: fp64 [rows], switched minus plain.
        losses: fp64 [rows], plain.

    Raises:
        UsageError: for fewer than two rows, or a mean loss that is not above 0, of which no relative change
            can be said.
    """
    base = float(losses.mean())
    if not base > 0:
        raise UsageError(
            f"the mean loss of the batches is {base:.3g}, so no relative change can be said",
            hint="evaluate must give losses whose mean is above 0",
        )
    rows = losses.numel()
    if rows < 2:
        raise UsageError(
            f"the batches hold {rows} row, from which no standard error can be had", hint="give more rows"
        )
    delta = float(differences.mean()) / base
    influence = (differences - delta * losses) / base
    return Change(delta, float(torch.std(influence)) / math.sqrt(rows))
