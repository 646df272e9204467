"""What a total holds: the numbers against autograd and FP64, and the work against what was dispatched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loka.bench.accounting import Pair, Tensors, Work
from loka.bench.shapes import Shape
from loka.kernels import kernel
from loka.vocab import Format, Pass

SHAPE = Shape(48, 32, 24)
CPU = torch.device("cpu")
BF16 = "high_precision.bf16"


class Ops(TorchDispatchMode):
    """Names of the operators, and of those that turn fp32 into bf16 their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.to_bf16: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        self.names.append(name)
        if name == "aten._to_copy" and kwargs.get("dtype") is torch.bfloat16:
            self.to_bf16.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def ops_of(call: Any) -> Ops:
    with Ops() as seen:
        call()
    return seen


def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w, b and g of one linear layer as training has them."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SHAPE.m, SHAPE.k, generator=generator).bfloat16().requires_grad_()
    w = torch.randn(SHAPE.n, SHAPE.k, generator=generator).requires_grad_()
    b = torch.randn(SHAPE.n, generator=generator).requires_grad_()
    return x, w, b, torch.randn(SHAPE.m, SHAPE.n, generator=generator).bfloat16()


def trained() -> dict[Pass, torch.Tensor]:
    """The three results of autograd under autocast."""
    x, w, b, g = layer()
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.nn.functional.linear(x, w, b)
    y.backward(g)
    assert x.grad is not None
    assert w.grad is not None
    return {Pass.FWD: y.detach(), Pass.DGRAD: x.grad, Pass.WGRAD: w.grad}


def given(pass_: Pass) -> Tensors:
    x, w, b, g = (t.detach() for t in layer())
    return {
        Pass.FWD: Tensors(x, w, b),
        Pass.DGRAD: Tensors(g, w, None),
        Pass.WGRAD: Tensors(g, x, None),
    }[pass_]


@pytest.mark.parametrize("pass_", list(Pass))
def test_bf16_is_what_autograd_computes_under_autocast(pass_: Pass) -> None:
    out = Work(Pair(SHAPE, pass_), given(pass_)).total(kernel(BF16))()
    want = trained()[pass_]
    assert out.dtype == want.dtype == (torch.float32 if pass_ is Pass.WGRAD else torch.bfloat16)
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["torch.tensorwise", "torch.rowwise", "emulated.blockwise_1x128"])
@pytest.mark.parametrize("pass_", list(Pass))
def test_fp8_is_the_same_product_with_the_same_dtype(pass_: Pass, name: str) -> None:
    x, w, b, g = (t.detach().double() for t in layer())
    want = {Pass.FWD: x @ w.t() + b, Pass.DGRAD: g @ w, Pass.WGRAD: g.t() @ x}[pass_]
    work = Work(Pair(SHAPE, pass_), given(pass_))
    for call in (work.total(kernel(name)), work.product(kernel(name))):
        out = call()
        assert out.dtype == (torch.float32 if pass_ is Pass.WGRAD else torch.bfloat16)
        # E4M3 keeps four significant bits: operands are off by about 2 % of their norm, the product by 4 %.
        assert float((out.double() - want).norm() / want.norm()) < 0.06


def test_bf16_pays_for_its_copy_of_the_weight_in_fwd_and_not_in_dgrad() -> None:
    weight = (SHAPE.n, SHAPE.k)
    fwd = Work(Pair(SHAPE, Pass.FWD), given(Pass.FWD)).total(kernel(BF16))
    dgrad = Work(Pair(SHAPE, Pass.DGRAD), given(Pass.DGRAD)).total(kernel(BF16))
    assert ops_of(fwd).to_bf16 == [weight, (SHAPE.n,)]
    assert ops_of(fwd).to_bf16 == [weight, (SHAPE.n,)], "in every forward, not only the first"
    assert ops_of(dgrad).to_bf16 == []


def test_the_product_alone_casts_nothing_and_the_casts_alone_multiply_nothing() -> None:
    for pass_ in Pass:
        work = Work(Pair(SHAPE, pass_), given(pass_))
        fp8 = kernel("torch.tensorwise")
        product, casts = ops_of(work.product(fp8)), ops_of(work.casts(fp8))
        assert "aten._scaled_mm" in product.names
        assert not any("amax" in name for name in product.names)
        assert "aten._scaled_mm" not in casts.names
        total = ops_of(work.total(fp8))
        of_product = [name for name in product.names if name not in ("aten.detach",)]
        assert sorted(total.names) == sorted([*casts.names, *of_product])


def test_the_problem_of_a_pair_says_what_is_made() -> None:
    problems = {pass_: Pair(SHAPE, pass_).problem for pass_ in Pass}
    assert [problems[p].key for p in Pass] == ["48x32x24", "48x24x32", "32x24x48"]
    assert [problems[p].out_dtype for p in Pass] == [Format.BF16, Format.BF16, Format.FP32]
    assert [problems[p].bias for p in Pass] == [True, False, False]
    assert not Pair(Shape(1, 1, 1, bias=False), Pass.FWD).problem.bias
    assert Pair(SHAPE, Pass.DGRAD).key == "48x32x24.dgrad"


def test_drawn_tensors_arrive_in_the_dtypes_of_training() -> None:
    for pass_, (a, b) in {
        Pass.FWD: ((48, 24), (32, 24)),
        Pass.DGRAD: ((48, 32), (32, 24)),
        Pass.WGRAD: ((48, 32), (48, 24)),
    }.items():
        tensors = Tensors.random(Pair(SHAPE, pass_), CPU)
        assert (tuple(tensors.a.shape), tuple(tensors.b.shape)) == (a, b)
        assert tensors.a.dtype == torch.bfloat16
        assert tensors.b.dtype == (torch.bfloat16 if pass_ is Pass.WGRAD else torch.float32)
        assert (tensors.bias is not None) == (pass_ is Pass.FWD)
        again = Tensors.random(Pair(SHAPE, pass_), CPU)
        assert torch.equal(tensors.a, again.a)
        assert torch.equal(tensors.b, again.b)
