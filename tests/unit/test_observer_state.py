"""Observations as plain tensors: an observer that was stopped and resumed knows what an unbroken one does."""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn

from loka.numerics import Moments
from loka.probe.observer import Observer
from loka.probe.state import sites_of_state, state_of_sites
from loka.sites import plannable_linears
from loka.vocab import Operand

CPU = torch.device("cpu")


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(6, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.relu(self.again(self.first(x))))  # type: ignore[no-any-return]


def observe(model: nn.Module, steps: range, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    observer = Observer(
        plannable_linears(model), on_captured=lambda name, what: None, seed=3, is_training=lambda: True
    )
    if state is not None:
        observer.sites = sites_of_state(state, where=CPU)
    for step in steps:
        observer.arm(step, full=None if step % 3 == 0 else ())
        x = torch.randn(2000, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        observer.disarm()
    return state_of_sites(observer.sites)


def through_a_file(state: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file, weights_only=True)
    return loaded


def test_a_resumed_observer_knows_what_an_unbroken_one_does() -> None:
    model = Twice()
    whole = observe(model, range(30))
    for stop in (1, 4, 17):
        resumed = observe(model, range(stop, 30), through_a_file(observe(model, range(stop))))
        assert resumed.keys() == whole.keys()
        for key, tensor in whole.items():
            assert resumed[key].dtype is tensor.dtype, key
            assert torch.equal(resumed[key], tensor), (stop, key)


def test_the_state_of_nothing() -> None:
    assert state_of_sites({}) == {}
    assert sites_of_state({"seen": torch.tensor(3)}, where=CPU) == {}


def test_a_state_with_moments_alone_is_read() -> None:
    """As 0.1.0 saved it."""
    moments = Moments.of(torch.randn(20, 4))
    old = {
        f"moments\thead\tinput\t{name}": tensor
        for name, tensor in moments.tensors().items()
        if name != "row_exponents"
    }
    old["m_seen\thead"] = torch.tensor([[20, 1]])
    old["passes\thead"] = torch.tensor([True, False, True])
    site = sites_of_state(old, where=CPU)["head"]
    assert torch.equal(site.moments[Operand.INPUT].m2, moments.m2)
    assert site.moments[Operand.INPUT].row_exponents.sum() == 0
    assert site.m_seen == {20: 1}
    assert site.operands[Operand.INPUT].drift() is None
