"""`loss_changes`: what it says, how, that the model is as it was, and what it refuses."""

from __future__ import annotations

import gc
import logging
import math
from typing import Any

import pytest
import torch
from test_sensitivity_scores import ROWWISE, TENSORWISE, Batch, Off, clicks, log_loss, one_thread, tower
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from loka.artifacts.plan import Choice, SitePlan
from loka.artifacts.profile import LossTable
from loka.kernels import HIGH_PRECISION, kernel
from loka.planned import swap_in, swap_out
from loka.probe.sensitivity import direct_changes, joint_change, loss_changes, row_scores
from loka.probe.sensitivity.estimate import Bend, corrected, uncertain
from loka.vocab import BF16_PRODUCT, Accumulation, GemmProblem, Pass, ProductRecipe

__all__ = ["one_thread"]

SITES = {"0": [TENSORWISE, ROWWISE], "2": [TENSORWISE, ROWWISE], "4": [TENSORWISE]}


def rows_of(table: LossTable) -> dict[tuple[str, str], tuple[float, float, str]]:
    keys = zip(table.site, table.spec_a, strict=True)
    return dict(zip(keys, zip(table.delta_ne, table.se, table.method, strict=True), strict=True))


def test_every_switch_has_a_row() -> None:
    table = loss_changes(tower(), log_loss, clicks(200, 16), SITES, checks=2)
    assert list(zip(table.site, table.spec_a, table.spec_b, strict=True)) == [
        (site, recipe.a.recipe_key, recipe.b.recipe_key)
        for site, recipes in SITES.items()
        for recipe in recipes
    ]
    assert set(table.pass_) == {Pass.FWD}
    assert all(math.isfinite(d) and 0 < se < 1 for d, se in zip(table.delta_ne, table.se, strict=True))
    assert table.method.count("estimate+direct") >= 2
    assert set(table.method) <= {"estimate", "estimate+direct"}


def test_the_table_agrees_with_direct_trials_within_its_errors() -> None:
    model, batches = tower(seed=4), clicks(400, 16, batches=8)
    table = loss_changes(model, log_loss, batches, SITES, checks=1, max_direct=0)
    trials = [{site: recipe} for site, recipes in SITES.items() for recipe in recipes]
    direct = direct_changes(model, log_loss, batches, trials)
    for i, (delta, se) in enumerate(zip(table.delta_ne, table.se, strict=True)):
        # The same rows: they may differ by less than the rows' own noise.
        assert abs(delta - direct.change(i).delta) < 0.5 * se
        assert se == pytest.approx(direct.change(i).se, rel=0.2)


def test_trials_are_exact_where_they_cover_all_rows() -> None:
    model, batches = tower(seed=4), clicks(100, 16)
    table = loss_changes(model, log_loss, batches, SITES, checks=5, direct_share=1.0)
    trials = [{site: recipe} for site, recipes in SITES.items() for recipe in recipes]
    direct = direct_changes(model, log_loss, batches, trials)
    assert table.method == ["estimate+direct"] * 5
    for i, (delta, se) in enumerate(zip(table.delta_ne, table.se, strict=True)):
        assert (delta, se) == pytest.approx(direct.change(i), rel=1e-9)


def test_without_gradients_every_switch_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    model, batches = tower(), clicks(50, 16)

    @torch.no_grad()
    def evaluate(m: nn.Module, batch: Batch) -> Tensor:
        return log_loss(m, batch)

    with caplog.at_level(logging.WARNING, logger="loka"):
        table = loss_changes(model, evaluate, batches, SITES)
    assert "no gradient flows" in caplog.text
    assert set(table.method) == {"direct"}
    direct = direct_changes(model, log_loss, batches, [{"0": TENSORWISE}])
    assert (table.delta_ne[0], table.se[0]) == pytest.approx(direct.change(0))


def test_recipes_that_are_no_switch_or_the_same_one_are_left_out() -> None:
    fast = ProductRecipe(TENSORWISE.a, TENSORWISE.b, Accumulation.FAST)
    table = loss_changes(tower(), log_loss, clicks(50, 16), {"0": [BF16_PRODUCT, TENSORWISE, fast]})
    assert len(table) == 1
    assert len(loss_changes(tower(), log_loss, clicks(50, 16), {"0": [BF16_PRODUCT]})) == 0


def test_a_site_that_is_not_called_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = tower()
    model.spare = nn.Linear(4, 4)
    batches = clicks(50, 16)

    def evaluate(m: Any, batch: Batch) -> Tensor:
        x, y = batch
        z = m[:5](x).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(z, y, reduction="none")

    with caplog.at_level(logging.WARNING, logger="loka"):
        table = loss_changes(model, evaluate, batches, {"spare": [TENSORWISE], "0": [TENSORWISE]})
    assert table.site == ["0"]
    assert "`spare` was not called" in caplog.text


# --- the model is as it was -----------------------------------------------------------------------------


class Stateful(nn.Module):
    """BatchNorm, dropout, and a count of calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = (
            nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1),
        )  # fmt: skip
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.drop(self.norm(self.a(x))))


def state_of(model: nn.Module) -> tuple[Any, ...]:
    return (
        {k: v.clone() for k, v in model.state_dict().items()},
        [m.training for m in model.modules()],
        [p.grad for p in model.parameters()],
        torch.get_rng_state(),
        [(len(m._forward_hooks), "forward" in m.__dict__) for m in model.modules()],
    )


def assert_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][k], after[0][k]) for k in before[0])
    assert before[1] == after[1]
    assert all(a is b for a, b in zip(before[2], after[2], strict=True)), "gradients are the same objects"
    assert torch.equal(before[3], after[3])
    assert before[4] == after[4]


def test_the_model_is_as_it_was() -> None:
    model = Stateful().train()
    model.norm.eval()  # a frozen part of a model in training
    model(clicks(8, 16)[0][0]).sum().backward()
    before = state_of(model)
    loss_changes(model, log_loss, clicks(30, 16), {"a": [TENSORWISE], "b": [ROWWISE]})
    assert_same(before, state_of(model))


@pytest.mark.parametrize("at", [1, 2, 5])
def test_the_model_is_as_it_was_after_an_exception(at: int) -> None:
    model, calls = Stateful().train(), [0]

    def evaluate(m: nn.Module, batch: Batch) -> Tensor:
        calls[0] += 1
        losses = log_loss(m, batch)
        if calls[0] == at:
            raise ZeroDivisionError
        return losses

    before = state_of(model)
    with pytest.raises(ZeroDivisionError):
        loss_changes(model, evaluate, clicks(300, 16), {"a": [TENSORWISE], "b": [ROWWISE]})
    assert_same(before, state_of(model))
    compiled = torch.compile(nn.Linear(4, 4), backend="eager")
    assert compiled(torch.ones(2, 4)).shape == (2, 4)


def test_draws_inside_evaluate_are_paired() -> None:
    """Both sides of a pair see the same noise, so a switch without error changes nothing."""
    model, batches = tower(), clicks(50, 16)

    def evaluate(m: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return log_loss(m, (x + torch.randn_like(x), y))

    direct = direct_changes(model, evaluate, batches, [{"0": Off(0.0)}])
    assert float(direct.differences.abs().max()) < 1e-5


def test_nothing_of_a_batch_is_kept() -> None:
    """Without the garbage collector: a graph that held itself would pile up, batch by batch."""
    model, outputs = tower(), []

    def keep_weakly(module: nn.Module, args: Any, out: Tensor) -> None:
        outputs.append(StorageWeakRef(out.untyped_storage()))

    model[1].register_forward_hook(keep_weakly)
    gc.disable()
    try:
        row_scores(model, log_loss, clicks(30, 16), SITES)
        assert len(outputs) == 3
        assert all(storage.expired() for storage in outputs)
    finally:
        gc.enable()


# --- how models run -------------------------------------------------------------------------------------


def planned(name: str, module: nn.Linear) -> SitePlan:
    """Tensorwise FP8 forward, the rest in bf16."""
    choices = []
    for pass_ in Pass:
        chosen = kernel("emulated.tensorwise" if pass_ is Pass.FWD else HIGH_PRECISION)
        a, b = chosen.operands(GemmProblem(8, 8, 8, pass_))
        choices.append((Choice(m_below=None, kernel=chosen.name, spec_a=a, spec_b=b, reason=""),))
    n, k = module.weight.shape
    return SitePlan(
        name=name, n=n, k=k, bias=module.bias is not None, fwd=choices[0], dgrad=choices[1], wgrad=choices[2]
    )


@pytest.mark.parametrize("autocast", [False, True])
def test_a_whole_plan_costs_what_the_planned_model_costs(autocast: bool) -> None:
    model, batches = tower(), clicks(60, 16)

    def evaluate(m: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return log_loss(m, batch)

    found = direct_changes(model, evaluate, batches, [{"0": TENSORWISE, "2": TENSORWISE}])
    with torch.no_grad():
        plain = torch.cat([evaluate(model, b) for b in batches])
        for name in ("0", "2"):
            swap_in(model.get_submodule(name), planned(name, model.get_submodule(name)))  # type: ignore[arg-type]
        switched = torch.cat([evaluate(model, b) for b in batches])
        for name in ("0", "2"):
            swap_out(model.get_submodule(name))
    torch.testing.assert_close(found.differences[0], (switched - plain).double(), rtol=0, atol=0)
    joint = joint_change(model, evaluate, batches, {"0": TENSORWISE, "2": TENSORWISE})
    assert joint.delta == pytest.approx(float((switched - plain).mean() / plain.mean()), rel=1e-9)


@pytest.mark.parametrize("how", ["wrapped", "in place", "part"])
def test_compiled_models(how: str) -> None:
    plain, model, batches = tower(), tower(), clicks(60, 16)
    expected = loss_changes(plain, log_loss, batches, SITES)
    if how == "part":
        model[2].compile(backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    run: Any = torch.compile(model, backend="eager") if how == "wrapped" else model
    assert loss_changes(run, log_loss, batches, SITES) == expected


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return out


def test_activation_checkpointing_is_not_counted_twice() -> None:
    batches = clicks(60, 16)
    products = {f"body.{site}": recipes for site, recipes in SITES.items()}
    plain = row_scores(tower(), log_loss, batches, SITES)
    again = row_scores(Checkpointed(tower(), reentrant=False), log_loss, batches, products)
    assert plain is not None
    assert again is not None
    assert torch.equal(plain.first, again.first)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_hide_the_gradients_so_the_model_is_tried() -> None:
    batches = clicks(60, 16)
    model = nn.Sequential(Checkpointed(tower(), reentrant=True), nn.Linear(1, 1))
    table = loss_changes(model, log_loss, batches, {"0.body.0": [TENSORWISE], "1": [TENSORWISE]}, checks=0)
    assert table.method[0] == "direct"
    expected = direct_changes(model, log_loss, batches, [{"0.body.0": TENSORWISE}]).change(0)
    assert (table.delta_ne[0], table.se[0]) == pytest.approx(expected)


def test_frozen_weights_and_writes_in_place_change_nothing() -> None:
    batches = clicks(60, 16)
    model = tower()
    expected = loss_changes(model, log_loss, batches, SITES)
    model[1] = nn.ReLU(inplace=True)
    model.requires_grad_(False)
    assert loss_changes(model, log_loss, batches, SITES) == expected


# --- how uncertain estimates are corrected --------------------------------------------------------------


def test_the_two_phase_estimate_is_right_on_average_and_says_how_far_off_it_is() -> None:
    g = torch.Generator().manual_seed(0)
    off, claimed = [], []
    for _ in range(400):
        estimate = torch.randn(800, generator=g, dtype=torch.float64)
        truth = 0.3 + 1.2 * estimate + 0.2 * torch.randn(800, generator=g, dtype=torch.float64)
        losses = torch.full((800,), 2.0, dtype=torch.float64)
        found = corrected(estimate, losses, truth[:200])
        off.append(found.delta - 0.15)
        claimed.append(found.se)
    mean, sd = float(torch.tensor(off).mean()), float(torch.tensor(off).std())
    assert abs(mean) < 3 * sd / 20
    assert sum(claimed) / 400 == pytest.approx(sd, rel=0.15)
    alone = float((truth[:200] / 2).std() / math.sqrt(200))
    assert claimed[-1] < 0.6 * alone, "the control variate takes most of the noise away"


def test_what_is_tried_depends_on_doubt_and_budget() -> None:
    model, batches = tower(seed=4), clicks(500, 16)
    scores = row_scores(model, log_loss, batches, SITES)
    assert scores is not None
    known = range(5)
    ratio = [abs(scores.second(i)) / scores.change([i]).se for i in known]
    certain = Bend(0.01 / max(ratio), 3)
    assert uncertain(scores, known, certain, budget=None, at_most=9) == []
    doubtful = Bend(0.3 / max(ratio), 3)  # a third of the sampling error: worth it near the budget alone
    assert uncertain(scores, known, doubtful, budget=None, at_most=9) == []
    worst = max(known, key=lambda i: ratio[i])
    near = uncertain(scores, known, doubtful, budget=scores.change([worst]).delta, at_most=9)
    assert near[0] == worst
    assert uncertain(scores, known, doubtful, budget=1.0, at_most=9) == []
    everything = uncertain(scores, known, Bend(1e6, 3), budget=None, at_most=9)
    assert sorted(everything) == list(known)
    assert uncertain(scores, known, Bend(1e6, 3), budget=None, at_most=2) == everything[:2]
