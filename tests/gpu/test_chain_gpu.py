"""Planned chains on a GPU: FP8 from norm to product, eager and compiled whole, against the same on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from loka.artifacts.plan import Choice, SitePlan
from loka.kernels import emulated_twin, kernel
from loka.mods import BlockNormHardSwish
from loka.planned import PlannedChain, is_chain, link, swap_in
from loka.vocab import GemmProblem, Pass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

ROWS, K, N = 1024, 256, 512
KERNELS = ["torch.tensorwise", "torch.rowwise", "triton.tensorwise"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(K, N, bias=False),
        BlockNormHardSwish(N),
        nn.Linear(N, N, bias=False),
        BlockNormHardSwish(N),
        nn.Linear(N, K, bias=False),
    )


def planned(model: nn.Sequential, name: str) -> nn.Sequential:
    for place, module in model.named_children():
        if not isinstance(module, nn.Linear):
            continue
        made = []
        for pass_ in Pass:
            n, k = module.out_features, module.in_features
            problem = GemmProblem.of_linear(pass_, rows=ROWS, out_features=n, in_features=k)
            a, b = kernel(name).operands(problem)
            made.append((Choice(m_below=None, kernel=name, spec_a=a, spec_b=b, reason="by hand"),))
        fwd, dgrad, wgrad = made
        shape = {"n": module.out_features, "k": module.in_features, "bias": False}
        swap_in(module, SitePlan(name=place, fwd=fwd, dgrad=dgrad, wgrad=wgrad, **shape))
    assert is_chain(model)
    link(model)
    return model


def step(model: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        y = model(x)
    y.backward(g.to(y.dtype))
    found = {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}
    return {name.removeprefix("_orig_mod."): t.float().cpu() for name, t in found.items() if t is not None}


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", KERNELS)
def test_the_numbers_are_those_of_a_cpu_eager_and_compiled(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, g = (torch.randn(ROWS, K, generator=generator) for _ in range(2))
    model = tower()
    wanted = step(planned(copy.deepcopy(model), emulated_twin(name).name), x, g)
    chain = planned(copy.deepcopy(model).cuda(), name)
    assert type(chain) is PlannedChain
    eager = step(chain, x.cuda(), g.cuda())
    compiled = step(torch.compile(chain, fullgraph=True), x.cuda(), g.cuda())  # type: ignore[arg-type]
    for found in (eager, compiled):
        assert found.keys() == wanted.keys()
        for part, tensor in wanted.items():
            # bf16 between the links, and sums in another order that move codes.
            assert off(found[part], tensor) < 2e-2, part
