"""torch.compile of a planned linear: no graph break, values and gradients as in eager mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from planned_cases import BF16, GW_HP, ROWWISE, TENSORWISE, linear_of, planned, same, seeded, step
from torch import nn

from loka.kernels import device_of, kernel
from loka.vocab import GemmProblem

# Both are torch's own: dynamo instantiates a Function to trace its context, and its imports use torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

_REAL = "torch.tensorwise"
_HYBRID = (_REAL, BF16, _REAL)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("names", "backend", "autocast"),
    [
        (ROWWISE, "eager", False),
        (ROWWISE, "aot_eager", False),
        (GW_HP, "aot_eager", True),
        (_HYBRID, "aot_eager", True),
        ((BF16,) * 3, "eager", True),
    ],
    ids=["rowwise-eager", "rowwise", "gw_hp-autocast", "real-autocast", "bf16-autocast"],
)
def test_planned_compiles_without_a_break_and_equals_eager(
    names: tuple[str, str, str], backend: str, autocast: bool
) -> None:
    assert kernel(_REAL).supports(GemmProblem(16, 16, 16), device_of("cpu"))
    module = planned(linear_of(32, 64), names)
    x, g = seeded(3, 6, 64), seeded(3, 6, 32, seed=3)
    want = step(module, x, g, autocast=autocast)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    got = step(compiled, x, g, autocast=autocast)
    assert same({n.removeprefix("_orig_mod."): t for n, t in got.items()}, want)


def test_d26_few_graphs_over_many_m_and_none_over_scales() -> None:
    """One fixed and one dynamic graph, one each for M = 1 and M = 0; data of any scale reuse them."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    module = planned(linear_of(32, 64), TENSORWISE)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    with torch.no_grad():
        for m in (64, 64, 37, 18, 1, 0):
            x = seeded(m, 64, seed=m)
            assert torch.equal(compiled(x), module(x))
        assert len(graphs) <= 4
        before = len(graphs)
        for i in range(6):
            compiled(seeded(18, 64) * 10.0**i)
    assert len(graphs) == before


def test_planned_compiled_training_step_follows_the_weights() -> None:
    layer = nn.Sequential(linear_of(32, 16), nn.ReLU(inplace=True), linear_of(1, 32))
    twin = nn.Sequential(linear_of(32, 16), nn.ReLU(), linear_of(1, 32))
    for model in (layer, twin):
        model[0] = planned(model[0], ROWWISE)  # type: ignore[arg-type]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for model, runner in ((layer, compiled), (twin, twin)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(3):
            optimizer.zero_grad()
            runner(seeded(18, 16, seed=i)).square().mean().backward()
            optimizer.step()
    assert same(layer.state_dict(), twin.state_dict())
