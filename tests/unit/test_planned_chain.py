"""A planned chain: FP8 handed from norm to product; the numbers of the unfused modules where it is not."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from planned_cases import BF16, ROWWISE, TENSORWISE, rel, same, seeded, site_plan, step
from torch import Tensor, nn

import loka
from loka.kernels import block_norm as norms
from loka.kernels import kernel
from loka.mods import BlockNorm, BlockNormHardSwish, Chain, HardSwish
from loka.numerics import (
    block_rms_norm,
    block_rms_norm_gradients,
    bound_scale,
    cast_operand,
    decode,
)
from loka.planned import PlannedChain, PlannedLinear, chain_function, is_chain, link, swap_in, unlink
from loka.vocab import PASS_OPERANDS, Format, GemmProblem, Granularity, Operand, OperandSpec, Pass

Names = tuple[str, str, str]


def alike(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Equal outputs, and gradients but for rounding.

    On a CPU autograd goes through the norm's formula, where a chain takes the gradient that is written out.
    """
    assert got.keys() == want.keys()
    assert torch.equal(got["y"], want["y"])
    limit = 4e-3 if got["y"].dtype is torch.bfloat16 else 1e-6
    for name, tensor in want.items():
        assert got[name].dtype is tensor.dtype, name
        assert rel(got[name], tensor) < limit, name


def with_weights(model: nn.Sequential, seed: int = 0) -> nn.Sequential:
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            width = parameter.shape[-1] if parameter.dim() > 1 else 1
            parameter.copy_(seeded(*parameter.shape, seed=seed + place) / width**0.5)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return model


def planned(model: nn.Sequential, names: Names, *, linked: bool = True) -> nn.Sequential:
    twin = copy.deepcopy(model)
    for name, module in twin.named_modules():
        if type(module) is nn.Linear:
            swap_in(module, site_plan(module, names, name=name))
    for module in twin.modules():
        if linked and isinstance(module, nn.Sequential) and is_chain(module):
            link(module)
    return twin


def three(*, affine: bool = False, bias: bool = False) -> nn.Sequential:
    """A norm, three linears with norms behind two of them; uneven blocks."""
    return with_weights(
        nn.Sequential(
            BlockNorm(48, 16),
            nn.Linear(48, 64, bias=bias),
            BlockNormHardSwish(64, 32, affine=affine),
            nn.Identity(),
            nn.Linear(64, 80, bias=bias),
            BlockNorm(80, 32),
            nn.Linear(80, 32, bias=bias),
        )
    )


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_in_bf16_the_numbers_are_those_of_the_modules(autocast: bool, affine: bool, bias: bool) -> None:
    model, x, g = three(affine=affine, bias=bias), seeded(24, 48), seeded(24, 32, seed=9)
    got = step(planned(model, (BF16, BF16, BF16)), x, g, autocast=autocast)
    alike(got, step(model, x, g, autocast=autocast))


@pytest.mark.parametrize("names", [(BF16, "emulated.tensorwise", BF16), (BF16, "emulated.rowwise", BF16)])
def test_a_gradient_in_fp8_alone_leaves_the_numbers_too(names: Names) -> None:
    """The amax that a norm's gradient comes with gives the bits that looking for it gives."""
    model, x, g = three(), seeded(24, 48), seeded(24, 32, seed=9)
    for autocast in (False, True):
        fused = step(planned(model, names), x, g, autocast=autocast)
        alike(fused, step(planned(model, names, linked=False), x, g, autocast=autocast))


def operand_of(t: Tensor, names: Names, pass_: Pass, side: int, scale: float | None = None) -> Tensor:
    """What a kernel multiplies: [rows, k] of the side, as FP64."""
    n, k = 64, 64
    problem = GemmProblem.of_linear(pass_, rows=64, out_features=n, in_features=k)
    spec = kernel(names[list(Pass).index(pass_)]).operands(problem)[side]
    static = None if scale is None else torch.tensor(scale)
    return decode(cast_operand(t, spec, scale=static)).double()[:, : t.shape[0 if spec.transposed else 1]]


def test_fp8_is_cast_from_the_fp32_result_by_the_static_scale() -> None:
    """Forward and every gradient of Linear, norm, Linear, worked out operand by operand in FP64."""
    names = TENSORWISE
    norm = BlockNormHardSwish(64, 32)
    model = with_weights(nn.Sequential(nn.Linear(48, 64, bias=False), norm, nn.Linear(64, 32, bias=False)))
    x, g = seeded(40, 48), seeded(40, 32, seed=9)
    got = step(planned(model, names), x, g)
    w0, w1 = model[0].weight.detach(), model[2].weight.detach()
    spec = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE)
    scale = bound_scale(norm.norm, 64, spec)

    def product(pass_: Pass, left: Tensor, right: Tensor, **scales: float) -> Tensor:
        a = operand_of(left, names, pass_, 0, scales.get("a"))
        return a @ operand_of(right, names, pass_, 1, scales.get("b")).t()

    h = product(Pass.FWD, x, w0).float()
    z = block_rms_norm(h, norm.norm)
    y = product(Pass.FWD, z, w1, a=scale)
    dz = product(Pass.DGRAD, g, w1).float()
    dh = block_rms_norm_gradients(dz, h, norm.norm)[0]
    wanted = {
        "y": y,
        "2.weight": product(Pass.WGRAD, g, z, b=scale),
        "0.weight": product(Pass.WGRAD, dh, x),
        "x": product(Pass.DGRAD, dh, w0),
    }
    assert got.keys() == wanted.keys()
    for name, exact in wanted.items():
        # Sums in another order move a few numbers over the middle of two codes.
        assert rel(got[name], exact) < 2e-3, name
    loose = step(planned(model, names, linked=False), x, g)
    assert rel(loose["y"], y) > 5e-3, "the dynamic scale gives the same, so nothing was tested"


@pytest.mark.parametrize("names", [TENSORWISE, ROWWISE])
def test_where_all_is_fp8_no_norm_is_written_out(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(chain_function, "block_norm", lambda *a: written.append(1) or norms.block_norm(*a))
    model = three()
    for _ in range(2):
        step(planned(model, names), seeded(16, 48), seeded(16, 32))
    assert written == []
    tail = with_weights(
        nn.Sequential(BlockNorm(48, 16), nn.Linear(48, 32), BlockNorm(32, 16), BlockNorm(32, 8))
    )
    step(planned(tail, names), seeded(16, 48), seeded(16, 32))
    assert len(written) == 2


def test_it_is_as_close_to_fp32_as_the_modules() -> None:
    model, x, g = three(), seeded(256, 48), seeded(256, 32, seed=9)
    exact = step(model, x, g)
    fused, loose = (step(planned(model, TENSORWISE, linked=linked), x, g) for linked in (True, False))
    for name, tensor in exact.items():
        assert rel(fused[name], tensor) < 1.15 * rel(loose[name], tensor), name


@pytest.mark.parametrize("frozen", ["x", "1.weight", "4.weight", "2.weight", "all but 4.weight"])
def test_only_what_asks_gets_a_gradient(frozen: str) -> None:
    model, x, g = three(affine=True, bias=True), seeded(12, 48), seeded(12, 32, seed=9)
    every = step(planned(model, TENSORWISE), x, g)
    twin = planned(model, TENSORWISE)
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(name not in frozen if "all" not in frozen else name == "4.weight")
    entering = x.clone().requires_grad_(frozen != "x" and "all" not in frozen)
    twin(entering).backward(g)
    found = {"x": entering.grad} | {name: p.grad for name, p in twin.named_parameters()}
    for name, grad in found.items():
        asked = name not in frozen if "all" not in frozen else name == "4.weight"
        assert (grad is not None) == asked, name
        if grad is not None:
            assert torch.equal(grad, every[name]), name


def test_modules_names_and_state_stay_and_revert_is_exact() -> None:
    model = three()
    twin = planned(model, ROWWISE)
    assert type(twin) is PlannedChain
    assert list(twin.state_dict()) == list(model.state_dict())
    assert [name for name, _ in twin.named_modules()] == [name for name, _ in model.named_modules()]
    assert isinstance(twin[1], PlannedLinear)
    assert len(twin) == len(model)
    copied = copy.deepcopy(twin)
    x = seeded(8, 48)
    half = twin[:3]
    assert type(half) is PlannedChain
    assert torch.equal(half(x), nn.Sequential(*half)(x))
    unlink(half)
    assert type(half) is nn.Sequential
    assert torch.equal(copied(x), twin(x))
    memory = io.BytesIO()
    torch.save(twin.state_dict(), memory)
    unlink(twin)
    assert type(twin) is nn.Sequential
    assert "unlinked_class" not in twin.__dict__
    chain = planned(Chain.of((48, 64, 32), block=16), ROWWISE)
    assert type(chain) is PlannedChain
    unlink(chain)
    assert type(chain) is Chain


def test_what_is_no_chain_is_left_alone() -> None:
    class Own(nn.Sequential):
        pass

    class Other(BlockNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    linears = [nn.Linear(32, 32) for _ in range(4)]
    for candidate in (
        nn.Sequential(linears[0], nn.Linear(32, 32)),
        nn.Sequential(BlockNorm(32, 16), HardSwish(), linears[1]),
        nn.Sequential(Other(32, 16), linears[2]),
        Own(BlockNorm(32, 16), linears[3]),
    ):
        assert type(planned(candidate, ROWWISE)) is type(candidate)
    unplanned = nn.Sequential(BlockNorm(32, 16), nn.Linear(32, 32))
    assert not is_chain(unplanned)


def test_a_chain_within_others_and_links_that_are_none() -> None:
    model = with_weights(
        nn.Sequential(
            nn.Linear(48, 48),
            nn.ReLU(),
            BlockNorm(48, 16),
            nn.Linear(48, 64),
            HardSwish(),
            nn.Sequential(BlockNorm(64, 16), nn.Linear(64, 32)),
            nn.Dropout(0.0),
        )
    )
    x, g = seeded(2, 6, 48), seeded(2, 6, 32, seed=9)
    twin = planned(model, (BF16, BF16, BF16))
    assert type(twin) is type(twin[5]) is PlannedChain
    for autocast in (False, True):
        alike(step(twin, x, g, autocast=autocast), step(model, x, g, autocast=autocast))
    assert twin(torch.empty(0, 48)).shape == (0, 32)
    with pytest.raises(Exception, match="takes"):
        twin(torch.zeros(3, 47))


def test_who_watches_a_link_sees_what_it_takes_and_gives() -> None:
    model, x, g = three(), seeded(12, 48), seeded(12, 32, seed=9)
    twin, loose = planned(model, TENSORWISE), planned(model, TENSORWISE, linked=False)
    seen: list[Tensor] = []
    handle = twin[4].register_forward_hook(lambda module, args, y: seen.append(args[0]))
    got = step(twin, x, g)
    assert same(got, step(loose, x, g))
    assert len(seen) == 1
    assert seen[0].shape == (12, 64)
    handle.remove()
    step(twin, x, g)
    assert len(seen) == 1


def test_a_norm_of_another_dtype_than_the_products_comes_first_by_itself() -> None:
    """Under autocast an fp32 input is normalized in fp32 and given on in fp32."""
    model, x, g = three(), seeded(12, 48), seeded(12, 32, seed=9)
    twin = planned(model, (BF16, BF16, BF16))
    alike(step(twin, x, g, autocast=True), step(model, x, g, autocast=True))
    half = x.bfloat16()
    alike(step(twin, half, g, autocast=True), step(model, half, g, autocast=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_compiled_whole_it_gives_the_same(autocast: bool) -> None:
    model, x, g = three(affine=True), seeded(16, 48), seeded(16, 32, seed=9)
    twin = planned(model, TENSORWISE)
    eager = step(twin, x, g, autocast=autocast)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    got = {n.removeprefix("_orig_mod."): t for n, t in step(compiled, x, g, autocast=autocast).items()}
    assert got.keys() == eager.keys()
    for name, tensor in eager.items():
        assert rel(got[name], tensor) < 1e-6, name


def test_the_operands_of_a_pass_are_known() -> None:
    """What the chain relies on: the input is A of fwd and B of wgrad, nothing of dgrad."""
    sides = {
        pass_: [side for side in (0, 1) if PASS_OPERANDS[pass_][side][0] is Operand.INPUT] for pass_ in Pass
    }
    assert sides == {Pass.FWD: [0], Pass.DGRAD: [], Pass.WGRAD: [1]}


def test_apply_plan_finds_chains_and_revert_undoes_them() -> None:
    model = nn.ModuleDict({"mlp": with_weights(Chain.of((48, 64, 32), block=16)), "head": nn.Linear(32, 32)})

    def run(x: Tensor) -> Tensor:
        y: Tensor = model["head"](model["mlp"](x))
        return y

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return run(x)

    whole = Whole()
    with loka.Probe(whole, every=1, max_overhead=None) as probe:
        for seed in range(3):
            whole(seeded(64, 48, seed=seed)).square().mean().backward()
            probe.step()
    plan = loka.make_plan(
        probe.profile(), loka.Requirement(min_sqnr_db=10, max_row_error_p99=1.0, max_loss_increase=None)
    )
    x = seeded(64, 48, seed=9)
    before = whole(x)
    loka.apply_plan(whole, plan)
    assert type(model["mlp"]) is PlannedChain
    assert rel(whole(x), before) > 1e-3
    loka.revert(whole)
    assert type(model["mlp"]) is Chain
    assert torch.equal(whole(x), before)


def test_links_that_share_a_weight_run_one_by_one() -> None:
    linear = nn.Linear(48, 48)
    model = with_weights(nn.Sequential(linear, BlockNorm(48, 16), linear))
    x, g = seeded(12, 48), seeded(12, 48, seed=9)
    twin, loose = planned(model, TENSORWISE), planned(model, TENSORWISE, linked=False)
    assert type(twin) is PlannedChain
    assert same(step(twin, x, g), step(loose, x, g))


def test_an_identity_is_left_out_only_where_it_is_one_and_nobody_watches() -> None:
    class Plus(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    norm, linear = BlockNorm(48, 16), nn.Linear(48, 32)
    model = with_weights(nn.Sequential(norm, Plus(), linear))
    x = seeded(8, 48)
    assert torch.equal(planned(model, (BF16, BF16, BF16))(x), model(x))
    twin = planned(three(), TENSORWISE)
    seen: list[Tensor] = []
    twin[3].register_forward_hook(lambda module, args, y: seen.append(y))
    twin(x)
    assert len(seen) == 1
