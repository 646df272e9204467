"""Hooks of the observer among other people's: in-place operations, copies of the model, hooks of the user."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from loka.probe.live import Captured
from loka.probe.observer import Observer
from loka.sites import plannable_linears
from loka.vocab import Operand


def observer_of(model: nn.Module, captured: list[Captured]) -> Observer:
    return Observer(
        plannable_linears(model),
        on_captured=lambda _, seen: captured.append(seen),
        seed=0,
        is_training=lambda: True,
    )


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_gradient_is_that_of_the_product_whatever_is_done_in_place(
    shape: tuple[int, ...], bias: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=bias), nn.ReLU(inplace=True))
    captured: list[Captured] = []
    observer = observer_of(model, captured)
    x, upstream = torch.randn(shape), torch.randn(*shape[:-1], 16)
    observer.arm(1)
    (model(x) * upstream).sum().backward()
    observer.disarm()
    linear = model[0]
    assert isinstance(linear, nn.Linear)
    wanted = upstream * (nn.functional.linear(x, linear.weight, linear.bias) > 0)
    assert len(captured) == 1
    assert captured[0].g is not None
    assert torch.equal(captured[0].g, wanted.reshape(-1, 16).float())


def test_a_copy_of_the_model_is_not_observed() -> None:
    model = nn.Sequential(nn.Linear(8, 16))
    observer = observer_of(model, [])
    observer.arm(1)
    other = copy.deepcopy(model)
    other(torch.full((5, 8), 1e3)).sum().backward()
    model(torch.ones(3, 8)).sum().backward()
    observer.disarm()
    other(torch.full((5, 8), 1e3))
    assert int(observer.sites["0"].moments[Operand.INPUT].count) == 3
    assert float(observer.sites["0"].moments[Operand.INPUT].amax.amax()) == 1


def test_what_a_hook_of_the_user_makes_of_the_output_is_not_the_product() -> None:
    model = nn.Sequential(nn.Linear(8, 16))
    model[0].register_forward_hook(lambda module, args, output: (8 * output, "more"))
    captured: list[Captured] = []
    observer = observer_of(model, captured)
    observer.arm(1)
    out: tuple[Tensor, str] = model(torch.randn(4, 8))
    out[0].sum().backward()
    observer.disarm()
    assert captured[0].g is not None
    assert torch.equal(captured[0].g, torch.full((4, 16), 8.0))
