from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from planner_profiles import ProfileBuilder, linear
from torch import Tensor

from loka.dispatch import make_plan
from loka.errors import ArtifactError, UnknownNameError, UsageError
from loka.probe.pass_groups import PassGroup, Switch, block_of, pass_groups
from loka.probe.retraining import (
    BASELINE,
    DIVERGED_CHANGE,
    RetrainedRun,
    add_loss_changes,
    retrain_effects,
    retrained_run,
)
from loka.vocab import RECIPES, Pass, Requirement, Site

HYBRID = RECIPES["tensorwise_hybrid"]
SITES = [
    linear("tower.layers.0.fmb.1"),
    linear("tower.layers.0.lcb"),
    linear("tower.layers.1.fmb.1"),
    linear("tower.top.0"),
    linear("tower.head.linear", n=1),
    linear("tower.frozen", not_planned="no"),
    linear("tower.unused", m=0),
]
T95_OF_3 = 2.353363434801823  # 0.95 quantile of Student's t with 3 degrees of freedom, from a table


def group(name: str, *sites: str, pass_: Pass = Pass.DGRAD) -> PassGroup:
    return PassGroup(name, tuple(Switch(site, pass_, HYBRID.product(pass_)) for site in sites))


class Losses:
    """A `train` whose losses are made up: a seed's level, rows, and noise of the group."""

    def __init__(self, changes: dict[str, float], *, rows: int = 5, noise: float = 0.0) -> None:
        self.changes, self.rows, self.noise = changes, rows, noise
        self.calls: list[tuple[int, str]] = []

    def __call__(self, seed: int, chosen: PassGroup | None) -> Tensor:
        name = BASELINE if chosen is None else chosen.name
        self.calls.append((seed, name))
        rng = np.random.default_rng([seed, len(name), self.rows])
        base = 0.3 + 0.01 * seed + 0.05 * np.arange(self.rows)
        moved = base * (1 + self.changes.get(name, 0.0)) + self.noise * rng.standard_normal(self.rows)
        return torch.from_numpy(base if chosen is None else moved)


@pytest.mark.parametrize(
    ("site", "block"),
    [
        ("tower.layers.3.fmb.1", "tower.layers.3"),
        ("tower.crosses.0.linear", "tower.crosses.0"),
        ("tower.deep.2", "tower.deep"),
        ("tower.bottom.mlp.0", "tower.bottom.mlp"),
        ("tower.head.linear", "tower.head"),
        ("linear", "linear"),
        ("0", "0"),
    ],
)
def test_block_of(site: str, block: str) -> None:
    assert block_of(site) == block


def test_groups_are_whole_kinds_and_blocks_of_what_can_be_switched() -> None:
    groups = {g.name: g for g in pass_groups(SITES, HYBRID)}
    blocks = ("tower.layers.0", "tower.layers.1", "tower.top")
    assert list(groups) == [*map(str, Pass), *(f"{p}@{b}" for p in Pass for b in blocks)]
    assert [s.site for s in groups["dgrad"].switches] == [s.name for s in SITES[:4]]
    assert [s.site for s in groups["wgrad@tower.layers.0"].switches] == [s.name for s in SITES[:2]]
    assert {s.recipe for s in groups["wgrad"].switches} == {HYBRID.wgrad}
    for pass_ in Pass:  # the blocks share out the whole kind
        parts = [s for name, g in groups.items() if name.startswith(f"{pass_}@") for s in g.switches]
        assert sorted(s.site for s in parts) == sorted(s.site for s in groups[str(pass_)].switches)


def test_groups_of_what_ran_and_of_a_recipe_without_wgrad() -> None:
    def ran(site: str, pass_: Pass) -> bool:
        return pass_ is not Pass.DGRAD or site == "tower.top.0"

    groups = {g.name: g for g in pass_groups(SITES, RECIPES["rowwise_with_gw_hp"], ran=ran)}
    assert [s.site for s in groups["dgrad"].switches] == ["tower.top.0"]
    assert not any(name.startswith(("wgrad", "dgrad@")) for name in groups)
    assert [g.name for g in pass_groups(SITES[3:4], HYBRID, passes=[Pass.FWD])] == ["fwd"]
    with pytest.raises(UsageError, match="recipe `bf16` switches no pass"):
        pass_groups(SITES, RECIPES["bf16"])


def test_effects_against_direct_formulas() -> None:
    groups = [group("a", "x"), group("b", "x", "y")]
    train = Losses({"a": 0.01, "b": -0.02}, rows=7, noise=0.004)
    effects = retrain_effects(train, groups, [0, 1, 2, 3])
    for effect in effects:
        d_SR = np.stack(
            [((train(s, effect.group) - train(s, None)) / train(s, None).mean()).numpy() for s in range(4)]
        )
        S, R = d_SR.shape
        by_seed = d_SR.mean(axis=1)
        sd = by_seed.std(ddof=1)
        assert effect.interval is not None
        assert effect.interval.mean == pytest.approx(d_SR.mean(), rel=1e-12)
        assert effect.interval.high - effect.interval.mean == pytest.approx(T95_OF_3 * sd / 2, rel=1e-9)
        assert effect.se_seeds == pytest.approx(sd / 2, rel=1e-12)
        assert effect.se_rows == pytest.approx(d_SR.mean(axis=0).std(ddof=1) / math.sqrt(R), rel=1e-12)
        rest = d_SR - by_seed[:, None] - d_SR.mean(axis=0) + d_SR.mean()
        both = (rest**2).sum() / (S - 1) / (R - 1) / (S * R)
        plain = effect.se_seeds**2 + effect.se_rows**2 - both
        assert effect.se == pytest.approx(
            math.sqrt(max(plain, effect.se_seeds**2, effect.se_rows**2)), rel=1e-12
        )
        assert effect.changes == pytest.approx(tuple(by_seed), rel=1e-12)
        assert effect.diverged == 0


def test_the_standard_error_covers_both_seeds_and_rows() -> None:
    """Over many made-up experiments the spread of the mean is what `se` says."""
    rng = np.random.default_rng(5)
    S, R, means, variances = 6, 9, [], []
    for _ in range(300):
        d = (
            0.02 * rng.standard_normal((S, 1))
            + 0.03 * rng.standard_normal((1, R))
            + 0.05 * rng.standard_normal((S, R))
        )

        def train(seed: int, chosen: PassGroup | None, d: np.ndarray = d) -> Tensor:
            return torch.ones(R, dtype=torch.float64) + (0 if chosen is None else torch.from_numpy(d[seed]))

        (effect,) = retrain_effects(train, [group("a", "x")], range(S))
        means.append(effect.changes and float(np.mean(effect.changes)))
        variances.append(effect.se**2)
    truth = 0.02**2 / S + 0.03**2 / R + 0.05**2 / (S * R)
    assert np.var(means) == pytest.approx(truth, rel=0.25)  # 300 draws: 8 % standard deviation
    assert np.mean(variances) == pytest.approx(truth, rel=0.25)


def test_one_row_has_no_sampling_error() -> None:
    (effect,) = retrain_effects(Losses({"a": 0.1}, rows=1), [group("a", "x")], [0, 1])
    assert effect.se_rows == 0.0
    assert effect.interval is not None
    assert effect.interval.mean == pytest.approx(0.1)
    assert effect.se == pytest.approx(0.0, abs=1e-12)


def test_runs_are_told_one_by_one_and_in_pairs() -> None:
    told: list[RetrainedRun] = []
    retrain_effects(Losses({}), [group("a", "x"), group("b", "y")], [3, 5], on_run=told.append)
    assert [(r.seed, r.group, r.read) for r in told] == [
        (seed, name, False) for seed in (3, 5) for name in (BASELINE, "a", "b")
    ]


def test_a_stopped_call_goes_on_where_it_was(tmp_path: Path) -> None:
    groups = [group("a", "x"), group("b", "y")]
    train = Losses({"a": 0.01, "b": 0.03}, noise=0.001)
    whole = retrain_effects(train, groups, range(4))

    def stop(run: RetrainedRun) -> None:
        if (run.seed, run.group) == (1, "a"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        retrain_effects(train, groups, range(4), directory=tmp_path / "runs", on_run=stop)
    train.calls.clear()
    read: list[bool] = []
    resumed = retrain_effects(
        train, groups, range(4), directory=tmp_path / "runs", on_run=lambda r: read.append(r.read)
    )
    assert resumed == whole
    assert train.calls[0] == (1, "b")
    assert read == [True] * 5 + [False] * 7


def test_runs_spread_over_processes_are_found(tmp_path: Path) -> None:
    groups = [group("a", "x")]
    train = Losses({"a": 0.02}, noise=0.001)
    for seed in (1, 0):
        for chosen in (*groups, None):
            retrained_run(train, seed, chosen, directory=tmp_path)
    train.calls.clear()
    assert retrain_effects(train, groups, [0, 1], directory=tmp_path) == retrain_effects(
        Losses({"a": 0.02}, noise=0.001), groups, [0, 1]
    )
    assert not train.calls
    (tmp_path / "a-seed-1.safetensors").write_bytes(b"no")
    with pytest.raises(ArtifactError, match="does not hold a run's losses"):
        retrain_effects(train, groups, [0, 1], directory=tmp_path)


def test_a_diverged_group_is_a_result_and_a_diverged_baseline_an_error() -> None:
    def train(seed: int, chosen: PassGroup | None) -> Tensor:
        bad = chosen is not None and chosen.name == "b" and seed == 1
        return torch.full((1,), math.inf) if bad else torch.ones(4)

    good, bad = retrain_effects(train, [group("a", "x"), group("b", "x", "y")], [0, 1, 2])
    assert good.diverged == 0
    assert (bad.diverged, bad.interval) == (1, None)
    assert math.isnan(bad.changes[1])
    with pytest.raises(UsageError, match="the baseline of seed 4 diverged"):
        retrain_effects(lambda *_: torch.full((3,), math.nan), [group("a", "x")], [4, 5])


@pytest.mark.parametrize(
    ("groups", "seeds", "message"),
    [
        ([group("a", "x")], [1], "at least two seeds"),
        ([group("a", "x")], [1, 1], "at least two seeds"),
        ([], [1, 2], "no group"),
        ([group("a", "x"), group("a", "y")], [1, 2], "`a` is taken twice"),
        ([group(BASELINE, "x")], [1, 2], "`baseline` is taken twice"),
        ([PassGroup("a", ())], [1, 2], "switches nothing"),
    ],
)
def test_wrong_calls(groups: list[PassGroup], seeds: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        retrain_effects(Losses({}), groups, seeds)


def test_losses_must_be_of_the_same_rows() -> None:
    with pytest.raises(UsageError, match="losses of 2 rows, the first run 3"):
        retrain_effects(lambda seed, _: torch.ones(3 - seed), [group("a", "x")], [0, 1])
    with pytest.raises(UsageError, match="gives no losses"):
        retrain_effects(lambda *_: torch.ones(0), [group("a", "x")], [0, 1])
    with pytest.raises(UsageError, match="mean loss of 0"):
        retrain_effects(lambda *_: torch.zeros(2), [group("a", "x")], [0, 1])


PLANNED_SITES: list[Site] = [linear("m.a"), linear("m.b"), linear("n.c")]


def test_rows_of_the_loss_table_add_up_to_the_group() -> None:
    profile = ProfileBuilder(PLANNED_SITES, loss=lambda s, p, a, b: (1e-5, 1e-6)).build()
    before = len(profile.loss)
    groups = pass_groups(PLANNED_SITES, HYBRID, passes=[Pass.DGRAD, Pass.WGRAD])
    effects = retrain_effects(Losses({"dgrad": 3e-4}, noise=1e-4), groups, range(4))
    with pytest.raises(UsageError, match=r"`dgrad` and `dgrad@m` both switch dgrad of `m\.a`"):
        add_loss_changes(profile, effects)
    with pytest.raises(UnknownNameError, match="unknown group `fwd`"):
        add_loss_changes(profile, effects, groups=["fwd"])

    told = add_loss_changes(profile, effects, groups=["dgrad", "wgrad@n"])
    assert len(profile.loss) == before
    table = told.loss
    mine = [i for i, method in enumerate(table.method) if method == "retraining/dgrad"]
    whole = next(e for e in effects if e.group.name == "dgrad")
    assert whole.interval is not None
    assert [table.site[i] for i in mine] == ["m.a", "m.b", "n.c"]
    assert {(table.pass_[i], table.spec_a[i], table.spec_b[i]) for i in mine} == {
        (Pass.DGRAD, "e5m2.tensorwise", "e4m3.tensorwise")
    }
    assert sum(table.delta_ne[i] for i in mine) == pytest.approx(whole.interval.mean)
    assert math.sqrt(sum(table.se[i] ** 2 for i in mine)) == pytest.approx(whole.se)
    assert table.method.count("retraining/wgrad@n") == 1
    assert len(table) == before + 4  # what other methods say stays

    again = add_loss_changes(told, effects, groups=["dgrad", "wgrad@n"])
    assert again == told
    blocks = add_loss_changes(told, effects, groups=["dgrad@m", "dgrad@n"])
    assert "retraining/dgrad" not in blocks.loss.method
    assert blocks.loss.method.count("retraining/wgrad@n") == 1


def test_the_planner_spends_its_budget_with_them() -> None:
    """dgrad is free, wgrad costs more than the limit: the plan takes the one and leaves the other."""
    profile = ProfileBuilder(PLANNED_SITES, loss=lambda s, p, a, b: None).build()
    groups = [g for g in pass_groups(PLANNED_SITES, HYBRID) if "@" not in g.name]
    effects = retrain_effects(Losses({"wgrad": 9e-4, "fwd": 1e-5}, noise=1e-7), groups, range(4))
    plan = make_plan(add_loss_changes(profile, effects), Requirement(max_loss_increase=2e-4))
    for site in plan.sites:
        quantized = [site.choices(pass_)[0].spec_a.is_quantized for pass_ in Pass]
        assert quantized == [True, True, False]
        assert site.dgrad[0].spec_a.recipe_key == "e5m2.tensorwise"


def test_a_group_that_diverged_is_never_planned() -> None:
    def train(seed: int, chosen: PassGroup | None) -> Tensor:
        bad = chosen is not None and chosen.name == "wgrad"
        return torch.full((1,), math.inf) if bad else torch.ones(4)

    profile = ProfileBuilder(PLANNED_SITES, loss=lambda s, p, a, b: None).build()
    groups = [g for g in pass_groups(PLANNED_SITES, HYBRID) if "@" not in g.name]
    told = add_loss_changes(profile, retrain_effects(train, groups, [0, 1]))
    rows = [i for i, pass_ in enumerate(told.loss.pass_) if pass_ is Pass.WGRAD]
    assert {told.loss.delta_ne[i] for i in rows} == {DIVERGED_CHANGE}
    plan = make_plan(told, Requirement(max_loss_increase=2e-4))
    assert not any(site.wgrad[0].spec_a.is_quantized for site in plan.sites)
    assert all(site.dgrad[0].spec_a.is_quantized for site in plan.sites)
