"""Trainings of a reference model with one group of passes switched, for `loka.probe.retraining`.

A group says which pass of which site runs in which recipe; here it becomes a plan in memory, is applied to
the initial model of a seed and trained on a source, and the losses of held-out rows come back.

Shapes: R held-out rows, T tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from loka.artifacts import Choice, Plan, Predicted, Profile, SitePlan
from loka.dispatch import apply_plan
from loka.errors import NoKernelError, UsageError
from loka.kernels import HIGH_PRECISION, KERNELS, Kernel, kernel, usable
from loka.probe.pass_groups import PassGroup, Switch
from loka.probe.retraining import BASELINE
from loka.recsys.evaluation.metrics import log_loss_rows
from loka.recsys.evaluation.predictions import Predictions
from loka.recsys.pairs.paired import run_arm
from loka.recsys.source import Source, Split
from loka.recsys.training.config import TrainConfig
from loka.recsys.training.predict import predict
from loka.recsys.training.step import StepInfo
from loka.vocab import Device, Pass, ProductRecipe, Requirement, Site

__all__ = ["loss_per_row", "plan_of_group", "ran_in", "switched_plan", "train_by_group"]


def ran_in(profile: Profile) -> Callable[[str, Pass], bool]:
    """Whether a pass was seen to run at a site: a first layer has no dgrad."""
    seen = set(zip(profile.errors.site, profile.errors.pass_, strict=True))
    return lambda site, pass_: (site, pass_) in seen


def plan_of_group(profile: Profile, group: PassGroup) -> Plan:
    """A plan that runs the passes of one group in their recipes and everything else in bf16.

    Args:
        profile: Of the model; gives its sites, its fingerprint and the device. On a CPU the emulated kernel
            of a recipe is taken, elsewhere the first real one that runs there, else the emulated one.
        group: What to switch; E5M2 gradients included.

    Raises:
        UsageError: for a site that the profile does not have or that cannot be planned.
        NoKernelError: for a recipe that no kernel runs at its site.
    """
    return switched_plan(profile, group.switches, note=f"passes of group `{group.name}` switched")


def switched_plan(profile: Profile, switches: Sequence[Switch], *, note: str) -> Plan:
    """A plan that runs these passes in their recipes and everything else in bf16.

    Args:
        profile: As in `plan_of_group`.
        switches: At most one for each pass of a site.
        note: What the plan is, for its history.

    Raises:
        UsageError: for a site that the profile does not have or that cannot be planned, or a pass twice.
        NoKernelError: for a recipe that no kernel runs at its site.
    """
    sites = {site.name: site for site in profile.sites.sites()}
    recipes: dict[tuple[str, Pass], ProductRecipe] = {}
    for switch in switches:
        site = sites.get(switch.site)
        if site is None or not site.plannable:
            reason = "is not in the profile" if site is None else f"cannot be planned: {site.not_planned}"
            raise UsageError(f"`{switch.site}` {reason}", hint="take the sites from this profile")
        if (switch.site, switch.pass_) in recipes:
            raise UsageError(f"{switch.pass_} of `{switch.site}` is switched twice")
        recipes[switch.site, switch.pass_] = switch.recipe
    return Plan(
        requirement=Requirement(min_speedup=None, max_loss_increase=None),
        basis="accuracy",
        device=profile.device,
        model=profile.model,
        sites=tuple(_site_plan(s, recipes, profile.device, note) for s in sites.values() if s.plannable),
        unplanned={s.name: s.not_planned for s in sites.values() if not s.plannable},
        rejected=(),
        predicted=Predicted(saved_us=None, delta_ne=None, se=None, note=note),
        history=(note,),
    )


def train_by_group(
    build: Callable[[int], nn.Module],
    source: Source,
    config: TrainConfig,
    *,
    profile: Profile,
    split: Split = Split.VALID,
    looks: int = 1,
    bar: bool | None = None,
) -> Callable[[int, PassGroup | None], Tensor]:
    """The `train` that `retrain_effects` wants, for a reference model on a source.

    Args:
        build: Gives the initial model of a seed.
        source: The rows.
        config: Settings of all runs, their seed set to each run's. A short training is what is wanted.
        profile: Of the model; see `plan_of_group`.
        split: Held-out rows whose losses are returned. Test rows judge plans, so the default takes others.
        looks: How often the held-out rows are predicted, evenly spread over the second half of the training,
            the last time at its end; their losses are averaged. Two trainings of a pair drift apart and
            together again within a few dozen steps, so several looks at one pair are worth several pairs.
        bar: As in `Progress`.

    Returns:
        `train(seed, group)`: fp64 [R], all infinite where the training diverged.

    Raises:
        UsageError: for the training split, whose rows are not held out, looks < 1, or several looks at a
            source that does not know how many training rows it has.
    """
    if split is Split.TRAIN:
        raise UsageError("rows of the training split are not held out", hint="take Split.VALID")
    at_rows = _look_rows(config.rows_total(source.rows(Split.TRAIN)), looks)

    def train(seed: int, group: PassGroup | None) -> Tensor:
        model = build(seed).to(torch.device(config.device))
        if group is not None:
            apply_plan(model, plan_of_group(profile, group))
        looker = _Looker(model, source, config, split, at_rows)
        name = BASELINE if group is None else group.name
        run = run_arm(model, source, config.with_seed(seed), arm=name, after_step=looker, bar=bar)
        if split not in run.predictions:
            return torch.full((1,), torch.inf, dtype=torch.float64)
        return looker.mean_with(loss_per_row(run.predictions[split]))

    return train


def loss_per_row(predictions: Predictions) -> Tensor:
    """Each row's loss as training weighs it: the mean over tasks, times weight over mean weight; fp64 [R]."""
    losses = log_loss_rows(predictions.logits, predictions.labels).mean(dim=1)
    if predictions.weights is None:
        return losses
    weights = predictions.weights.double()
    return losses * (weights / weights.mean())


def _look_rows(total: int | None, looks: int) -> list[int]:
    """After how many training rows to look, the look at the end left out."""
    if looks < 1:
        raise UsageError(f"looks must be at least 1, got {looks}")
    if looks == 1:
        return []
    if total is None:
        raise UsageError(
            "several looks need a source that knows its training rows", hint="looks=1, or set max_rows"
        )
    return [round(total * (1 + i / looks) / 2) for i in range(1, looks)]


class _Looker:
    """Predicts the held-out rows at given places of a training; an `after_step` of `run_arm`."""

    def __init__(
        self, model: nn.Module, source: Source, config: TrainConfig, split: Split, at_rows: Sequence[int]
    ) -> None:
        self._model, self._source, self._config, self._split = model, source, config, split
        self._left = list(at_rows)
        self._losses: list[Tensor] = []

    def __call__(self, step: StepInfo) -> None:
        if not self._left or step.rows < self._left[0]:
            return
        while self._left and step.rows >= self._left[0]:
            del self._left[0]
        predictions = predict(
            self._model,
            self._source,
            self._split,
            batch_size=self._config.eval_batch_size or self._config.batch_size,
            dtype=self._config.dtype,
            device=torch.device(self._config.device),
        )
        self._losses.append(loss_per_row(predictions))

    def mean_with(self, last: Tensor) -> Tensor:
        """Mean over the looks so far and the last one."""
        return torch.stack([*self._losses, last]).mean(dim=0)


def _site_plan(
    site: Site, recipes: dict[tuple[str, Pass], ProductRecipe], device: Device, note: str
) -> SitePlan:
    fwd, dgrad, wgrad = (
        _choice(site, pass_, recipes.get((site.name, pass_)), device, note) for pass_ in Pass
    )
    return SitePlan(
        name=site.name, n=site.n, k=site.k, bias=site.bias, fwd=(fwd,), dgrad=(dgrad,), wgrad=(wgrad,)
    )


def _choice(site: Site, pass_: Pass, recipe: ProductRecipe | None, device: Device, note: str) -> Choice:
    problem = site.problem(pass_)
    chosen = kernel(HIGH_PRECISION)
    if recipe is not None and recipe.is_quantized:
        problem = replace(problem, a_format=recipe.a.format, b_format=recipe.b.format)
        chosen = _kernel_of(site, pass_, recipe, device)
    spec_a, spec_b = chosen.operands(problem)
    reason = note if chosen.name != HIGH_PRECISION else "not switched"
    return Choice(m_below=None, kernel=chosen.name, spec_a=spec_a, spec_b=spec_b, reason=reason)


def _kernel_of(site: Site, pass_: Pass, recipe: ProductRecipe, device: Device) -> Kernel:
    wanted = (recipe.a.recipe_key, recipe.b.recipe_key, recipe.accumulation)
    # The last batch may be of any size, so a kernel must take a single row too.
    problems = [
        replace(s.problem(pass_), a_format=recipe.a.format, b_format=recipe.b.format)
        for s in (site, replace(site, rows=1))
    ]
    emulates = device.type == "cpu"
    for found in sorted(KERNELS.values(), key=lambda k: k.emulated is not emulates):
        a, b = found.operands(problems[0])
        if (a.recipe_key, b.recipe_key, found.accumulation) != wanted or not found.verified:
            continue
        if all(usable(found, problem, device) for problem in problems):
            return found
    raise NoKernelError(
        f"no kernel runs {recipe.key} at `{site.name}` for {pass_} on {device.name}",
        hint="`loka doctor` lists the kernels that run here",
    )
