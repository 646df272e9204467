"""The training loop around a planned linear (D18 to D23), checkpoints and what is not computed."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from planned_cases import GW_HP, ROWWISE, TRIPLES, linear_of, planned, rel, same, seeded, site_plan, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka.planned import Route, Routes, operands, swap_in, swap_out
from loka.vocab import Pass


def tower() -> nn.Sequential:
    return nn.Sequential(linear_of(32, 16), nn.ReLU(), linear_of(32, 32, seed=4), nn.ReLU(), linear_of(1, 32))


def plan_tower(model: nn.Sequential, names: tuple[str, str, str] = ROWWISE) -> nn.Sequential:
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            swap_in(module, site_plan(module, names, name=name))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for i in steps:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(seeded(18, 16, seed=i))
        loss = (out.float() - seeded(18, 1, seed=100 + i)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("names", TRIPLES, ids=lambda names: names[0])
def test_d18_autocast_dtypes_over_several_steps(names: tuple[str, str, str]) -> None:
    model = plan_tower(tower(), names)
    x = seeded(8, 16).requires_grad_()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model[:3](x)
            out = model[3:](hidden)
        assert hidden.dtype is out.dtype is torch.bfloat16
        out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_d18_gradients_under_autocast_are_not_rounded_to_bf16() -> None:
    """The product is rounded once, to the parameter's dtype, not to bf16 first."""
    got = step(planned(linear_of(32, 64), ROWWISE), seeded(18, 64), seeded(18, 32, seed=3), autocast=True)
    assert not torch.equal(got["weight"], got["weight"].bfloat16().float())


def test_d18_autocast_around_a_kernel_does_not_reach_into_it() -> None:
    """Under autocast only the output is rounded: y in bf16 is the fp32 y, rounded."""
    layer, x = linear_of(32, 64, bias=False), seeded(18, 64)
    for names in TRIPLES:
        module = planned(layer, names)
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        assert torch.equal(y, module(x).bfloat16()), names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_d18_a_model_in_half_precision(dtype: torch.dtype) -> None:
    layer = linear_of(32, 64).to(dtype)
    got = step(planned(layer, ROWWISE), seeded(18, 64).to(dtype), seeded(18, 32, seed=3))
    want = step(linear_of(32, 64), seeded(18, 64), seeded(18, 32, seed=3))
    assert all(t.dtype is dtype for t in got.values())
    assert all(rel(got[name], want[name]) <= 0.06 for name in want)


def test_d19_evaluation_leaves_no_trace() -> None:
    def run(evaluate: bool) -> dict[str, Tensor]:
        model = plan_tower(tower())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(model, optimizer, range(3))
        if evaluate:
            model.eval()
            with torch.no_grad():
                for i in range(10):
                    model(seeded(18, 16, seed=50 + i) * 100)
            model.train()
        train(model, optimizer, range(3, 6))
        return model.state_dict()

    assert same(run(True), run(False))


def test_d19_inference_mode_and_no_grad_agree() -> None:
    for names in TRIPLES:
        module, x = planned(linear_of(32, 64), names), seeded(18, 64)
        training = module(x)
        with torch.no_grad():
            a = module(x)
        with torch.inference_mode():
            b = module(x)
        assert torch.equal(a, b)
        assert torch.equal(a, training)
        assert not a.requires_grad


def test_d20_state_dicts_load_strictly_both_ways() -> None:
    plain, model = tower(), plan_tower(tower())
    assert list(plain.state_dict()) == list(model.state_dict())
    for source, target in ((plain, model), (model, plain)):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        target.load_state_dict(state, strict=True)
        assert same(target.state_dict(), source.state_dict())


def test_d20_a_resumed_run_is_bitwise_the_same() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = plan_tower(tower(), GW_HP)
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    straight, optimizer = make()
    losses = train(straight, optimizer, range(10))
    first, optimizer = make()
    train(first, optimizer, range(5))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second, optimizer = make()
    second.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert train(second, optimizer, range(5, 10)) == losses[5:]
    assert same(second.state_dict(), straight.state_dict())


def test_d21_small_updates_are_kept() -> None:
    module = planned(linear_of(16, 16, bias=False), ROWWISE)
    with torch.no_grad():
        module.weight.fill_(1.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    x = torch.full((1, 16), 1.0)
    for _ in range(100):
        optimizer.zero_grad()
        module(x).sum().backward()
        assert module.weight.grad is not None
        assert torch.equal(module.weight.grad, torch.ones(16, 16))  # 1 is exact in FP8
        optimizer.step()
    assert (module.weight - 0.9).abs().max() <= 1e-5


class Recording:
    """A kernel that notes its pass and hands over to the real one."""

    def __init__(self, route: Route, pass_: Pass, ran: list[Pass]) -> None:
        self.kernel, self.pass_, self.ran = route.kernel, pass_, ran

    def matmul(self, *args: Any, **kwargs: Any) -> Tensor:
        self.ran.append(self.pass_)
        return self.kernel.matmul(*args, **kwargs)


def recorded(module: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Pass], list[tuple[Any, ...]]]:
    """The passes that run and the specs of every cast, from now on."""
    ran: list[Pass] = []
    casts: list[tuple[Any, ...]] = []
    parts = [
        tuple(route._replace(kernel=Recording(route, pass_, ran)) for route in routes)
        for pass_, routes in zip(Pass, module.routes, strict=True)
    ]
    module.routes = Routes(*parts)
    real = operands.cast

    def cast(x: Tensor, specs: tuple[Any, ...], **kwargs: Any) -> Any:
        casts.append((tuple(x.shape), tuple(str(s) for s in specs)))
        return real(x, specs, **kwargs)

    monkeypatch.setattr(operands, "cast", cast)
    return ran, casts


def test_d22_frozen_weight_runs_no_wgrad_and_casts_no_operand_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = planned(linear_of(32, 64).requires_grad_(False), ROWWISE)
    ran, casts = recorded(module, monkeypatch)
    x = seeded(18, 64).requires_grad_()
    module(x).sum().backward()
    assert ran == [Pass.FWD, Pass.DGRAD]
    assert casts == [
        ((18, 64), ("e4m3.rowwise",)),
        ((32, 64), ("e4m3.rowwise", "e4m3.rowwise.T")),
        ((18, 32), ("e4m3.rowwise",)),
    ]
    assert module.weight.grad is None
    assert not module.weight.requires_grad


def test_d22_an_input_without_gradient_runs_no_dgrad(monkeypatch: pytest.MonkeyPatch) -> None:
    module = planned(linear_of(32, 64), ROWWISE)
    ran, casts = recorded(module, monkeypatch)
    module(seeded(18, 64)).sum().backward()
    assert ran == [Pass.FWD, Pass.WGRAD]
    assert casts == [
        ((18, 64), ("e4m3.rowwise", "e4m3.rowwise.T")),
        ((32, 64), ("e4m3.rowwise",)),
        ((18, 32), ("e4m3.rowwise.T",)),
    ]


def test_d22_only_the_bias_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = linear_of(32, 64)
    layer.weight.requires_grad_(False)
    module = planned(layer, ROWWISE)
    ran, _ = recorded(module, monkeypatch)
    module(seeded(18, 64)).sum().backward()
    assert ran == [Pass.FWD]
    assert module.bias.grad is not None
    assert torch.equal(module.bias.grad, torch.full((32,), 18.0))


def test_planned_without_gradients_casts_for_the_forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    module = planned(linear_of(32, 64), ROWWISE)
    ran, casts = recorded(module, monkeypatch)
    with torch.no_grad():
        module(seeded(18, 64))
    assert ran == [Pass.FWD]
    assert casts == [((18, 64), ("e4m3.rowwise",)), ((32, 64), ("e4m3.rowwise",))]


def test_d22_an_optimizer_made_before_the_swap_still_works() -> None:
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    parameters = list(model.parameters())
    plan_tower(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(1))
    assert not any(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("names", TRIPLES, ids=lambda names: names[0])
def test_d23_the_output_always_comes_from_the_new_weight(names: tuple[str, str, str]) -> None:
    module, x = planned(linear_of(32, 64, bias=False), names), seeded(18, 64)
    other = seeded(32, 64, seed=9)

    def by_optimizer() -> None:
        module(x).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()

    def in_place() -> None:
        with torch.no_grad():
            module.weight.add_(0.25)

    def by_load() -> None:
        module.load_state_dict({"weight": other})

    for change in (by_optimizer, in_place, by_load):
        module(x)
        change()
        fresh = nn.Linear(64, 32, bias=False)
        fresh.weight = nn.Parameter(module.weight.detach().clone())
        assert torch.equal(module(x), planned(fresh, names)(x))
    y = module(x)
    module.weight.data.mul_(2)
    assert torch.equal(module(x), 2 * y)


def test_planned_gradient_accumulation_sums_over_micro_batches() -> None:
    module, x, g = planned(linear_of(32, 64), ROWWISE), seeded(36, 64), seeded(36, 32, seed=3)
    parts = [step(module, x[rows], g[rows]) for rows in (slice(0, 18), slice(18, 36))]
    module.zero_grad()
    for rows in (slice(0, 18), slice(18, 36)):
        module(x[rows]).backward(g[rows])
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, parts[0]["weight"] + parts[1]["weight"])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("names", [ROWWISE, GW_HP])
def test_planned_activation_checkpointing_gives_the_same_gradients(
    names: tuple[str, str, str], reentrant: bool
) -> None:
    model = plan_tower(tower(), names)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    x, g = seeded(18, 16), seeded(18, 1, seed=3)
    for autocast in (False, True):
        want = step(model, x, g, autocast=autocast)
        got = step(Checkpointed(), x, g, autocast=autocast)
        assert same({n.removeprefix("inner."): t for n, t in got.items()}, want)


def test_planned_revert_in_the_middle_of_training() -> None:
    model = plan_tower(tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, range(2))
    twin = tower()
    twin.load_state_dict(model.state_dict())
    for module in model:
        swap_out(module)
    other = torch.optim.SGD(twin.parameters(), lr=0.05)
    assert train(model, optimizer, range(2, 4)) == train(twin, other, range(2, 4))


def test_planned_backward_ignores_an_autocast_around_it() -> None:
    module, x, g = planned(linear_of(32, 64), GW_HP), seeded(18, 64), seeded(18, 32, seed=3)
    want = step(module, x, g)
    module.zero_grad()
    y = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        y.backward(g)
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, want["weight"])


def test_planned_in_place_change_of_a_saved_input_is_noticed() -> None:
    """A bf16 wgrad keeps a view of x, so autograd's own check still holds."""
    module, x = planned(linear_of(32, 64), GW_HP), seeded(18, 64)
    x = x * 1
    y = module(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
