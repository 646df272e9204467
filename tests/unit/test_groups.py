from __future__ import annotations

import dataclasses

import pytest
import torch
from planner_profiles import CPU, ProfileBuilder
from tiny_recsys import TinyModel, TinySource, one_thread  # noqa: F401 (an autouse fixture)
from torch import nn

from loka.artifacts import Profile
from loka.dispatch import apply_plan
from loka.dispatch.planner.checks import validate_plan
from loka.errors import NoKernelError, UsageError
from loka.probe.pass_groups import PassGroup, Switch, pass_groups
from loka.probe.retraining import retrain_effects
from loka.recsys.evaluation.metrics import log_loss_rows
from loka.recsys.evaluation.predictions import Predictions
from loka.recsys.pairs.groups import (
    loss_per_row,
    plan_of_group,
    ran_in,
    switched_plan,
    train_by_group,
)
from loka.recsys.pairs.paired import run_arm
from loka.recsys.source import Split
from loka.recsys.training.config import ComputeDtype, TrainConfig
from loka.sites import find_sites
from loka.vocab import RECIPES, Device, OperandSpec, Pass, ProductRecipe, Site

HYBRID = RECIPES["tensorwise_hybrid"]
CONFIG = TrainConfig(batch_size=32, dtype=ComputeDtype.FP32)


def tiny_sites() -> list[Site]:
    source = TinySource()
    batch = next(iter(source.batches(Split.TRAIN, 32)))
    model = TinyModel()
    return find_sites(model, lambda: model(batch))


def tiny_profile(device: Device = CPU) -> Profile:
    return ProfileBuilder(tiny_sites(), device).build()


def one_group(pass_: Pass) -> PassGroup:
    return PassGroup(str(pass_), (Switch("tower.0", pass_, HYBRID.product(pass_)),))


def test_the_plan_of_a_group_switches_it_and_nothing_else() -> None:
    profile = tiny_profile()
    for pass_ in Pass:
        plan = plan_of_group(profile, one_group(pass_))
        validate_plan(plan)
        site = plan.site("tower.0")
        assert site is not None
        for other in Pass:
            choice = site.choices(other)[0]
            if other is pass_:
                assert choice.kernel == "emulated.tensorwise"
                wanted = HYBRID.product(pass_)
                assert (choice.spec_a, choice.spec_b) == (wanted.a, wanted.b)
            else:
                assert choice.kernel == "high_precision.bf16"
        rest = [s for s in plan.sites if s.name != "tower.0"]
        assert rest
        assert all(s.choices(p)[0].kernel == "high_precision.bf16" for s in rest for p in Pass)


def test_e5m2_gradients_and_forward_together() -> None:
    profile = tiny_profile()
    switches = [Switch("tower.0", pass_, HYBRID.product(pass_)) for pass_ in Pass]
    site = switched_plan(profile, switches, note="all").site("tower.0")
    assert site is not None
    keys = [(c.spec_a.recipe_key, c.spec_b.recipe_key) for c in (site.fwd[0], site.dgrad[0], site.wgrad[0])]
    e4, e5 = "e4m3.tensorwise", "e5m2.tensorwise"
    assert keys == [(e4, e4), (e5, e4), (e5, e4)]


def test_plans_of_other_hardware_name_real_kernels() -> None:
    h200 = Device("cuda", "NVIDIA H200", (9, 0), (2, 11))
    site = plan_of_group(tiny_profile(h200), one_group(Pass.DGRAD)).site("tower.0")
    assert site is not None
    assert site.dgrad[0].spec_a.recipe_key == "e5m2.tensorwise"


def test_switches_that_cannot_be() -> None:
    profile = tiny_profile()
    dgrad = HYBRID.dgrad
    with pytest.raises(UsageError, match=r"`tower\.9` is not in the profile"):
        switched_plan(profile, [Switch("tower.9", Pass.DGRAD, dgrad)], note="")
    twice = [Switch("tower.0", Pass.DGRAD, dgrad)] * 2
    with pytest.raises(UsageError, match=r"dgrad of `tower\.0` is switched twice"):
        switched_plan(profile, twice, note="")
    frozen = [dataclasses.replace(s, not_planned="frozen by hand") for s in tiny_sites()]
    with pytest.raises(UsageError, match="cannot be planned: frozen by hand"):
        switched_plan(ProfileBuilder(frozen).build(), twice[:1], note="")
    mixed = ProductRecipe(HYBRID.fwd.a, OperandSpec.of(HYBRID.fwd.b.format, RECIPES["mx"].fwd.b.granularity))
    with pytest.raises(NoKernelError, match=r"no kernel runs e4m3\.tensorwise\*e4m3\.mx_1x32\.pow2"):
        switched_plan(profile, [Switch("tower.0", Pass.FWD, mixed)], note="")


def test_ran_in_knows_the_passes_of_the_profile() -> None:
    profile = tiny_profile()
    ran = ran_in(profile)
    assert ran("tower.0", Pass.FWD)
    assert not ran("tower.7", Pass.FWD)


def test_training_by_group_is_the_trainers_own() -> None:
    source, profile = TinySource(), tiny_profile()
    train = train_by_group(TinyModel, source, CONFIG, profile=profile, bar=False)
    chosen = one_group(Pass.WGRAD)
    for group in (None, chosen):
        model = TinyModel(3)
        if group is not None:
            apply_plan(model, plan_of_group(profile, group))
        run = run_arm(model, source, CONFIG.with_seed(3), arm="x", bar=False)
        predictions = run.predictions[Split.VALID]
        expected = log_loss_rows(predictions.logits[:, 0], predictions.labels[:, 0])
        assert torch.equal(train(3, group), expected)
    assert not torch.equal(train(3, None), train(3, chosen))


def test_several_looks_are_averaged_over_the_second_half() -> None:
    """330 rows in 11 steps of up to 32: looks after rows 220 (step 7), 275 (step 9) and at the end."""
    source, profile = TinySource(), tiny_profile()
    chosen = one_group(Pass.FWD)
    single = train_by_group(TinyModel, source, CONFIG, profile=profile, bar=False)(4, chosen)
    expected = [single]
    for steps in (7, 9):
        short = dataclasses.replace(CONFIG, max_rows=32 * steps)
        expected.append(train_by_group(TinyModel, source, short, profile=profile, bar=False)(4, chosen))
    found = train_by_group(TinyModel, source, CONFIG, profile=profile, looks=3, bar=False)(4, chosen)
    torch.testing.assert_close(found, torch.stack(expected).mean(dim=0), rtol=1e-12, atol=0)


def test_looks_that_cannot_be() -> None:
    class Stream(TinySource):
        def rows(self, split: Split) -> int | None:
            return None

    with pytest.raises(UsageError, match="at least 1, got 0"):
        train_by_group(TinyModel, TinySource(), CONFIG, profile=tiny_profile(), looks=0)
    with pytest.raises(UsageError, match="knows its training rows"):
        train_by_group(TinyModel, Stream(), CONFIG, profile=tiny_profile(), looks=2)


def test_all_bf16_is_the_baseline_bitwise() -> None:
    source, profile = TinySource(), tiny_profile()
    train = train_by_group(TinyModel, source, CONFIG, profile=profile, bar=False)
    bf16 = PassGroup("none", (Switch("tower.0", Pass.FWD, RECIPES["bf16"].fwd),))
    (effect,) = retrain_effects(train, [bf16], [0, 1])
    assert effect.changes == (0.0, 0.0)
    assert effect.se == 0.0


def test_effects_of_a_reference_model() -> None:
    source, profile = TinySource(), tiny_profile()
    train = train_by_group(TinyModel, source, CONFIG, profile=profile, bar=False)
    groups = pass_groups(profile.sites.sites(), HYBRID, ran=ran_in(profile))
    effects = retrain_effects(train, groups, [0, 1, 2])
    assert [e.group.name for e in effects] == ["fwd", "dgrad", "wgrad"]
    assert all(e.interval is not None and abs(e.interval.mean) < 0.05 for e in effects)
    assert all(e.se > 0 for e in effects if e.group.name != "dgrad")


def test_a_diverged_training_gives_infinite_losses() -> None:
    def broken(seed: int) -> nn.Module:
        model = TinyModel(seed)
        with torch.no_grad():
            model.get_parameter("tower.0.weight").fill_(float("nan"))
        return model

    train = train_by_group(broken, TinySource(), CONFIG, profile=tiny_profile(), bar=False)
    assert torch.isinf(train(0, None)).all()
    with pytest.raises(UsageError, match="not held out"):
        train_by_group(TinyModel, TinySource(), CONFIG, profile=tiny_profile(), split=Split.TRAIN)


def test_loss_per_row_weighs_rows_and_averages_tasks() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]])
    labels = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    weights = torch.tensor([1.0, 2.0, 5.0])
    rows = torch.arange(3)
    expected = nn.functional.binary_cross_entropy_with_logits(
        logits.double(), labels.double(), reduction="none"
    ).mean(dim=1)
    plain = loss_per_row(Predictions(("a", "b"), rows, logits, labels))
    torch.testing.assert_close(plain, expected, rtol=1e-12, atol=0)
    weighted = loss_per_row(Predictions(("a", "b"), rows, logits, labels, weights))
    torch.testing.assert_close(
        weighted.mean(), (expected * weights.double()).sum() / weights.double().sum(), rtol=1e-12, atol=0
    )
