"""What is compiled before the first step, on kernels that run on a CPU."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from loka.artifacts.plan import Choice, SitePlan
from loka.dispatch.warm_up import choice_problem, row_counts, warm_up
from loka.errors import PlanMismatchError
from loka.kernels import kernel
from loka.kernels.backends.emulated import Emulated
from loka.vocab import Format, GemmProblem, Pass

N, K = 32, 48
BF16 = "high_precision.bf16"


def choices(pass_: Pass, *parts: tuple[int | None, str]) -> tuple[Choice, ...]:
    made = []
    for m_below, name in parts:
        problem = GemmProblem.of_linear(pass_, rows=64, out_features=N, in_features=K)
        a, b = kernel(name).operands(problem)
        made.append(Choice(m_below=m_below, kernel=name, spec_a=a, spec_b=b, reason="by hand"))
    return tuple(made)


def site_plan(*parts: tuple[int | None, str], name: str = "s") -> SitePlan:
    fwd, dgrad, wgrad = (choices(pass_, *parts) for pass_ in Pass)
    return SitePlan(name=name, n=N, k=K, bias=True, fwd=fwd, dgrad=dgrad, wgrad=wgrad)


class Seen:
    """Every call of the emulated kernels: (kernel, rows of A, output's dtype), and every warm-up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.products: list[tuple[str, int, torch.dtype]] = []
        self.warmed: list[tuple[str, GemmProblem]] = []
        multiply = Emulated.matmul

        def matmul(chosen: Emulated, a: Any, b: Any, *, out_dtype: torch.dtype, bias: Any = None) -> Any:
            self.products.append((chosen.name, a.values.shape[0], out_dtype))
            return multiply(chosen, a, b, out_dtype=out_dtype, bias=bias)

        monkeypatch.setattr(Emulated, "matmul", matmul)
        monkeypatch.setattr(
            Emulated, "warm_up", lambda chosen, problem, where: self.warmed.append((chosen.name, problem))
        )


@pytest.mark.parametrize(
    ("bounds", "seen", "want"),
    [
        ([], 0, [4096]),
        ([], 300, [300]),
        ([128], 0, [127, 4096]),
        ([128], 100, [100, 4096]),
        ([128], 128, [127, 128]),
        ([128, 8192], 512, [127, 512, 8192]),
        ([1, 2], 0, [1, 4096]),  # no M lies below 1
        ([10**9], 0, [65536]),
        ([10**9, 10**9 + 5], 7, [7]),
    ],
)
def test_one_row_count_for_each_range_of_m(bounds: list[int], seen: int, want: list[int]) -> None:
    names: list[tuple[int | None, str]] = [(bound, "emulated.rowwise") for bound in bounds]
    assert row_counts(site_plan(*names, (None, BF16)), seen) == want


def test_a_bound_of_one_pass_splits_the_ranges_of_all() -> None:
    plan = site_plan((None, "emulated.rowwise"))
    plan = msgspec.structs.replace(
        plan, wgrad=choices(Pass.WGRAD, (64, BF16), (256, "emulated.rowwise"), (None, BF16))
    )
    assert row_counts(plan, 100) == [63, 100, 4096]


def test_each_shape_is_run_once_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    layers = [nn.Linear(K, N), nn.Linear(K, N), nn.Linear(K, N)]
    plans = [
        site_plan((None, "emulated.rowwise"), name="a"),
        site_plan((None, "emulated.rowwise"), name="b"),
        site_plan((16, "emulated.tensorwise"), (None, BF16), name="c"),
    ]
    before = [copy.deepcopy(layer.state_dict()) for layer in layers]
    state = torch.get_rng_state()
    warm_up(zip(layers, plans, strict=True), rows={"a": 24, "b": 24})
    assert torch.equal(torch.get_rng_state(), state)
    for layer, old in zip(layers, before, strict=True):
        assert all(torch.equal(t, old[name]) for name, t in layer.state_dict().items())
        assert all(p.grad is None and p.requires_grad for p in layer.parameters())
    # b is like a; c's upper range is bf16 alone. Activations arrive in bf16 and in fp32; each time with all
    # gradients, with the weight's alone, and with none.
    fwd, wgrad = ("emulated.rowwise", 24, torch.bfloat16), ("emulated.rowwise", N, torch.float32)
    want = []
    for arrives in (torch.bfloat16, torch.float32):
        want += [fwd, ("emulated.rowwise", 24, arrives), wgrad, fwd, wgrad, fwd]
    assert [p for p in seen.products if p[0] == "emulated.rowwise"] == want
    assert {rows for name, rows, _ in seen.products if name == "emulated.tensorwise"} == {15, N}
    problems = [problem for name, problem in seen.warmed if name == "emulated.rowwise"]
    assert problems == [
        GemmProblem(24, N, K, Pass.FWD, bias=True),
        GemmProblem(24, K, N, Pass.DGRAD),
        GemmProblem(N, K, 24, Pass.WGRAD, out_dtype=Format.FP32),
    ]


def test_a_site_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no image for this device\nsecond line")

    layers = [nn.Linear(K, N), nn.Linear(K, N)]
    plans = [site_plan((None, "emulated.rowwise"), name="a"), site_plan((None, BF16), name="b")]
    monkeypatch.setattr(Emulated, "matmul", fails)
    with pytest.raises(PlanMismatchError, match="1 sites that do not run here") as caught:
        warm_up(zip(layers, plans, strict=True), rows={"a": 8})
    assert "a at M=8  no image for this device" in str(caught.value)
    assert "second line" not in str(caught.value)
    monkeypatch.setattr(Emulated, "warm_up", fails)
    with pytest.raises(PlanMismatchError, match=r"a fwd  emulated\.rowwise  no image"):
        warm_up(zip(layers, plans, strict=True), rows={})


def test_the_problem_of_a_choice_has_the_formats_of_its_specs() -> None:
    plan = site_plan((None, "emulated.rowwise"))
    hybrid = replace(GemmProblem.of_linear(Pass.WGRAD, rows=8, out_features=N, in_features=K))
    choice = plan.wgrad[0]
    e5m2 = msgspec.structs.replace(choice, spec_a=replace(choice.spec_a, format=Format.E5M2))
    assert choice_problem(plan, Pass.WGRAD, e5m2, 8) == replace(hybrid, a_format=Format.E5M2)
