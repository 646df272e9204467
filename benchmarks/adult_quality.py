"""What tensorwise FP8 everywhere costs a small DCN-V2 on Adult, where the cost sits, and a plan without it.

    python benchmarks/adult_quality.py --scratch FOLDER --out OUT [--movielens data/ml-100k] [--workers N]

The model: embeddings of width 16 and the dense features side by side into two cross layers, a deep part of
256-128 beside them, an FP32 output layer. `naive` runs every wide product in tensorwise FP8 with dynamic
scales, E4M3 forward and E5M2 gradients, emulated; `planned` is what `make_plan` gives under
`Requirement(max_loss_increase=2e-4)` from a profile with measured errors and changes of the loss: those of
the forward on the frozen model (Probe's `evaluate`), those of groups of passes by short paired retraining.

Nothing is chosen on test rows: groups are retrained on seeds 1000.. and judged on validation rows, the number
of epochs is the one with the least validation loss of bf16 on seeds 1000-1002, and the plan follows from
these. The test rows and the seeds 0.. only judge. Every run leaves a file in FOLDER and is not done again.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from loka.artifacts import Plan, Profile, read_plan, read_profile, write_benchmark, write_plan, write_profile
from loka.dispatch import apply_plan, make_plan
from loka.numerics.intervals import Interval, mean_interval
from loka.probe import Probe
from loka.probe.pass_groups import PassGroup, pass_groups
from loka.probe.retraining import (
    BASELINE,
    GroupEffect,
    add_loss_changes,
    retrain_effects,
    retrained_run,
)
from loka.recsys import Batch, Schema, Source, Split, TrainConfig, Trainer, open_source
from loka.recsys.evaluation.metrics import log_loss_rows
from loka.recsys.job.coverage import coverage_of
from loka.recsys.models.base import RecModel, TowerConfig
from loka.recsys.models.dcnv2 import CrossLayer
from loka.recsys.models.layers import MLP, LogitHead, initialize
from loka.recsys.pairs.groups import loss_per_row, ran_in, switched_plan, train_by_group
from loka.recsys.pairs.paired import run_arm
from loka.recsys.training.config import ComputeDtype
from loka.recsys.training.predict import forward
from loka.vocab import RECIPES, Pass, Requirement

NAIVE = RECIPES["tensorwise_hybrid"]
REQUIREMENT = Requirement(max_loss_increase=2e-4)
ARMS = ("bf16", "fp32", "naive", "planned")
FIRST_PLANNING_SEED = 1000
EPOCH_SEEDS = 3


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


class HeldSource:
    """A source whose batches are made once and held in memory."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.name, self.schema, self.skipped = source.name, source.schema, source.skipped
        self._held: dict[tuple[Split, int], list[Batch]] = {}

    def batches(self, split: Split, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        key = (split, batch_size)
        if key not in self._held:
            self._held[key] = list(self._source.batches(split, batch_size))
        return iter(self._held[key][skip:])

    def rows(self, split: Split) -> int | None:
        return self._source.rows(split)

    def identity(self) -> dict[str, str | int | float]:
        return self._source.identity()


@dataclass(frozen=True, slots=True)
class Study:
    """One data set and how much is done on it.

    Attributes:
        name: Of the folder and the metrics.
        data: As `open_source` takes it.
        scratch: Where runs are kept.
        max_epochs: Epochs that may be chosen.
        short_epochs: Of a retraining.
        planning_seeds: Seeds of the retrainings.
        judging_seeds: Seeds of the verdict.
        by_block: Retrain groups by block as well.
    """

    name: str
    data: str
    scratch: Path
    max_epochs: int
    short_epochs: int
    planning_seeds: int
    judging_seeds: int
    by_block: bool

    @property
    def folder(self) -> Path:
        return self.scratch / self.name

    def config(self, *, epochs: int, dtype: ComputeDtype) -> TrainConfig:
        return TrainConfig(
            batch_size=512, epochs=epochs, dtype=dtype, eval_batch_size=4096, checkpoint_every_s=None
        )

    @property
    def seeds(self) -> range:
        return range(FIRST_PLANNING_SEED, FIRST_PLANNING_SEED + self.planning_seeds)

    def groups(self, profile: Profile) -> tuple[PassGroup, ...]:
        found = pass_groups(profile.sites.sites(), NAIVE, ran=ran_in(profile))
        return found if self.by_block else tuple(g for g in found if "@" not in g.name)


@functools.lru_cache(maxsize=4)
def held(data: str) -> HeldSource:
    """The source, once a process."""
    return HeldSource(open_source(data))


# --- what is learned on the training and validation rows ------------------------------------------------


def observe(study: Study) -> Profile:
    """Train once in bf16 with Probe: errors of every recipe, and the forward's changes of the loss."""
    path = study.folder / "profile.json"
    if path.exists():
        return read_profile(path)
    source, seed = held(study.data), FIRST_PLANNING_SEED
    config = study.config(epochs=study.max_epochs, dtype=ComputeDtype.BF16).with_seed(seed)
    model = build(source.schema, seed)
    batches = list(source.batches(Split.VALID, 512))
    probe = Probe(model, every=20, seed=seed, evaluate=_evaluate, batches=batches)
    trainer = Trainer(model, source, config, after_step=lambda _: probe.step(), bar=False)
    with probe:
        trainer.train()
    profile = probe.profile()
    write_profile(path, profile)
    return profile


def _evaluate(model: nn.Module, batch: Batch) -> Tensor:
    labels = batch.labels
    logits = forward(model, batch, dtype=ComputeDtype.BF16, tasks=labels.shape[1])
    return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(1)


def validation_curve(study: Study, seed: int) -> list[float]:
    """Mean validation loss of bf16 after each epoch."""
    source = held(study.data)
    config = study.config(epochs=study.max_epochs, dtype=ComputeDtype.BF16).with_seed(seed)
    steps = sum(1 for _ in source.batches(Split.TRAIN, config.batch_size))
    losses: list[float] = []

    def after_step(step: Any) -> None:
        if step.step % steps == 0:
            predictions = trainer.evaluate(Split.VALID)
            losses.append(float(log_loss_rows(predictions.logits, predictions.labels).mean()))

    trainer = Trainer(build(source.schema, seed), source, config, after_step=after_step, bar=False)
    trainer.train()
    return losses


def plan_for(study: Study, profile: Profile) -> tuple[Plan, Profile, tuple[GroupEffect, ...]]:
    """The plan, the profile that it was made from, and what the groups cost."""
    groups = study.groups(profile)
    train = _short_training(study, profile)
    effects = retrain_effects(train, groups, study.seeds, directory=study.folder / "retrained")
    # The forward's cost is wanted by block, to leave what carries it in bf16; of the gradients, whole kinds.
    blocks = {p for p in Pass if any(g.name.startswith(f"{p}@") for g in groups)}
    taken = [
        g.name
        for g in groups
        if g.name.startswith("fwd@") or g.name in ("dgrad", "wgrad") or (g.name == "fwd" and not blocks)
    ]
    complete = add_loss_changes(profile, effects, groups=taken)
    write_profile(study.folder / "profile-with-loss.json", complete)
    plan = make_plan(complete, REQUIREMENT)
    write_plan(study.folder / "plan.json", plan)
    return plan, complete, effects


def _short_training(study: Study, profile: Profile) -> Callable[[int, PassGroup | None], Tensor]:
    source = held(study.data)
    config = study.config(epochs=study.short_epochs, dtype=ComputeDtype.FP32)
    return train_by_group(functools.partial(build, source.schema), source, config, profile=profile, bar=False)


# --- what judges ----------------------------------------------------------------------------------------


def judged_losses(study: Study, arm: str, seed: int, epochs: int) -> Tensor:
    """Losses of the test rows of one arm and seed, fp64 [R]."""
    path = study.folder / "judged" / f"{arm}-seed-{seed}-epochs-{epochs}.safetensors"
    if path.exists():
        return load_file(path)["losses"]
    source = held(study.data)
    model = build(source.schema, seed)
    if arm == "planned":
        apply_plan(model, read_plan(study.folder / "plan.json"))
    elif arm == "naive":
        profile = read_profile(study.folder / "profile.json")
        apply_plan(model, naive_plan(profile))
    dtype = ComputeDtype.FP32 if arm == "fp32" else ComputeDtype.BF16
    config = study.config(epochs=epochs, dtype=dtype).with_seed(seed)
    run = run_arm(model, source, config, arm=arm, bar=False)
    losses = loss_per_row(run.predictions[Split.TEST])
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"losses": losses}, path)
    return losses


def naive_plan(profile: Profile) -> Plan:
    """Tensorwise FP8 in every pass of every wide site."""
    groups = pass_groups(profile.sites.sites(), NAIVE, ran=ran_in(profile))
    switches = [switch for group in groups if "@" not in group.name for switch in group.switches]
    return switched_plan(profile, switches, note="tensorwise FP8 everywhere")


def changes(study: Study, arm: str, baseline: str, epochs: int) -> list[float]:
    """Relative change of the test loss, and so of NE, in percent, for each judging seed."""
    pairs = (
        (judged_losses(study, arm, seed, epochs).mean(), judged_losses(study, baseline, seed, epochs).mean())
        for seed in range(study.judging_seeds)
    )
    return [100.0 * float(a / b - 1.0) for a, b in pairs]


# --- many processes -------------------------------------------------------------------------------------


def _retrain_task(study: Study, seed: int, group: str) -> None:
    profile = read_profile(study.folder / "profile.json")
    groups = {g.name: g for g in study.groups(profile)}
    retrained_run(
        _short_training(study, profile), seed, groups.get(group), directory=study.folder / "retrained"
    )


def _judge_task(study: Study, seed: int, arm: str, epochs: int) -> None:
    judged_losses(study, arm, seed, epochs)


def spread(workers: int, function: Callable[..., None], tasks: Iterable[tuple[Any, ...]]) -> None:
    """Do the tasks in `workers` processes; with one, in this process."""
    if workers == 1:
        for task in tasks:
            function(*task)
            print("done", function.__name__, *task[1:], flush=True)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        for future in [pool.submit(function, *task) for task in tasks]:
            future.result()


def _one_thread() -> None:
    torch.set_num_threads(1)


# --- the record -----------------------------------------------------------------------------------------


def run_study(study: Study, *, workers: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Everything on one data set: metrics without the study's name, and details."""
    study.folder.mkdir(parents=True, exist_ok=True)
    profile = observe(study)
    groups = [BASELINE, *(g.name for g in study.groups(profile))]
    spread(workers, _retrain_task, [(study, seed, group) for seed in study.seeds for group in groups])
    plan, complete, effects = plan_for(study, profile)
    curves = _curves(study)
    means = [sum(values) / len(values) for values in zip(*curves, strict=True)]
    epochs = min(range(len(means)), key=means.__getitem__) + 1
    spread(
        workers,
        _judge_task,
        [(study, seed, arm, epochs) for seed in range(study.judging_seeds) for arm in ARMS],
    )
    by_arm = {arm: changes(study, arm, "bf16", epochs) for arm in ("naive", "planned")}
    by_arm["fp32"] = changes(study, "fp32", "bf16", epochs)
    coverage = coverage_of(plan, complete)
    flops = sum(part.gemm_flops for part in coverage)
    metrics: dict[str, float] = {
        "planned_fp8_share_of_flops": 100.0 * sum(p.gemm_flops_fp8 for p in coverage) / flops,
        "epochs": epochs,
        "pairs": study.judging_seeds,
    }
    for arm, values in by_arm.items():
        metrics |= _interval_metrics(arm, mean_interval(values))
    for effect in effects:
        metrics |= _effect_metrics(effect)
    for part in coverage:
        metrics[f"planned_fp8_share_of_flops@{part.gemm_pass}"] = (
            100.0 * part.gemm_flops_fp8 / part.gemm_flops
        )
    details = {
        "train": study.config(epochs=epochs, dtype=ComputeDtype.BF16).identity(),
        "retrained": study.config(epochs=study.short_epochs, dtype=ComputeDtype.FP32).identity(),
        "planning_seeds": list(study.seeds),
        "validation_loss_by_epoch": curves,
        "changes_percent": by_arm,
        "groups": [_effect_row(effect) for effect in effects],
        "loss_table": complete.loss,
        "plan": _plan_rows(plan),
        "predicted": plan.predicted,
    }
    return metrics, details


def _curves(study: Study) -> list[list[float]]:
    path = study.folder / "curves.safetensors"
    if not path.exists():
        seeds = range(FIRST_PLANNING_SEED, FIRST_PLANNING_SEED + EPOCH_SEEDS)
        curves = torch.tensor([validation_curve(study, seed) for seed in seeds], dtype=torch.float64)
        save_file({"curves": curves}, path)
    found: list[list[float]] = load_file(path)["curves"].tolist()
    return found


def _interval_metrics(name: str, interval: Interval) -> dict[str, float]:
    return {f"{name}_mean": interval.mean, f"{name}_ci_low": interval.low, f"{name}_ci_high": interval.high}


def _effect_metrics(effect: GroupEffect) -> dict[str, float]:
    name = effect.group.name
    if effect.interval is None:
        return {f"group_diverged@{name}": effect.diverged}
    i = effect.interval
    return {
        f"group_mean@{name}": 100 * i.mean,
        f"group_ci_low@{name}": 100 * i.low,
        f"group_ci_high@{name}": 100 * i.high,
        f"group_se@{name}": 100 * effect.se,
    }


def _effect_row(effect: GroupEffect) -> dict[str, Any]:
    finite = effect.interval is not None
    return {
        "group": effect.group.name,
        "passes": [f"{s.site}:{s.pass_}" for s in effect.group.switches],
        "recipe": effect.group.switches[0].recipe.key,
        "changes_percent": [100 * change for change in effect.changes] if finite else None,
        "se_seeds_percent": 100 * effect.se_seeds if finite else None,
        "se_rows_percent": 100 * effect.se_rows if finite else None,
        "diverged": effect.diverged,
    }


def _plan_rows(plan: Plan) -> list[dict[str, str]]:
    return [
        {"site": site.name, "pass": str(pass_), "kernel": choice.kernel, "reason": choice.reason}
        for site in plan.sites
        for pass_ in Pass
        for choice in site.choices(pass_)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scratch", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--movielens", type=Path, help="MovieLens-100k as scripts/fetch_movielens.py puts it")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    _one_thread()
    adult = Study("adult", "adult", args.scratch, 4, 2, 20, 40, by_block=True)
    studies = [adult]
    if args.movielens is not None:
        data = f"movielens:{args.movielens}"
        studies.append(Study("movielens", data, args.scratch, 2, 1, 20, 10, by_block=False))
    metrics: dict[str, float] = {}
    details: dict[str, Any] = {}
    for study in studies:
        found, more = run_study(study, workers=args.workers)
        prefix = "" if study is adult else f"{study.name}_"
        metrics |= {prefix + name: value for name, value in found.items()}
        details[study.name] = more
        write_benchmark(args.out / "adult_quality.json", metrics, details)
    for name, value in metrics.items():
        print(f"{name:48} {value:.5g}")


if __name__ == "__main__":
    main()
