"""Operands drawn from learned statistics, where no real rows are at hand.

The copula is the model to use: it keeps exact zeros, bounded ranges and heavy tails, and what features have
to do with one another. How well that predicts the error of real rows is measured by
`benchmarks/fidelity.py`. Activations and gradients are drawn; weights are the model's own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.numerics.operand_statistics import OperandStatistics
from loka.probe.distributions import Copula, IndependentNormal, MultivariateNormal

__all__ = ["OperandModel", "RowModel", "draw_rows", "row_model"]


class OperandModel(StrEnum):
    """From what rows are drawn."""

    NORMAL = "normal"
    MVN = "mvn"
    COPULA = "copula"


class RowModel(Protocol):
    """A fitted model of rows."""

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """fp32 [rows, F] on the device of the statistics; decided by the CPU generator."""
        ...


def row_model(statistics: OperandStatistics, *, model: OperandModel = OperandModel.COPULA) -> RowModel:
    """Fit a model once, for many draws; this is where the time goes (a Cholesky factor of F features).

    Raises:
        UsageError: if the statistics hold no rows, or not the parts that the model needs.
    """
    if model is OperandModel.NORMAL:
        _need_rows(int(statistics.moments.count))
        return IndependentNormal.of(statistics.moments)
    covariance, marginals = statistics.covariance, statistics.marginals
    if covariance is None:
        raise _missing("covariance", model)
    _need_rows(int(covariance.count))
    if model is OperandModel.MVN:
        return MultivariateNormal.of(covariance)
    if marginals is None:
        raise _missing("marginals", model)
    return Copula.of(covariance, marginals, row_exponents=statistics.moments.row_exponents)


def draw_rows(
    statistics: OperandStatistics,
    rows: int,
    generator: torch.Generator,
    *,
    model: OperandModel = OperandModel.COPULA,
) -> Tensor:
    """Draw fp32 [rows, F] on the statistics' device; fits the model each time (see `row_model`).

    On a GPU the numbers of a correlated draw come from a generator there, seeded by the one given: a draw
    repeats itself on one kind of device, not across.

    Raises:
        UsageError: if the statistics hold no rows, or not the parts that the model needs.
    """
    return row_model(statistics, model=model).draw(rows, generator)


def _need_rows(count: int) -> None:
    if count == 0:
        raise UsageError(
            "no rows can be drawn from statistics of no rows", hint="observe a step whose values are finite"
        )


def _missing(part: str, model: OperandModel) -> UsageError:
    return UsageError(
        f"the statistics hold no {part}, which a draw by `{model}` needs",
        hint="observe one step at least, in which each site is looked at in full, or draw with "
        "`model=OperandModel.NORMAL`",
    )
