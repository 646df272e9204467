"""Weights cast once: the same bits as cast in every forward, and no stale weight is ever used."""

from __future__ import annotations

import copy

import pytest
import torch
from planned_cases import BF16, ROWWISE, TENSORWISE, choice, linear_of, rel, same, seeded, site_plan, step
from torch import Tensor, nn

import loka
from loka.artifacts.plan import SitePlan
from loka.errors import UsageError
from loka.mods import BlockNormHardSwish
from loka.planned import PlannedLinear, is_chain, link, operands, swap_in, swap_out
from loka.vocab import Format, Pass

MIXED = (BF16, "emulated.rowwise", "emulated.tensorwise")


def planned(names: tuple[str, str, str], *, chain: bool) -> nn.Sequential:
    norm = BlockNormHardSwish(64, 32) if chain else nn.ReLU()
    model = nn.Sequential(linear_of(64, 48), norm, linear_of(32, 64, bias=False, seed=5))
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            swap_in(module, site_plan(module, names, name=name))
    if is_chain(model):
        link(model)
    return model


def casts_of_weights(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    real = operands.cast

    def cast(x: Tensor, specs: tuple[object, ...], **options: object) -> object:
        if tuple(x.shape) in ((64, 48), (32, 64)) and specs:
            seen.append(tuple(x.shape))
        return real(x, specs, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(operands, "cast", cast)
    return seen


@pytest.mark.parametrize("chain", [False, True], ids=["linears", "chain"])
@pytest.mark.parametrize("names", [ROWWISE, TENSORWISE, MIXED], ids=["rowwise", "tensorwise", "mixed"])
def test_the_same_bits_and_no_cast(
    names: tuple[str, str, str], chain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, g = planned(names, chain=chain), seeded(24, 48), seeded(24, 32, seed=9)
    for autocast in (False, True):
        every_time = step(model, x, g, autocast=autocast)
        with loka.weights_fixed(model):
            seen = casts_of_weights(monkeypatch)
            assert same(step(model, x, g, autocast=autocast), every_time)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                assert torch.equal(model(x), every_time["y"])
            if names is not MIXED:
                assert seen == []
        monkeypatch.undo()
    assert all(module.fixed is None for module in model if isinstance(module, PlannedLinear))


@pytest.mark.parametrize("chain", [False, True], ids=["linears", "chain"])
def test_gradients_are_accumulated_over_micro_batches(chain: bool) -> None:
    model, twin = planned(TENSORWISE, chain=chain), planned(TENSORWISE, chain=chain)
    batches = seeded(3, 16, 48)
    for x in batches:
        twin(x).square().sum().backward()
    with loka.weights_fixed(model):
        for x in batches:
            model(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("chain", [False, True], ids=["linears", "chain"])
def test_a_weight_that_changes_is_an_error(chain: bool) -> None:
    model, x = planned(ROWWISE, chain=chain), seeded(8, 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()

    def goes_on() -> None:
        with loka.weights_fixed(model):
            optimizer.step()
            model(x)

    def ends() -> None:
        with loka.weights_fixed(model):
            optimizer.step()

    for wrong in (goes_on, ends):
        with pytest.raises(UsageError, match=r"weight of `0` was changed within loka\.weights_fixed"):
            wrong()
    assert all(module.fixed is None for module in model if isinstance(module, PlannedLinear))
    with loka.weights_fixed(model):
        model(x)


def test_the_route_at_this_m_decides() -> None:
    """Two kernels by the number of rows: each has its own cast."""
    layer, n, k = linear_of(32, 64), 32, 64
    fwd, dgrad, wgrad = (
        (
            choice("emulated.rowwise", pass_, n, k, m_below=16, grad=Format.E4M3),
            choice("emulated.tensorwise", pass_, n, k, grad=Format.E4M3),
        )
        for pass_ in Pass
    )
    swap_in(layer, SitePlan(name="site", n=n, k=k, bias=True, fwd=fwd, dgrad=dgrad, wgrad=wgrad))
    for rows in (8, 15, 16, 40):
        x, g = seeded(rows, k), seeded(rows, n, seed=3)
        every_time = step(layer, x, g)
        with loka.weights_fixed(layer):
            assert same(step(layer, x, g), every_time)


def test_blocks_nest_and_a_model_without_a_plan_runs_as_ever() -> None:
    model, x = planned(ROWWISE, chain=False), seeded(8, 48)
    plain = nn.Linear(48, 4)
    with loka.weights_fixed(model), loka.weights_fixed(plain):
        outer = model[0].fixed
        assert outer is not None
        with loka.weights_fixed(model):
            assert model[0].fixed is outer
        assert model[0].fixed is outer
        plain(x)
    assert model[0].fixed is None
    with loka.weights_fixed(model):
        swap_out(model[0])
        copy.deepcopy(model)
    assert type(model[0]) is nn.Linear
    assert "fixed" not in model[0].__dict__


def test_in_inference_mode_too() -> None:
    model, x = planned(ROWWISE, chain=True), seeded(8, 48)
    wanted = model(x).detach()
    with torch.inference_mode(), loka.weights_fixed(model):
        assert torch.equal(model(x), wanted)
    assert torch.equal(model(x).detach(), wanted)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("chain", [False, True], ids=["linears", "chain"])
def test_compiled_whole(chain: bool) -> None:
    model, x, g = planned(TENSORWISE, chain=chain), seeded(24, 48), seeded(24, 32, seed=9)
    eager = step(model, x, g)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        step(compiled, x, g)
        with loka.weights_fixed(model):
            found = step(compiled, x, g)
        assert {n.removeprefix("_orig_mod.") for n in found} == eager.keys()
        for name, tensor in found.items():
            assert rel(tensor, eager[name.removeprefix("_orig_mod.")]) < 1e-6, name


def test_a_weight_that_is_replaced_is_an_error() -> None:
    model, x = planned(ROWWISE, chain=False), seeded(8, 48)
    other = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def goes_on() -> None:
        with loka.weights_fixed(model):
            model.load_state_dict(other, assign=True)
            model(x)

    with pytest.raises(UsageError, match="was changed within"):
        goes_on()
