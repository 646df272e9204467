"""Plans of one site, made by hand, for the tests of the planned linear."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from loka.artifacts.plan import Choice, SitePlan
from loka.kernels import device_of, kernel, kernel_names
from loka.planned import swap_in
from loka.vocab import Format, GemmProblem, Pass

BF16 = "high_precision.bf16"
ROWWISE = ("emulated.rowwise",) * 3
TENSORWISE = ("emulated.tensorwise",) * 3
GW_HP = ("emulated.rowwise", "emulated.rowwise.tensorwise_weight", BF16)


def here(name: str) -> bool:
    """Whether a kernel can run all three passes on this CPU with this torch."""
    device = device_of("cpu")
    return all(kernel(name).supports(_problem(p, 32, 64), device) for p in Pass)


def _problem(pass_: Pass, n: int, k: int, grad: Format = Format.E4M3) -> GemmProblem:
    return GemmProblem.of_linear(pass_, rows=64, out_features=n, in_features=k, grad_format=grad)


# Every kernel that can train on this machine; the list is never empty, and no test is skipped for it.
TRIPLES = [(name,) * 3 for name in kernel_names() if name != BF16 and here(name)] + [GW_HP]


def choice(name: str, pass_: Pass, n: int, k: int, *, m_below: int | None = None, grad: Format) -> Choice:
    found = kernel(name)
    a, b = found.operands(_problem(pass_, n, k, grad))
    return Choice(m_below=m_below, kernel=found.name, spec_a=a, spec_b=b, reason="by hand")


def site_plan(
    linear: nn.Linear, names: tuple[str, str, str], *, name: str = "site", grad: Format = Format.E4M3
) -> SitePlan:
    """One kernel a pass, for every M."""
    n, k = linear.out_features, linear.in_features
    fwd, dgrad, wgrad = (
        (choice(kernel_name, pass_, n, k, grad=grad),) for pass_, kernel_name in zip(Pass, names, strict=True)
    )
    return SitePlan(name=name, n=n, k=k, bias=linear.bias is not None, fwd=fwd, dgrad=dgrad, wgrad=wgrad)


def planned(linear: nn.Linear, names: tuple[str, str, str], *, grad: Format = Format.E4M3) -> nn.Linear:
    """A planned copy; the given module stays as it is."""
    twin = copy.deepcopy(linear)
    swap_in(twin, site_plan(linear, names, grad=grad))
    return twin


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear_of(n: int, k: int, *, bias: bool = True, seed: int = 1) -> nn.Linear:
    layer = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(seeded(n, k, seed=seed) / k**0.5)
        if bias:
            layer.bias.copy_(seeded(n, seed=seed + 1))
    return layer


def step(module: nn.Module, x: Tensor, g: Tensor, *, autocast: bool = False) -> dict[str, Tensor]:
    """Output and gradients of one forward and backward."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = module(x)
    y.backward(g.to(y.dtype))
    got = {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in module.named_parameters()}}
    return {name: t.clone() for name, t in got.items() if t is not None}


def rel(out: Tensor, ref: Tensor) -> float:
    """Relative L2 error in FP64; 0 where both are 0."""
    out, ref = out.detach(), ref.detach()
    noise = (out.double() - ref.double()).norm()
    return float(noise / ref.double().norm()) if noise else 0.0


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bitwise equal, dtypes included."""
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)
