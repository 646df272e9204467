"""What `loss_changes` and its parts refuse, each in one sentence with a hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_sensitivity_scores import TENSORWISE, Batch, clicks, log_loss, one_thread, tower
from torch import Tensor, nn

from loka.errors import UnknownNameError, UsageError
from loka.probe.sensitivity import loss_changes, row_scores
from loka.vocab import RECIPES

__all__ = ["one_thread"]

SITES = {"0": [TENSORWISE], "4": [TENSORWISE]}


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return log_loss(model, batch).mean()


def column(model: nn.Module, batch: Batch) -> Tensor:
    return log_loss(model, batch)[:, None]


def with_nan(model: nn.Module, batch: Batch) -> Tensor:
    losses = log_loss(model, batch)
    return torch.where(torch.arange(len(losses)) == 3, torch.nan, losses)


def elsewhere(model: nn.Module, batch: Batch) -> Tensor:
    return batch[1] + 0.5


def rounded(model: nn.Module, batch: Batch) -> Tensor:
    return log_loss(model, batch).bfloat16()


def negative(model: nn.Module, batch: Batch) -> Tensor:
    return -log_loss(model, batch)


@pytest.mark.parametrize(
    ("evaluate", "says"),
    [
        (mean_loss, r"torch.float64 of shape \[\] for batch 1, expected one loss a row"),
        (column, r"torch.float64 of shape \[20, 1\] for batch 1, expected one loss a row"),
        (rounded, "in torch.bfloat16 for batch 1, in which a change of 1e-4 vanishes"),
        (with_nan, "gave 1 of 20 losses that are not finite for batch 1"),
        (elsewhere, "called none of the model's linears for batch 1"),
        (negative, "the mean loss of the batches is -"),
        (lambda m, b: 0.5, "gave a float for batch 1, not a tensor"),
    ],
)
def test_losses_that_cannot_be_used(evaluate: Callable[..., Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        loss_changes(tower(), evaluate, clicks(20, 16), SITES)
    assert "\n\nhint: " in str(caught.value)


def test_batches_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match="there are no batches"):
        loss_changes(tower(), log_loss, [], SITES)
    with pytest.raises(UsageError, match="a generator that can be read only once"):
        loss_changes(tower(), log_loss, (b for b in clicks(20, 16)), SITES)
    with pytest.raises(UsageError, match="hold 1 row"):
        loss_changes(tower(), log_loss, clicks(1, 16, batches=1), SITES)


def test_batches_that_change_from_one_reading_to_the_next() -> None:
    class Growing:
        size = 20

        def __iter__(self) -> Iterator[Batch]:
            self.size += 1
            return iter(clicks(self.size, 16))

    with pytest.raises(UsageError, match="gave 63 rows in batches of 21, and then 66 rows"):
        loss_changes(tower(), log_loss, Growing(), SITES)


def test_an_evaluate_whose_rows_depend_on_the_model() -> None:
    def evaluate(model: nn.Module, batch: Batch) -> Tensor:
        # The second run is the one with the site switched.
        return log_loss(model, batch)[: 10 if "forward" in model[0].__dict__ else 20]

    with pytest.raises(UsageError, match="gave 20 losses and then 10"):
        loss_changes(tower(), evaluate, clicks(20, 16), {"0": [TENSORWISE]})


def test_names_and_options() -> None:
    with pytest.raises(UnknownNameError, match="unknown site `5`"):
        loss_changes(tower(), log_loss, clicks(20, 16), {"5": [TENSORWISE]})
    with pytest.raises(UsageError, match="direct_share=0"):
        loss_changes(tower(), log_loss, clicks(20, 16), SITES, direct_share=0)
    scores = row_scores(tower(), log_loss, clicks(20, 16), {"0": [TENSORWISE]})
    assert scores is not None
    with pytest.raises(UsageError, match="`0` has no row scores"):
        scores.numbers_of({"0": RECIPES["mx"].fwd})
