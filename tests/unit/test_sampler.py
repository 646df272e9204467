"""Operands drawn from an operand's statistics."""

import pytest
import torch

from loka.errors import UsageError
from loka.numerics import OperandStatistics
from loka.probe.sampler import OperandModel, draw_rows, row_model


def learned(rows: int = 2000, *, distributions: bool = True) -> tuple[torch.Tensor, OperandStatistics]:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(rows, 3, generator=generator) @ torch.randn(3, 6, generator=generator)).relu()
    statistics = OperandStatistics.empty(6)
    statistics.add(x, distributions=distributions)
    return x, statistics


@pytest.mark.parametrize("model", list(OperandModel))
def test_draws_have_the_shape_and_mean_and_depend_on_the_generator_alone(model: OperandModel) -> None:
    x, statistics = learned()
    first = draw_rows(statistics, 20000, torch.Generator().manual_seed(1), model=model)
    again = draw_rows(statistics, 20000, torch.Generator().manual_seed(1), model=model)
    other = draw_rows(statistics, 20000, torch.Generator().manual_seed(2), model=model)
    assert first.shape == (20000, 6)
    assert first.dtype == torch.float32
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.testing.assert_close(first.mean(dim=0), x.mean(dim=0), rtol=0.08, atol=0.02)


def test_a_fitted_model_draws_what_draw_rows_does() -> None:
    _, statistics = learned()
    fitted = row_model(statistics)
    drawn = fitted.draw(10, torch.Generator().manual_seed(3))
    assert torch.equal(drawn, draw_rows(statistics, 10, torch.Generator().manual_seed(3)))


def test_the_copula_is_the_default_and_keeps_exact_zeros() -> None:
    x, statistics = learned()
    drawn = draw_rows(statistics, 5000, torch.Generator().manual_seed(4))
    assert (drawn == 0).float().mean().item() == pytest.approx((x == 0).float().mean().item(), abs=0.02)


@pytest.mark.parametrize("model", [OperandModel.MVN, OperandModel.COPULA])
def test_missing_distributions_are_an_error_with_a_hint(model: OperandModel) -> None:
    _, statistics = learned(distributions=False)
    with pytest.raises(UsageError, match=f"hold no covariance, which a draw by `{model}` needs") as caught:
        draw_rows(statistics, 4, torch.Generator(), model=model)
    assert "OperandModel.NORMAL" in str(caught.value)
    drawn = draw_rows(statistics, 4, torch.Generator(), model=OperandModel.NORMAL)
    assert drawn.shape == (4, 6)


def test_missing_marginals_are_an_error_for_the_copula_alone() -> None:
    _, statistics = learned()
    statistics.marginals = None
    assert draw_rows(statistics, 4, torch.Generator(), model=OperandModel.MVN).shape == (4, 6)
    with pytest.raises(UsageError, match="hold no marginals"):
        draw_rows(statistics, 4, torch.Generator())


@pytest.mark.parametrize("model", list(OperandModel))
def test_statistics_of_no_rows_are_an_error(model: OperandModel) -> None:
    statistics = OperandStatistics.empty(6, distributions=True)
    with pytest.raises(UsageError, match="statistics of no rows"):
        draw_rows(statistics, 4, torch.Generator(), model=model)
