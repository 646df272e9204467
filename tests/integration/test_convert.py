"""apply_plan and revert on a small model: exact, all or nothing, and never silent."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor, nn

from loka.artifacts.fingerprint import fingerprint
from loka.artifacts.plan import Choice, Plan, Predicted, SitePlan
from loka.dispatch.convert import apply_plan, revert
from loka.errors import PlanMismatchError, UnknownNameError, UsageError
from loka.kernels import device_of, kernel
from loka.planned import is_planned
from loka.sites import find_sites
from loka.vocab import Device, Format, GemmProblem, Pass, Requirement, Site

BF16 = "high_precision.bf16"
H200 = Device("cuda", "NVIDIA H200", (9, 0), (2, 11))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 64))
        self.cross = nn.Parameter(torch.randn(64, 64) / 8)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bottom(x)
        return self.head(x * (x @ self.cross) + x)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sites_of(model: nn.Module) -> list[Site]:
    return find_sites(model, lambda: model(seeded(18, 13)))


def choice(name: str, site: Site, pass_: Pass, *, grad: Format = Format.E4M3) -> Choice:
    found = kernel(name)
    a, b = found.operands(
        GemmProblem.of_linear(pass_, rows=64, out_features=site.n, in_features=site.k, grad_format=grad)
    )
    return Choice(m_below=None, kernel=found.name, spec_a=a, spec_b=b, reason="by hand")


def make_plan(
    model: nn.Module, names: Callable[[str], tuple[str, str, str]], *, device: Device | None = None
) -> Plan:
    """A plan by hand: `names` gives the kernels of fwd, dgrad and wgrad of a site."""
    sites = sites_of(model)
    plans = []
    for site in sites:
        if site.plannable:
            fwd, dgrad, wgrad = (
                (choice(name, site, pass_),) for pass_, name in zip(Pass, names(site.name), strict=True)
            )
            plans.append(
                SitePlan(
                    name=site.name, n=site.n, k=site.k, bias=site.bias, fwd=fwd, dgrad=dgrad, wgrad=wgrad
                )
            )
    return Plan(
        requirement=Requirement(),
        basis="accuracy",
        device=device or device_of("cpu"),
        model=fingerprint(sites, sum(p.numel() for p in model.parameters())),
        sites=tuple(plans),
        unplanned={s.name: s.not_planned for s in sites if not s.plannable},
        rejected=(),
        predicted=Predicted(saved_us=None, delta_ne=None, se=None, note="by hand"),
    )


def everywhere(name: str) -> Callable[[str], tuple[str, str, str]]:
    return lambda site: (name,) * 3


def narrow_head(name: str) -> Callable[[str], tuple[str, str, str]]:
    """FP8 everywhere but at the head, whose N is 1."""
    return lambda site: (BF16,) * 3 if site == "head" else (name,) * 3


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    for i in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(seeded(18, 13, seed=i))
        (y.float() - seeded(18, 1, seed=100 + i)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def bitwise(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def planned_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_planned(module)]


def test_convert_an_all_bf16_plan_is_no_plan() -> None:
    plain, model = Model(), Model()
    types = [type(m) for m in model.modules()]
    assert apply_plan(model, make_plan(model, everywhere(BF16))) is model
    assert [type(m) for m in model.modules()] == types
    adam = torch.optim.Adam
    assert bitwise(train(plain, adam(plain.parameters())), train(model, adam(model.parameters())))


def test_d3_only_switched_sites_change_and_the_rest_stays_nn_linear() -> None:
    model = Model()
    apply_plan(model, make_plan(model, narrow_head("emulated.rowwise")))
    assert planned_names(model) == ["bottom.0", "bottom.2"]
    assert type(model.head) is nn.Linear
    assert "emulated.rowwise[e4m3.rowwise*e4m3.rowwise]" in repr(model)


def test_d3_conversion_never_raises_for_narrow_outputs() -> None:
    model = Model()
    apply_plan(model, make_plan(model, everywhere("torch.tensorwise")))
    assert planned_names(model) == ["bottom.0", "bottom.2", "head"]
    assert model(seeded(5, 13)).shape == (5, 1)


def test_convert_revert_is_exact() -> None:
    model = Model()
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    types = {name: type(m) for name, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    y = model(seeded(5, 13))
    apply_plan(model, make_plan(model, everywhere("emulated.rowwise")))
    assert not torch.equal(model(seeded(5, 13)), y)
    assert revert(model) is model
    assert {name: type(m) for name, m in model.named_modules()} == types
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert torch.equal(model(seeded(5, 13)), y)
    revert(model)  # nothing to take off


def test_d22_an_optimizer_made_before_apply_plan_trains_the_same_parameters() -> None:
    early, late = Model(), Model()
    optimizer = torch.optim.Adam(early.parameters())
    plan = make_plan(early, narrow_head("emulated.rowwise"))
    identities = [id(p) for p in early.parameters()]
    apply_plan(early, plan)
    apply_plan(late, plan)
    assert [id(p) for p in early.parameters()] == identities
    got = train(early, optimizer)
    assert bitwise(got, train(late, torch.optim.Adam(late.parameters())))
    assert not bitwise(got, list(Model().parameters()))


def test_d20_state_dicts_pass_between_plain_and_planned() -> None:
    plain, model = Model(), Model()
    apply_plan(model, make_plan(model, everywhere("emulated.rowwise")))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain.load_state_dict(model.state_dict(), strict=True)
    revert(model)
    assert torch.equal(plain(seeded(5, 13)), model(seeded(5, 13)))


def test_d22_frozen_layers_stay_frozen() -> None:
    model = Model()
    model.bottom[0].requires_grad_(False)
    apply_plan(model, make_plan(model, everywhere("emulated.rowwise")))
    before = model.bottom[0].weight.detach().clone()
    train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    assert model.bottom[0].weight.grad is None
    assert not model.bottom[0].weight.requires_grad
    assert torch.equal(model.bottom[0].weight, before)


def test_convert_twice_is_an_error() -> None:
    model = Model()
    plan = make_plan(model, everywhere("emulated.rowwise"))
    apply_plan(model, plan)
    with pytest.raises(UsageError, match=r"carries a plan already \(at `bottom.0`\)[\s\S]*loka.revert"):
        apply_plan(model, plan)
    with pytest.raises(UsageError, match="already carries a plan"):
        sites_of(model)


def test_convert_after_compile_is_an_error() -> None:
    model = Model()
    plan = make_plan(model, everywhere("emulated.rowwise"))
    with pytest.raises(UsageError, match=r"compiled already[\s\S]*apply the plan first"):
        apply_plan(torch.compile(model, backend="eager"), plan)
    model.compile(backend="eager")
    with pytest.raises(UsageError, match="compiled already"):
        apply_plan(model, plan)
    assert planned_names(model) == []


def _wider(model: Model) -> None:
    model.bottom[2] = nn.Linear(32, 128)
    model.head = nn.Linear(128, 1)


def _without_bias(model: Model) -> None:
    model.head = nn.Linear(64, 1, bias=False)


def _renamed(model: Model) -> None:
    model.top = model.head
    del model.head


def _with_one_more(model: Model) -> None:
    model.extra = nn.Linear(8, 8)


def _own_class(model: Model) -> None:
    class Own(nn.Linear):
        pass

    model.head = Own(64, 1)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_wider, "bottom.2  plan N=64 K=32 with bias, model N=128 K=32 with bias"),
        (_without_bias, "head  plan N=1 K=64 with bias, model N=1 K=64 without bias"),
        (_renamed, "head  only in the plan, N=1 K=64 with bias"),
        (_with_one_more, "extra  only in the model, N=8 K=8 with bias"),
        (_own_class, "head  cannot be planned: a subclass of nn.Linear"),
    ],
)
def test_convert_another_model_is_refused_with_the_difference(
    change: Callable[[Model], None], line: str
) -> None:
    plan = make_plan(Model(), everywhere("emulated.rowwise"))
    other = Model()
    change(other)
    with pytest.raises(PlanMismatchError, match="made for another model") as caught:
        apply_plan(other, plan)
    assert line in str(caught.value)
    assert planned_names(other) == []


def test_convert_with_sites_sees_products_that_are_no_linear() -> None:
    model = Model()
    plan = make_plan(model, everywhere("emulated.rowwise"))
    other = Model()
    other.cross = nn.Parameter(torch.randn(64, 64))
    apply_plan(copy.deepcopy(other), plan, sites=sites_of(other))
    sites = [s for s in sites_of(other) if s.kind == "linear"]
    with pytest.raises(PlanMismatchError, match="cross  only in the plan"):
        apply_plan(other, plan, sites=sites)


def test_convert_a_plan_with_mods_needs_them() -> None:
    model = Model()
    plan = make_plan(model, everywhere("emulated.rowwise"))
    modded = msgspec.structs.replace(plan, model=fingerprint(sites_of(model), 1, ("no_bias",)))
    with pytest.raises(PlanMismatchError, match="mods  only in the plan: no_bias"):
        apply_plan(model, modded)


def test_convert_a_plan_for_a_gpu_does_not_run_on_a_cpu_unless_emulated() -> None:
    model = Model()
    plan = make_plan(model, narrow_head("torch.rowwise.fast"), device=H200)
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(model, plan)
    text = str(caught.value)
    assert "the plan is for NVIDIA H200 (SM 9.0), the model lies on CPU (cpu)" in text
    assert "emulate=True" in text
    assert planned_names(model) == []

    apply_plan(model, plan, emulate=True)
    twin = Model()
    apply_plan(twin, make_plan(twin, narrow_head("emulated.rowwise")))
    assert torch.equal(model(seeded(18, 13)), twin(seeded(18, 13)))
    assert model.bottom[0].site_plan.fwd[0].reason.startswith("emulates torch.rowwise.fast")


def test_convert_an_emulated_plan_of_a_gpu_runs_anywhere() -> None:
    model = Model()
    apply_plan(model, make_plan(model, everywhere("emulated.rowwise"), device=H200))
    assert planned_names(model) == ["bottom.0", "bottom.2", "head"]


def test_convert_a_kernel_that_cannot_run_here_is_named() -> None:
    model = Model()
    plan = make_plan(model, narrow_head("torch.tensorwise.fast"))
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(model, plan)
    assert "bottom.0 fwd  torch.tensorwise.fast  a CPU ignores fast accumulation" in str(caught.value)
    assert planned_names(model) == []


def test_d25_kernels_are_checked_for_the_gpu_of_the_plan_where_weights_are_meta() -> None:
    """Weights on the meta device are meant for the plan's device, whose rules hold."""
    model = Model()
    plan = make_plan(model, everywhere("torch.rowwise"), device=H200)
    with torch.device("meta"):
        meta = Model()
    with pytest.raises(PlanMismatchError, match=r"head fwd  torch\.rowwise  needs N % 16 == 0, got N=1"):
        apply_plan(meta, plan)
    apply_plan(
        meta,
        make_plan(
            model,
            lambda site: ("torch.rowwise", BF16, BF16) if site == "bottom.2" else (BF16,) * 3,
            device=H200,
        ),
    )
    assert planned_names(meta) == ["bottom.2"]


def test_convert_specs_edited_by_hand_must_be_what_the_kernel_takes() -> None:
    model = Model()
    plan = make_plan(model, everywhere("emulated.rowwise"))
    first = plan.sites[0]
    wrong = choice("emulated.tensorwise", Site("", "linear", 32, 13, True, 18), Pass.FWD)
    mixed = Choice(
        m_below=None,
        kernel="emulated.rowwise",
        spec_a=wrong.spec_a,
        spec_b=wrong.spec_b,
        reason="edited",
    )
    edited = msgspec.structs.replace(first, fwd=(mixed,))
    with pytest.raises(PlanMismatchError, match=r"takes e4m3.rowwise \* e4m3.rowwise, the plan casts"):
        apply_plan(model, msgspec.structs.replace(plan, sites=(edited, *plan.sites[1:])))
    assert planned_names(model) == []


def test_convert_an_unknown_kernel_leaves_the_model_alone() -> None:
    model = Model()
    plan = make_plan(model, everywhere("emulated.rowwise"))
    last = plan.sites[-1]
    unknown = msgspec.structs.replace(last.dgrad[0], kernel="emulated.rowise")
    edited = msgspec.structs.replace(last, dgrad=(unknown,))
    for emulate in (False, True):
        with pytest.raises(UnknownNameError, match=r"did you mean `emulated\.rowwise`"):
            apply_plan(
                model, msgspec.structs.replace(plan, sites=(*plan.sites[:-1], edited)), emulate=emulate
            )
    assert planned_names(model) == []


def test_convert_tied_weights_and_shared_modules() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.b.weight = self.a.weight
            self.again = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.again(self.a(x[:, :1].expand(-1, 16))))

    model = Tied()
    apply_plan(model, make_plan(model, everywhere("emulated.rowwise")))
    assert planned_names(model) == ["a", "b"]
    assert model.a.weight is model.b.weight
    model(seeded(4, 13)).sum().backward()
    assert model.a.weight.grad is not None
    revert(model)
    assert type(model.again) is type(model.b) is nn.Linear


def test_convert_revert_undoes_no_more_than_the_plan() -> None:
    model = Model()
    apply_plan(model, make_plan(model, everywhere("emulated.rowwise")))
    last = model.bottom[2]
    torch.nn.utils.parametrizations.weight_norm(last)
    with pytest.raises(UsageError, match=r"cannot be taken off.*\n  bottom\.2  it was made a Parametrized"):
        revert(model)
    assert is_planned(model.bottom[0])
    torch.nn.utils.parametrize.remove_parametrizations(last, "weight")
    revert(model)
    assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))


def test_convert_a_plan_with_a_bf16_kernel_of_a_gpu_is_plain_when_emulated() -> None:
    """Nothing is cast, so its twin is what nn.Linear does: the sites stay untouched."""
    model = Model()
    plan = make_plan(model, everywhere("triton.bf16"), device=H200)
    with pytest.raises(PlanMismatchError, match="the plan is for NVIDIA H200"):
        apply_plan(model, plan)
    apply_plan(model, plan, emulate=True)
    assert planned_names(model) == []
