"""What the backward's low precision costs: short trainings in pairs, one group of passes switched.

A gradient's rounding error does not change the loss of the model it is made of, it changes where training
goes, so no trial on a frozen model can tell it. Here a training is done again from the same weights on the
same rows, once in high precision and once for each group of (site, pass); the pair's losses on held-out rows
tell the group's effect. One pair is noise; many seeds give a mean and an interval.

Shapes: S seeds, R held-out rows, n switches of a group.

Errors of the mean: with the change d_sr of seed s at row r, in units of the baseline's mean loss of that
seed, the variance of the mean over both is V_seeds + V_rows - V_both (two-way clusters; Cameron, Gelbach &
Miller 2011, "Robust inference with multiway clustering", section 2.2). The interval is Student's t over the
seeds alone: what more seeds would give on the same rows.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from loka.artifacts.atomic import read_bytes, write_atomically
from loka.artifacts.profile import LossTable, Profile
from loka.errors import ArtifactError, UsageError, unknown_name
from loka.numerics.intervals import Interval, mean_interval
from loka.probe.pass_groups import PassGroup, Switch
from loka.vocab import Pass

__all__ = [
    "BASELINE",
    "DIVERGED_CHANGE",
    "GroupEffect",
    "RetrainedRun",
    "Train",
    "add_loss_changes",
    "retrain_effects",
    "retrained_run",
]

BASELINE = "baseline"
"""Name of the runs in which nothing is switched."""

DIVERGED_CHANGE = 1.0
"""What the loss table gets at each site of a group of which a run diverged: +100 %, beyond any limit."""

_log = logging.getLogger("loka")


Train = Callable[[int, PassGroup | None], Tensor]


@dataclass(frozen=True, slots=True)
class RetrainedRun:
    """One finished training.

    Attributes:
        seed: Its seed.
        group: Name of what was switched, or `BASELINE`.
        losses: fp64 [R], of the held-out rows.
        read: Whether it was read from the folder, not trained.
    """

    seed: int
    group: str
    losses: Tensor
    read: bool

    @property
    def diverged(self) -> bool:
        """True where a loss is not finite."""
        return not bool(self.losses.isfinite().all())


@dataclass(frozen=True, slots=True)
class GroupEffect:
    """What switching one group does to the loss, relative to the baseline's (2e-4 is 0.02 %).

    Attributes:
        group: What was switched.
        interval: Mean and Student's t interval over the seeds; None where a run of the group diverged.
        se_seeds: Standard error of the mean from the noise of training.
        se_rows: From the sampling of held-out rows.
        se: Of both together.
        changes: Each seed's change; NaN where its run diverged.
        diverged: Runs of the group that diverged.
    """

    group: PassGroup
    interval: Interval | None
    se_seeds: float
    se_rows: float
    se: float
    changes: tuple[float, ...]
    diverged: int


def retrain_effects(
    train: Train,
    groups: Sequence[PassGroup],
    seeds: Sequence[int] = tuple(range(20)),
    *,
    level: float = 0.9,
    directory: Path | None = None,
    on_run: Callable[[RetrainedRun], object] | None = None,
) -> tuple[GroupEffect, ...]:
    """Train once in high precision and once for each group, for every seed, and compare on held-out rows.

    Args:
        train: `train(seed, group)` trains from the initial weights of the seed with the group switched (None:
            nothing) and returns the loss of each held-out row, [R], in the same order every time. A training
            that diverged returns something that is not finite. Rows that later judge a plan must not be
            among them.
        groups: What to switch.
        seeds: At least two. The seeds that later judge a plan must not be among them.
        level: Coverage of the intervals.
        directory: Keeps each run's losses as `<group>-seed-<seed>.safetensors`; a run whose file is there is
            not done again, so a stopped call goes on where it was. None keeps nothing.
        on_run: Told each finished run, those read from the folder included.

    Returns:
        The effects in the order of the groups.

    Raises:
        UsageError: for fewer than two seeds, a seed or group twice, a group without switches, or `train`
            returning another number of rows than before; or a baseline that diverged, against which nothing
            can be measured.
        ArtifactError: for a damaged file in the folder.
    """
    _check(groups, seeds)
    changes: dict[str, list[Tensor | None]] = {group.name: [] for group in groups}
    rows = 0
    for seed in seeds:
        baseline: RetrainedRun | None = None
        for group in (None, *groups):
            run = retrained_run(train, seed, group, directory=directory)
            if not run.diverged:
                rows = rows or run.losses.numel()
                _check_rows(run, rows)
            if on_run is not None:
                on_run(run)
            if baseline is None:
                baseline = _checked_baseline(run)
            elif group is not None:
                changes[group.name].append(_change(run, baseline))
    return tuple(_effect(group, changes[group.name], level) for group in groups)


def retrained_run(
    train: Train, seed: int, group: PassGroup | None, *, directory: Path | None = None
) -> RetrainedRun:
    """One run of `retrain_effects`, by itself: for calls that are spread over several processes.

    Args:
        train: As in `retrain_effects`.
        seed: The seed.
        group: What to switch; None for the baseline.
        directory: As in `retrain_effects`. Processes may share it as long as no two do the same run.

    Raises:
        UsageError: for losses of no rows.
        ArtifactError: for a damaged file in the folder.
    """
    name = BASELINE if group is None else group.name
    path = None if directory is None else directory / f"{name}-seed-{seed}.safetensors"
    read = path is not None and path.exists()
    if path is not None and read:
        losses = _read_losses(path)
    else:
        losses = train(seed, group).detach().cpu().double().reshape(-1)
        if not losses.numel():
            raise UsageError(f"run `{name}` of seed {seed} gives no losses", hint="hold rows out")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, save({"losses": losses}))
    _log.info("retraining: %s, seed %d: mean loss %.6g", name, seed, float(losses.mean()))
    return RetrainedRun(seed, name, losses, read)


def add_loss_changes(
    profile: Profile,
    effects: Sequence[GroupEffect],
    *,
    groups: Sequence[str] | None = None,
    of_rows: bool = True,
) -> Profile:
    """A profile whose loss table holds these effects, so that the planner spends its budget with them.

    A group's change D +- S over n passes becomes D/n +- S/sqrt(n) for each: they add up to the group's again
    where all of them are switched. Rows of an earlier retraining of the same passes are replaced.

    Args:
        profile: Left as it is.
        effects: As `retrain_effects` gives them.
        groups: Names of those to take; None for all.
        of_rows: S holds the sampling of held-out rows besides the noise of training. False for a verdict on
            given rows: some thousand of them cannot bound a change of 0.02 % however many seeds there are.

    Raises:
        UnknownNameError: for a name that no effect has.
        UsageError: for two groups that share a pass, whose cost would be counted twice.
    """
    known = {effect.group.name: effect for effect in effects}
    for name in groups or ():
        if name not in known:
            raise unknown_name("group", name, list(known))
    taken = [known[name] for name in (known if groups is None else groups)]
    owners: dict[tuple[str, Pass, str, str], str] = {}
    for effect in taken:
        for switch in effect.group.switches:
            key = _key(switch)
            if owners.setdefault(key, effect.group.name) != effect.group.name:
                raise UsageError(
                    f"the groups `{owners[key]}` and `{effect.group.name}` both switch {switch.pass_} of "
                    f"`{switch.site}`",
                    hint="name the groups to take, for each pass either the whole kind or its blocks",
                )
    table = LossTable()
    _copy_other_rows(profile.loss, table, owners)
    for effect in taken:
        _append(table, effect, effect.se if of_rows else effect.se_seeds)
    return msgspec.structs.replace(profile, loss=table)


def _key(switch: Switch) -> tuple[str, Pass, str, str]:
    return (switch.site, switch.pass_, switch.recipe.a.recipe_key, switch.recipe.b.recipe_key)


def _copy_other_rows(
    old: LossTable, table: LossTable, owners: Mapping[tuple[str, Pass, str, str], str]
) -> None:
    for i, key in enumerate(zip(old.site, old.pass_, old.spec_a, old.spec_b, strict=True)):
        if key in owners and old.method[i].startswith("retraining/"):
            continue
        for column in old.__struct_fields__:
            getattr(table, column).append(getattr(old, column)[i])


def _append(table: LossTable, effect: GroupEffect, group_se: float) -> None:
    n = len(effect.group.switches)
    delta, se = DIVERGED_CHANGE, 0.0
    if effect.interval is not None:
        delta, se = effect.interval.mean / n, group_se / math.sqrt(n)
    for switch in effect.group.switches:
        site, pass_, spec_a, spec_b = _key(switch)
        table.site.append(site)
        table.pass_.append(pass_)
        table.spec_a.append(spec_a)
        table.spec_b.append(spec_b)
        table.delta_ne.append(delta)
        table.se.append(se)
        table.method.append(f"retraining/{effect.group.name}")


def _effect(group: PassGroup, changes: Sequence[Tensor | None], level: float) -> GroupEffect:
    by_seed = tuple(math.nan if change is None else float(change.mean()) for change in changes)
    whole = [change for change in changes if change is not None]
    if len(whole) < len(changes):
        nan = math.nan
        return GroupEffect(group, None, nan, nan, nan, by_seed, len(changes) - len(whole))
    interval = mean_interval(by_seed, level=level)
    d_SR = torch.stack(whole)
    S, R = d_SR.shape
    seeds = statistics.variance(by_seed) / S
    if R < 2:
        return GroupEffect(group, interval, math.sqrt(seeds), 0.0, math.sqrt(seeds), by_seed, 0)
    d_R = d_SR.mean(dim=0)
    rows = float(d_R.var()) / R
    rest_SR = d_SR - d_SR.mean(dim=1, keepdim=True) - d_R + d_R.mean()
    both = float(rest_SR.square().sum()) / ((S - 1) * (R - 1)) / (S * R)
    # Both of the first two hold the noise that belongs to a seed and a row alone; it counts once.
    se = math.sqrt(max(seeds, rows, seeds + rows - both))
    return GroupEffect(group, interval, math.sqrt(seeds), math.sqrt(rows), se, by_seed, 0)


def _checked_baseline(run: RetrainedRun) -> RetrainedRun:
    if run.diverged:
        raise UsageError(
            f"the baseline of seed {run.seed} diverged, so nothing can be compared with it",
            hint="lower the learning rate until high precision trains",
        )
    if not float(run.losses.mean()) > 0:
        raise UsageError(
            f"the baseline of seed {run.seed} has a mean loss of {float(run.losses.mean()):g}, a relative "
            "change needs one above 0"
        )
    return run


def _change(run: RetrainedRun, baseline: RetrainedRun) -> Tensor | None:
    """[R], in units of the baseline's mean; None for a run that diverged."""
    return None if run.diverged else (run.losses - baseline.losses) / baseline.losses.mean()


def _check_rows(run: RetrainedRun, rows: int) -> None:
    if run.losses.numel() != rows:
        raise UsageError(
            f"run `{run.group}` of seed {run.seed} gives losses of {run.losses.numel()} rows, the first "
            f"run {rows}",
            hint="`train` must return the loss of every held-out row, in the same order every time",
        )


def _read_losses(path: Path) -> Tensor:
    try:
        return load(read_bytes(path, kind="losses"))["losses"]
    except (SafetensorError, KeyError) as error:
        raise ArtifactError(
            f"{path} does not hold a run's losses: {error}", hint="delete this file to train the run again"
        ) from error


def _check(groups: Sequence[PassGroup], seeds: Sequence[int]) -> None:
    if len(seeds) < 2 or len(set(seeds)) != len(seeds):
        raise UsageError(f"retraining needs at least two seeds that differ, got {list(seeds)}")
    if not groups:
        raise UsageError("retraining was given no group of passes", hint="make them with `pass_groups`")
    for name, count in Counter([BASELINE, *(group.name for group in groups)]).items():
        if count > 1:
            raise UsageError(f"the group name `{name}` is taken twice", hint=f"`{BASELINE}` is reserved")
    for group in groups:
        if not group.switches:
            raise UsageError(f"the group `{group.name}` switches nothing")
