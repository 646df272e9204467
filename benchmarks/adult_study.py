"""The study behind `adult_quality.py`: model, rows, and every training of it, each kept in a file.

Stages: observe (a profile), retrain by groups of passes, make the plan, train the arms that are judged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import cast

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from loka.artifacts import Plan, Profile, read_plan, read_profile, write_atomically, write_plan, write_profile
from loka.dispatch import apply_plan, make_plan
from loka.probe import Probe
from loka.probe.pass_groups import PassGroup, pass_groups
from loka.probe.retraining import GroupEffect, add_loss_changes, retrain_effects, retrained_run
from loka.recsys import Batch, Schema, Source, Split, TrainConfig, Trainer, open_source
from loka.recsys.batch import Ids
from loka.recsys.data.adult import ADULT_FILE, ADULT_NUMBERS
from loka.recsys.evaluation.metrics import log_loss_rows
from loka.recsys.job.main_job import plan_digest
from loka.recsys.models.base import RecModel, TowerConfig
from loka.recsys.models.dcnv2 import CrossLayer
from loka.recsys.models.layers import MLP, LogitHead, initialize
from loka.recsys.pairs.groups import loss_per_row, ran_in, switched_plan, train_by_group
from loka.recsys.pairs.paired import run_arm
from loka.recsys.training.config import ComputeDtype
from loka.recsys.training.predict import forward
from loka.recsys.training.step import StepInfo
from loka.vocab import RECIPES, Pass, Requirement

NAIVE = RECIPES["tensorwise_hybrid"]
REQUIREMENT = Requirement(max_loss_increase=2e-4)
ARMS = ("bf16", "fp32", "naive", "planned")
FIRST_PLANNING_SEED = 1000
FIRST_JUDGING_SEED = 100  # lower ones served while the study was designed
EPOCH_SEEDS = 3
LOOKS = 8
EVERYTHING = "all"  # the group that is the naive plan
# Recipes beside the naive one in which a kind of pass is retrained, for where that one is too coarse.
FINER = {Pass.FWD: ("rowwise", "blockwise", "mx"), Pass.WGRAD: ("rowwise", "blockwise")}


class DenseInputDCNv2(nn.Module):
    """DCN-V2, cross layers and deep part side by side, dense features as they are in the first layer.

    Args:
        config: Width of an embedding; the rest is fixed.
        schema: The columns.
    """

    def __init__(self, config: TowerConfig, schema: Schema) -> None:
        super().__init__()
        width = len(schema.dense) + len(schema.fields) * config.dim
        self.crosses = nn.ModuleList(CrossLayer(width, None) for _ in range(2))
        self.deep = MLP(width, (256, 128))
        self.head = LogitHead(width + 128, len(schema.tasks))

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """(fp32 [B, D], fp32 [B, F, d]) -> fp32 logits [B, T]."""
        x0 = torch.cat([dense, embedded.flatten(1)], dim=1)
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        out: Tensor = self.head(torch.cat([x, self.deep(x0).to(x.dtype)], dim=1))
        return out


def build(schema: Schema, seed: int) -> RecModel:
    """The model with the initial weights of a seed."""
    config = TowerConfig(dim=16)
    with torch.device("meta"):
        model = RecModel(schema, config, DenseInputDCNv2(config, schema))
    model.to_empty(device="cpu")
    initialize(model, seed=seed)
    return model


class Dense(StrEnum):
    """What is done to Adult's six numbers before the first layer sees them.

    STANDARDISED is `AdultSource`'s own: log1p of the heavy-tailed three, mean 0, deviation 1. SCALED is the
    same without taking the mean away, and fnlwgt without log1p, so that zeros stay zeros. LOG1P is log1p of
    all six, as dense features of click logs are fed. A rounding relative to a value costs the more, the
    larger the mean is against the deviation.
    """

    STANDARDISED = "standardised"
    SCALED = "scaled"
    LOG1P = "log1p"


TEST_ROWS = 16_281  # as many as Adult's own test file has
VALID_ROWS = 4_884


class HeldSource:
    """A source whose rows are held in memory, Adult's shared out anew.

    LoKA's own split leaves 4,822 test rows, whose sampling moves a change of NE by more than is to be shown.
    Here a third of Adult's rows are test rows, by a fixed permutation.

    Args:
        source: The rows.
        dense: What is done to the dense features.
        again: Share the rows out as above; every id field must hold one id a row.
    """

    def __init__(self, source: Source, dense: Dense, *, again: bool) -> None:
        self._source = source
        self.name, self.schema, self.skipped = source.name, source.schema, source.skipped
        self._numbers = None if dense is Dense.STANDARDISED else _numbers(source, dense)
        self._dense = dense
        self._held: dict[tuple[Split, int], list[Batch]] = {}
        self._all = _one_batch(source, self._numbers) if again else None

    def batches(self, split: Split, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        key = (split, batch_size)
        if key not in self._held:
            if self._all is None:
                self._held[key] = list(self._source.batches(split, batch_size))
            else:
                places = _places(len(self._all))[split].split(batch_size)
                self._held[key] = [_some_rows(self._all, part) for part in places]
        return iter(self._held[key][skip:])

    def rows(self, split: Split) -> int | None:
        return self._source.rows(split) if self._all is None else len(_places(len(self._all))[split])

    def identity(self) -> dict[str, str | int | float]:
        return self._source.identity() | {"dense": str(self._dense), "test_rows": self.rows(Split.TEST) or 0}


@functools.lru_cache(maxsize=2)
def _places(rows: int) -> dict[Split, Tensor]:
    """Which rows are in which split."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    test, valid, train = order.split([TEST_ROWS, VALID_ROWS, rows - TEST_ROWS - VALID_ROWS])
    return {Split.TEST: test, Split.VALID: valid, Split.TRAIN: train}


def _one_batch(source: Source, numbers: Tensor | None) -> Batch:
    """All rows, in the file's order."""
    parts = [batch for split in Split for batch in source.batches(split, 8192)]
    rows = torch.cat([part.rows for part in parts])
    order = rows.argsort()
    fields = parts[0].ids.lengths.shape[0]
    ids = torch.cat([part.ids.values.view(fields, -1) for part in parts], dim=1)[:, order]
    dense = torch.cat([part.dense for part in parts])[order] if numbers is None else numbers[rows[order]]
    labels = torch.cat([part.labels for part in parts])[order, 0]
    return Batch(dense, Ids.of(ids.flatten(), torch.ones_like(ids)), labels, None, rows[order])


def _some_rows(batch: Batch, places: Tensor) -> Batch:
    ids = batch.ids.values.view(batch.ids.lengths.shape)[:, places]
    labels = batch.labels[places, 0]
    return Batch(
        batch.dense[places], Ids.of(ids.flatten(), torch.ones_like(ids)), labels, None, batch.rows[places]
    )


def _numbers(source: Source, dense: Dense) -> Tensor:
    """Adult's numbers of every row of the file, fp32 [rows, 6]; a deviation is that of the training rows."""
    table = pq.read_table(ADULT_FILE, columns=list(ADULT_NUMBERS))
    columns = [torch.tensor(table[name].to_numpy(), dtype=torch.float32) for name in ADULT_NUMBERS]
    raw = torch.stack(columns, dim=1)
    if dense is Dense.LOG1P:
        return raw.log1p()
    capital = [ADULT_NUMBERS.index(name) for name in ("capital-gain", "capital-loss")]
    raw[:, capital] = raw[:, capital].log1p()
    training = torch.cat([batch.rows for batch in source.batches(Split.TRAIN, 8192)])
    return raw / raw[training].std(dim=0, correction=0)


@dataclass(frozen=True, slots=True)
class Study:
    """One data set and how much is done on it.

    Attributes:
        name: Of the folder and the metrics.
        data: As `open_source` takes it.
        dense: What is done to the dense features.
        scratch: Where runs are kept.
        max_epochs: Epochs that may be chosen.
        short_epochs: Of a retraining.
        planning_seeds: Seeds of the retrainings of whole kinds of passes.
        block_seeds: Seeds of those of each kind by block of the model; 0 leaves them out.
        judging_seeds: Seeds of the verdict.
    """

    name: str
    data: str
    dense: Dense
    scratch: Path
    max_epochs: int
    short_epochs: int
    planning_seeds: int
    block_seeds: int
    judging_seeds: int

    @property
    def folder(self) -> Path:
        return self.scratch / self.name

    @property
    def judged_seeds(self) -> range:
        return range(FIRST_JUDGING_SEED, FIRST_JUDGING_SEED + self.judging_seeds)

    def config(self, *, epochs: int, dtype: ComputeDtype) -> TrainConfig:
        return TrainConfig(
            batch_size=512, epochs=epochs, dtype=dtype, eval_batch_size=4096, checkpoint_every_s=None
        )

    def retrainings(self, profile: Profile) -> list[tuple[tuple[PassGroup, ...], range]]:
        """Groups of whole kinds with their seeds, then groups by block with theirs.

        The forward is retrained in every recipe that a plan may choose: one frozen model tells what a
        rounding does to it, not what training with that rounding does. The weights' gradients are too, since
        raw dense features are too much for tensorwise E5M2 in some.
        """
        sites = profile.sites.sites()
        found = pass_groups(sites, NAIVE, ran=ran_in(profile))
        whole = [g for g in found if "@" not in g.name]
        parts = [g for g in found if "@" in g.name]
        for pass_, recipes in FINER.items():
            for name in recipes:
                finer = pass_groups(sites, RECIPES[name], passes=[pass_], ran=ran_in(profile))[0]
                whole.append(replace(finer, name=f"{pass_}.{name}"))
        everything = tuple(switch for group in found if "@" not in group.name for switch in group.switches)
        whole.append(PassGroup(EVERYTHING, everything))
        first = FIRST_PLANNING_SEED
        return [
            (tuple(groups), range(first, first + seeds))
            for groups, seeds in ((whole, self.planning_seeds), (parts, self.block_seeds))
            if groups and seeds
        ]


def held(study: Study) -> HeldSource:
    """The source, once a process."""
    return _held(study.data, study.dense)


@functools.lru_cache(maxsize=4)
def _held(data: str, dense: Dense) -> HeldSource:
    return HeldSource(open_source(data), dense, again=data == "adult")


# --- what is learned on the training and validation rows ------------------------------------------------


def observe(study: Study) -> Profile:
    """Train once in bf16 with Probe: errors of every recipe, and the forward's changes of the loss."""
    path = study.folder / "profile.json"
    if path.exists():
        return read_profile(path)
    source, seed = held(study), FIRST_PLANNING_SEED
    config = study.config(epochs=study.max_epochs, dtype=ComputeDtype.BF16).with_seed(seed)
    model = build(source.schema, seed)
    batches = list(source.batches(Split.VALID, 512))
    probe = Probe(model, every=20, max_overhead=None, evaluate=_evaluate, batches=batches, seed=seed)
    trainer = Trainer(model, source, config, after_step=lambda _: probe.step(), bar=False)
    with probe:
        trainer.train()
    profile = probe.profile()
    write_profile(path, profile)
    return profile


def _evaluate(model: nn.Module, batch: object) -> Tensor:
    rows = cast(Batch, batch)
    labels = rows.labels
    logits = forward(model, rows, dtype=ComputeDtype.BF16, tasks=labels.shape[1])
    return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(1)


def validation_curve(study: Study, seed: int) -> list[float]:
    """Mean validation loss of bf16 after each epoch."""
    source = held(study)
    config = study.config(epochs=study.max_epochs, dtype=ComputeDtype.BF16).with_seed(seed)
    steps = sum(1 for _ in source.batches(Split.TRAIN, config.batch_size))
    losses: list[float] = []

    def after_step(step: StepInfo) -> None:
        if step.step % steps == 0:
            predictions = trainer.evaluate(Split.VALID)
            losses.append(float(log_loss_rows(predictions.logits, predictions.labels).mean()))

    trainer = Trainer(build(source.schema, seed), source, config, after_step=after_step, bar=False)
    trainer.train()
    return losses


def plan_for(study: Study, profile: Profile) -> tuple[Plan, Profile, tuple[GroupEffect, ...]]:
    """The plan, the profile that it was made from, and what the groups cost."""
    train, folder = _short_training(study, profile), study.folder / "retrained"
    effects = tuple(
        effect
        for groups, seeds in study.retrainings(profile)
        for effect in retrain_effects(train, groups, seeds, directory=folder)
    )
    # The forward's cost by block, to leave only what carries it in bf16; the gradients' as whole kinds.
    names = [effect.group.name for effect in effects]
    blocks = [name for name in names if name.startswith("fwd@")]
    finer = [name for name in names if name.startswith(("fwd.", "wgrad."))]
    taken = ["dgrad", "wgrad", *finer, *(blocks or ["fwd"])]
    complete = add_loss_changes(profile, effects, groups=taken)
    write_profile(study.folder / "profile-with-loss.json", complete)
    plan = make_plan(complete, REQUIREMENT)
    write_plan(study.folder / "plan.json", plan)
    return plan, complete, effects


def _short_training(study: Study, profile: Profile) -> Callable[[int, PassGroup | None], Tensor]:
    source = held(study)
    config = study.config(epochs=study.short_epochs, dtype=ComputeDtype.FP32)
    return train_by_group(functools.partial(build, source.schema), source, config, profile=profile, bar=False)


# --- what judges ----------------------------------------------------------------------------------------


def judged_losses(study: Study, arm: str, seed: int, epochs: int) -> dict[str, Tensor]:
    """Losses of the validation and test rows of one arm and seed, by split, fp64 [R]."""
    plan: Plan | None = None
    if arm == "planned":
        plan = read_plan(study.folder / "plan.json")
    elif arm == "naive":
        plan = naive_plan(read_profile(study.folder / "profile.json"))
    # Another plan is another run.
    name = arm if plan is None else f"{arm}-{plan_digest(plan)[:12]}"
    path = study.folder / "judged" / f"{name}-epochs-{epochs}-seed-{seed}.safetensors"
    if path.exists():
        return load_file(path)
    source = held(study)
    model = build(source.schema, seed)
    if plan is not None:
        apply_plan(model, plan)
    dtype = ComputeDtype.FP32 if arm == "fp32" else ComputeDtype.BF16
    config = study.config(epochs=epochs, dtype=dtype).with_seed(seed)
    run = run_arm(model, source, config, arm=arm, bar=False)
    losses = {str(split): loss_per_row(found) for split, found in run.predictions.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(losses))
    return losses


def naive_plan(profile: Profile) -> Plan:
    """Tensorwise FP8 in every pass of every wide site."""
    groups = pass_groups(profile.sites.sites(), NAIVE, ran=ran_in(profile))
    switches = [switch for group in groups if "@" not in group.name for switch in group.switches]
    return switched_plan(profile, switches, note="tensorwise FP8 everywhere")


def changes(study: Study, arm: str, baseline: str, epochs: int, split: Split) -> Tensor:
    """Relative change of each row's loss in units of the baseline's mean, in percent; fp64 [seeds, R].

    Its mean over rows is the relative change of the loss, and so of NE.
    """
    rows = []
    for seed in study.judged_seeds:
        ours = judged_losses(study, arm, seed, epochs)[str(split)]
        theirs = judged_losses(study, baseline, seed, epochs)[str(split)]
        rows.append(100.0 * (ours - theirs) / theirs.mean())
    return torch.stack(rows)


def retrain_task(study: Study, seed: int, group: str) -> None:
    profile = read_profile(study.folder / "profile.json")
    groups = {g.name: g for found, _ in study.retrainings(profile) for g in found}
    retrained_run(
        _short_training(study, profile), seed, groups.get(group), directory=study.folder / "retrained"
    )


def judge_task(study: Study, seed: int, arm: str, epochs: int) -> None:
    judged_losses(study, arm, seed, epochs)


def curve_task(study: Study, seed: int) -> list[float]:
    """`validation_curve`, kept in a file."""
    path = study.folder / f"curve-seed-{seed}.safetensors"
    if not path.exists():
        curve = torch.tensor(validation_curve(study, seed), dtype=torch.float64)
        write_atomically(path, save({"curve": curve}))
    found: list[float] = load_file(path)["curve"].tolist()
    return found


def curve_seeds() -> range:
    """Seeds that choose the number of epochs."""
    return range(FIRST_PLANNING_SEED, FIRST_PLANNING_SEED + EPOCH_SEEDS)
