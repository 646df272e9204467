"""Planned linears on a GPU: nothing compiles in a step, and a bf16 kernel of a plan runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from loka.artifacts.fingerprint import fingerprint
from loka.artifacts.plan import Choice, Plan, Predicted, SitePlan
from loka.dispatch import apply_plan, revert, validate_plan
from loka.kernels import device_of, kernel
from loka.sites import find_sites
from loka.vocab import GemmProblem, Pass, Requirement, Site

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 warns about itself when its compiler is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

ROWS, K, N = 640, 272, 528


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K)).cuda()


def batch(seed: int = 1, *, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(ROWS, K, generator=generator, device="cuda")
    return x.requires_grad_(requires_grad)


def sites_of(model: nn.Module) -> list[Site]:
    return find_sites(model, lambda: model(batch()))


def plan_of(sites: list[Site], names: dict[str, tuple[str, str, str]]) -> Plan:
    plans = []
    for site in sites:
        made: list[tuple[Choice, ...]] = []
        for pass_, name in zip(Pass, names[site.name], strict=True):
            problem = GemmProblem.of_linear(
                pass_, rows=site.rows, out_features=site.n, in_features=site.k, bias=pass_ is Pass.FWD
            )
            a, b = kernel(name).operands(problem)
            made.append((Choice(m_below=None, kernel=name, spec_a=a, spec_b=b, reason="by hand"),))
        plans.append(
            SitePlan(
                name=site.name,
                n=site.n,
                k=site.k,
                bias=site.bias,
                fwd=made[0],
                dgrad=made[1],
                wgrad=made[2],
            )
        )
    plan = Plan(
        requirement=Requirement(),
        basis="accuracy",
        device=device_of("cuda"),
        model=fingerprint(sites, 1),
        sites=tuple(plans),
        unplanned={},
        rejected=(),
        predicted=Predicted(saved_us=None, delta_ne=None, se=None, note="by hand"),
    )
    validate_plan(plan)
    return plan


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients under bf16 autocast."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x)
    y.float().square().mean().backward()
    return {"y": y.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


FP8 = ("triton.rowwise", "triton.tensorwise", "torch.tensorwise")
MIXED = ("torch.rowwise", "triton.blockwise_1x128", "triton.tensorwise")


def test_nothing_compiles_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled: list[str] = []

    def noted(*, repr: str, **_: object) -> None:  # noqa: A002 - Triton's word
        compiled.append(repr)

    model = tower()
    sites = sites_of(model)
    plan = plan_of(sites, {"0": FP8, "2": MIXED})
    want = step(model, batch())
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", noted)
    apply_plan(model, plan, sites=sites)
    compiled.clear()
    got = step(model, batch())
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        model(batch())
    assert compiled == []
    # E4M3 has 3 bits of mantissa: a relative L2 error of about 2^-5 for each operand.
    assert got.keys() == want.keys()
    assert all(error(got[name], want[name]) < 0.1 for name in got)


@pytest.mark.parametrize("name", ["0", "2"])
def test_a_bf16_kernel_in_a_plan_runs_as_bf16_does(name: str) -> None:
    model = tower()
    sites = sites_of(model)
    other = "2" if name == "0" else "0"
    names = {name: ("triton.bf16",) * 3, other: ("high_precision.bf16",) * 3}
    x = batch(requires_grad=True)
    want = step(model, x) | {"x": torch.empty(0)}
    want["x"], x.grad = x.grad.clone(), None
    apply_plan(model, plan_of(sites, names), sites=sites)
    assert "triton.bf16" in repr(model.get_submodule(name))
    got = step(model, x)
    got["x"] = x.grad
    # Both round results to bf16 once (2^-9 at most); sums differ in their order only.
    assert all(error(got[key], want[key]) < 6e-3 for key in want)
    assert all(got[key].dtype == want[key].dtype for key in want)
    whole = torch.compile(model, fullgraph=True)
    compiled = step(whole, batch())
    assert error(compiled["y"], got["y"]) < 6e-3
    revert(model)
    assert type(model.get_submodule(name)) is nn.Linear


def test_a_compiled_planned_model_trains_as_the_eager_one() -> None:
    model = tower()
    sites = sites_of(model)
    apply_plan(model, plan_of(sites, {"0": FP8, "2": MIXED}), sites=sites)
    eager = step(model, batch())
    fused = step(torch.compile(model, fullgraph=True), batch())
    names = {name.removeprefix("_orig_mod."): name for name in fused}
    # ReLU and casts of one graph may round once where eager rounds twice; a code of E4M3 is 2^-4 apart.
    assert all(error(fused[names[name]], eager[name]) < 2e-2 for name in eager)
