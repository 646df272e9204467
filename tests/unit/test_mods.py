"""Mods: what apply_mods changes, refuses and records, and the modules against direct formulas."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.errors import PlanMismatchError, UnknownNameError, UsageError
from loka.mods import (
    BlockNorm,
    BlockNormHardSwish,
    Chain,
    HardSwish,
    NoBias,
    UseBlockNorm,
    UseHardSwish,
    apply_mods,
)
from loka.recsys.models.layers import NormSwish, initialize
from loka.sites.mods import mods_of

ALL = {"*": ("no_bias", "block_norm", "hard_swish")}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(48),
            nn.Linear(48, 64),
            NormSwish(64),
            nn.Linear(64, 64),
            nn.LayerNorm(64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.GELU(),
        )
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms(x: Tensor, width: int) -> Tensor:
    blocks = x.double().unflatten(-1, (-1, width))
    return (blocks / (blocks.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)


def swish(x: Tensor) -> Tensor:
    return x * (x + 3).clamp(0, 6) / 6


def test_all_three_compute_what_they_stand_for() -> None:
    changed = model()
    body = changed.body
    weights = [body[i].weight.detach().double() for i in (1, 3, 6)]
    assert apply_mods(changed, ALL) is changed
    x = drawn(5, 48)
    h = rms(x, 48) @ weights[0].T
    h = swish(rms(h, 64)) @ weights[1].T
    h = swish(swish(rms(h, 64)) @ weights[2].T)
    expected = h @ changed.head.weight.double().T + changed.head.bias.double()
    torch.testing.assert_close(changed(x).double(), expected, rtol=1e-5, atol=1e-5)
    links = "BlockNorm Linear BlockNormHardSwish Linear BlockNormHardSwish Identity Linear HardSwish"
    assert " ".join(type(m).__name__ for m in body) == links
    assert changed.head.bias is not None
    assert set(changed.state_dict()) == {*(f"body.{i}.weight" for i in (1, 3, 6)), "head.weight", "head.bias"}
    assert mods_of(changed) == ("block_norm.256", "hard_swish", "no_bias")
    assert mods_of(copy.deepcopy(changed)) == mods_of(changed)
    assert mods_of(model()) == ()


def test_each_alone_leaves_the_rest() -> None:
    only_norm, only_swish = model(), model()
    apply_mods(only_norm, {"body.2*": UseBlockNorm(block=16)})
    x = drawn(4, 64)
    inner = only_norm.body[2]
    torch.testing.assert_close(
        inner(x).double(), x.double() * torch.sigmoid(rms(x, 16)), rtol=1e-5, atol=1e-6
    )
    assert type(only_norm.body[4]) is nn.LayerNorm
    apply_mods(only_swish, {"*": "hard_swish"})
    expected = swish(nn.functional.layer_norm(x, (64,)))
    torch.testing.assert_close(only_swish.body[2](x), expected, rtol=1e-5, atol=1e-5)
    assert "body.2.norm.weight" in only_swish.state_dict()  # names stay
    assert type(only_swish.body[4]) is nn.LayerNorm


def test_order_of_rules_and_mode_do_not_matter() -> None:
    one, other = model(), model().eval()
    apply_mods(one, {"*": ("hard_swish", "block_norm")})
    apply_mods(other, {"*": "block_norm", "body.*": "hard_swish"})
    assert [type(m) for m in one.modules()] == [type(m) for m in other.modules()]
    assert all(not m.training for m in other.modules())
    x = drawn(3, 48)
    assert torch.equal(one(x), other(x))


def test_affine_and_whole_rows() -> None:
    changed = apply_mods(model(), {"*": UseBlockNorm(block=32, affine=True, whole_rows=True, eps=1e-3)})
    first, later = changed.body[0], changed.body[4]
    assert isinstance(first, BlockNorm)
    assert isinstance(later, BlockNorm)
    assert (first.norm.block, later.norm.block) == (48, 32)  # 48 is no multiple of 32
    assert torch.equal(later.state_dict()["weight"], torch.ones(64))
    assert later.norm.eps == 1e-3
    assert mods_of(changed) == ("block_norm.32.affine", "block_norm.48.affine")
    initialize(changed, seed=0)


def test_nothing_is_changed_where_anything_is_refused() -> None:
    changed = model()
    before = [type(m) for m in changed.modules()]
    with pytest.raises(UnknownNameError, match=r"`\*\.fmb` of mod `hard_swish` matches nothing"):
        apply_mods(changed, {"*": ("no_bias", "block_norm"), "*.fmb": "hard_swish"})
    with pytest.raises(UnknownNameError, match="'layer_norm'"):
        apply_mods(changed, {"*": "layer_norm"})
    with pytest.raises(UsageError, match="different rules of mod `block_norm`"):
        apply_mods(changed, {"*": "block_norm", "body.4": UseBlockNorm(block=64)})
    with pytest.raises(UsageError, match="no mods"):
        apply_mods(changed, {})
    changed.wide = nn.LayerNorm([4, 8])
    with pytest.raises(UsageError, match=r"`wide` normalizes over \[4, 8\]"):
        apply_mods(changed, ALL)
    assert [type(m) for m in changed.modules()] == [*before, nn.LayerNorm]
    assert changed.body[1].bias is not None


def test_no_bias_refuses_what_training_has_moved() -> None:
    changed = model()
    changed.body[1].bias.data[3] = 0.5
    changed(drawn(2, 48)).sum().backward()
    with pytest.raises(UsageError, match="3 biases that are not near zero") as error:
        apply_mods(changed, {"*": "no_bias"})
    assert "body.1  largest element of the bias 0.5" in str(error.value)
    apply_mods(changed, {"*": NoBias(keep=["body.3", "body.6"], trained=False)})
    assert [changed.body[i].bias is None for i in (1, 3, 6)] == [True, False, False]


@pytest.mark.parametrize("moved", ["gradient", "weight", "bias"])
def test_what_makes_a_model_look_trained(moved: str) -> None:
    changed = model()
    linear = changed.body[3]
    if moved == "gradient":
        changed(drawn(2, 48)).sum().backward()
    elif moved == "weight":
        linear.weight.data[0, 0] = 0.126  # nn.Linear draws up to 1/sqrt(64)
    else:
        linear.bias.data[0] = -0.126
    with pytest.raises(UsageError, match="looks trained"):
        apply_mods(changed, {"*": "no_bias"})
    for i in (1, 3, 6):
        changed.body[i].bias.data.fill_(5e-4)
    apply_mods(changed, {"*": "no_bias"})  # near zero now


def test_absorbed_biases_change_nothing() -> None:
    torch.manual_seed(0)
    last = (nn.Linear(24, 16), nn.LayerNorm(16))
    model = nn.Sequential(
        nn.Linear(20, 32), nn.Identity(), nn.Linear(32, 24), nn.BatchNorm1d(24), *last
    ).double()
    x = drawn(64, 20).double()
    model(x)  # running means
    model[4].bias.data.fill_(0.7)
    model.eval()
    before = model(x)
    model(x).sum().backward()
    with pytest.raises(UsageError, match="not near zero"):
        apply_mods(model, {"*": "no_bias"})
    apply_mods(model, {"*": NoBias(absorb=True, keep=("2",))})
    assert [model[i].bias is None for i in (0, 2, 4)] == [True, False, True]
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    apply_mods(model, {"2": NoBias(absorb=True)})
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)


def test_what_nothing_absorbs_is_refused() -> None:
    changed = model()
    changed(drawn(2, 48)).sum().backward()
    with pytest.raises(UsageError, match="not near zero") as error:
        apply_mods(changed, {"*": NoBias(absorb=True)})
    assert "nothing behind it absorbs it" in str(error.value)
    assert changed.body[1].bias is not None


def test_a_shared_linear_loses_its_one_bias() -> None:
    shared = nn.Linear(32, 32)
    both = nn.Sequential(shared, nn.ReLU(), shared)
    apply_mods(both, ALL | {"*": ("no_bias", "hard_swish")})
    assert shared.bias is None


def test_meta_models_are_untrained() -> None:
    with torch.device("meta"):
        changed = Model()
    apply_mods(changed, ALL)
    changed.to_empty(device="cpu")
    initialize(changed, seed=0)
    assert changed(drawn(2, 48)).isfinite().all()


def test_a_compiled_or_planned_model_is_refused() -> None:
    with pytest.raises(UsageError, match="compiled already"):
        apply_mods(torch.compile(model(), backend="eager"), ALL)  # type: ignore[arg-type]


def test_a_plan_belongs_to_the_mods_it_was_made_with() -> None:
    def trained(changed: Model) -> loka.Plan:
        with loka.Probe(changed, every=1, max_overhead=None) as probe:
            for seed in range(3):
                changed(drawn(32, 48, seed=seed)).square().mean().backward()
                probe.step()
        return loka.make_plan(probe.profile(), loka.Requirement(max_loss_increase=None))

    modded = apply_mods(model(), ALL)
    plan = trained(modded)
    assert plan.model.mods == ("block_norm.256", "hard_swish", "no_bias")
    planned = loka.apply_plan(apply_mods(model(), ALL), plan)
    with pytest.raises(UsageError, match="carries a plan"):
        apply_mods(planned, {"head": NoBias()})
    other = apply_mods(model(), {"*": ("no_bias", UseBlockNorm(64), "hard_swish")})
    with pytest.raises(PlanMismatchError) as error:
        loka.apply_plan(other, plan)
    assert "mods  only in the plan: block_norm.256" in str(error.value)
    assert "mods  only in the model: block_norm.64" in str(error.value)


def test_a_chain_is_a_sequential_of_links_that_fit() -> None:
    chain = Chain.of((40, 64, 32), block=32)
    assert [type(m) for m in chain] == [nn.Linear, BlockNormHardSwish, nn.Linear, BlockNormHardSwish]
    plain = nn.Sequential(*chain)
    x = drawn(3, 40)
    assert torch.equal(chain(x), plain(x))
    assert list(chain.state_dict()) == list(plain.state_dict())
    assert len(Chain.of((40, 64, 32), last_norm=False)) == 3
    for links, words in (
        ((nn.Linear(4, 4), nn.ReLU()), "link 1 of a Chain is a ReLU"),
        ((nn.Linear(4, 8), HardSwish(), BlockNorm(4)), "link 2 of a Chain takes 4 features, link 1 gives 8"),
        ((), "at least one module"),
    ):
        with pytest.raises(UsageError, match=words):
            Chain(*links)


@pytest.mark.parametrize(("features", "block"), [(0, 256), (64, 0), (64, -1), (2.5, 8), (True, 8)])
def test_sizes_are_positive_integers(features: object, block: object) -> None:
    with pytest.raises(UsageError, match="positive integer"):
        BlockNorm(features, block)  # type: ignore[arg-type]


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match=r"BlockNorm\(64\) takes \[\.\.\., 64\], got \[2, 32\]"):
        BlockNorm(64)(torch.zeros(2, 32))
    with pytest.raises(UsageError, match="int64"):
        HardSwish()(torch.zeros(2, dtype=torch.int64))


def test_autocast_keeps_the_dtype() -> None:
    norm = BlockNormHardSwish(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(drawn(2, 64).bfloat16()).dtype is torch.bfloat16
        assert norm(drawn(2, 64)).dtype is torch.float32


def test_rules_say_what_they_swap(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="loka"):
        apply_mods(model(), {"*": ("block_norm", UseHardSwish())})
    assert "mods applied: block_norm at 3 modules, hard_swish at 3 modules" in caplog.text
