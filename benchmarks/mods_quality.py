"""What the Mods do to a model's loss and to what its products multiply, on Adult and MovieLens.

    python benchmarks/mods_quality.py --scratch FOLDER --out OUT [--movielens FOLDER] [--seeds N]

A small Wukong (two layers, hidden width 512, so that a row holds several blocks of every size) is trained
from the same weights on the same rows, as it is (LayerNorm, x * sigmoid(LayerNorm(x)), biases) and with Mods:
each alone, each pair, all three with blocks of 64, 128, 256 and 512, and all three with whole rows for
blocks, which is RMSNorm. Metrics: the relative change of NE on test rows against the model as it is, and of
BlockNorm against RMSNorm, in percent, with the 90 % interval over seeds; `*_se_rows` says how far other rows
would move it.

What Probe sees: of each variant, trained once with Probe, how the largest magnitudes of products' inputs and
gradients grow from the first to the last quarter of the training, the largest norm of a bias, and the SQNR of
tensorwise and rowwise FP8 in the products of the MLPs. Every run leaves a file in FOLDER.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from adult_quality import spread
from adult_study import Dense, HeldSource
from loka.artifacts import write_atomically, write_benchmark
from loka.mods import UseBlockNorm, apply_mods
from loka.numerics.intervals import mean_interval
from loka.probe import Probe
from loka.recsys import Split, TrainConfig, Trainer, open_source
from loka.recsys.models.base import RecModel
from loka.recsys.models.layers import initialize
from loka.recsys.models.wukong import WukongConfig, WukongTower
from loka.recsys.pairs.groups import loss_per_row
from loka.recsys.pairs.paired import run_arm
from loka.recsys.training.config import ComputeDtype
from loka.vocab import Operand, Pass

SIZES = WukongConfig(
    dim=16, bottom=(64,), layers=2, rank=16, fmb_hidden=512, fmb_outputs=8, lcb_outputs=8, top=(512,)
)
PLAIN, RMS = "plain", "all.rms"
BLOCKS = (64, 128, 256, 512)
_NAMES = ("no_bias", "block_norm", "hard_swish")
FIRST_SEED = 100
SETTINGS = {"adult": (512, 2), "movielens": (512, 1)}  # rows a batch, epochs
RECIPES = ("e4m3.tensorwise", "e4m3.rowwise")

# By variant: what goes to `apply_mods` for all modules.
VARIANTS: dict[str, tuple[Any, ...]] = {
    PLAIN: (),
    **{"+".join(some): some for count in (1, 2) for some in combinations(_NAMES, count)},
    **{f"all.{block}": ("no_bias", UseBlockNorm(block), "hard_swish") for block in BLOCKS},
    RMS: ("no_bias", UseBlockNorm(1, whole_rows=True), "hard_swish"),
}


@functools.lru_cache(maxsize=2)
def source_of(data: str, name: str) -> HeldSource:
    return HeldSource(open_source(data), Dense.STANDARDISED, again=name == "adult")


def build(source: HeldSource, variant: str, seed: int) -> RecModel:
    """The model of a seed; what two variants have in common starts from the same weights."""
    schema = source.schema
    with torch.device("meta"):
        tower = WukongTower(
            SIZES, dense_features=len(schema.dense), fields=len(schema.fields), tasks=len(schema.tasks)
        )
        model = RecModel(schema, SIZES, tower)
    if VARIANTS[variant]:
        apply_mods(model, {"*": VARIANTS[variant]})
    model.to_empty(device="cpu")
    initialize(model, seed=seed)
    return model


def config_of(name: str, seed: int) -> TrainConfig:
    rows, epochs = SETTINGS[name]
    return TrainConfig(
        batch_size=rows,
        epochs=epochs,
        dtype=ComputeDtype.BF16,
        seed=seed,
        eval_batch_size=4096,
        checkpoint_every_s=None,
    )


def judge(folder: Path, data: str, name: str, variant: str, seed: int) -> Tensor:
    """Loss of every test row after training, fp64 [R]; kept in a file."""
    path = folder / name / f"{variant}-seed-{seed}.safetensors"
    if not path.exists():
        source = source_of(data, name)
        run = run_arm(build(source, variant, seed), source, config_of(name, seed), arm=variant, bar=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, save({"losses": loss_per_row(run.predictions[Split.TEST])}))
    return load_file(path)["losses"]


def judge_task(folder: Path, data: str, name: str, variant: str, seed: int) -> None:
    judge(folder, data, name, variant, seed)


def changes(folder: Path, data: str, name: str, pair: tuple[str, str], seeds: Sequence[int]) -> Tensor:
    """Change of each row's loss in units of the second's mean, percent, fp64 [seeds, R]."""
    rows = []
    for seed in seeds:
        ours, theirs = (judge(folder, data, name, variant, seed) for variant in pair)
        rows.append(100.0 * (ours - theirs) / theirs.mean())
    return torch.stack(rows)


def compared(folder: Path, data: str, name: str, seeds: Sequence[int]) -> dict[str, float]:
    """Every variant against the plain model, and blocks against whole rows."""
    pairs = {f"{variant}@{name}": (variant, PLAIN) for variant in VARIANTS if variant != PLAIN}
    pairs |= {f"all.{block}_vs_rms@{name}": (f"all.{block}", RMS) for block in BLOCKS}
    metrics: dict[str, float] = {}
    for key, pair in pairs.items():
        change = changes(folder, data, name, pair, seeds)
        interval = mean_interval(change.mean(dim=1).tolist())
        for part, value in (("mean", interval.mean), ("ci_low", interval.low), ("ci_high", interval.high)):
            metrics[f"relative_ne_{part}@{key}"] = value
        metrics[f"relative_ne_se_rows@{key}"] = float(change.mean(dim=0).std()) / math.sqrt(change.shape[1])
    return metrics


def observe_task(folder: Path, data: str, name: str, variant: str) -> None:
    observed(folder, data, name, variant)


def observed(folder: Path, data: str, name: str, variant: str) -> dict[str, float]:
    """What Probe sees in one training of a variant; kept in a file."""
    path = folder / name / f"{variant}-observed.safetensors"
    if not path.exists():
        source = source_of(data, name)
        model = build(source, variant, FIRST_SEED)
        probe = Probe(model, every=4, live_every=3, max_overhead=None)
        config = config_of(name, FIRST_SEED)
        trainer = Trainer(model, source, config, after_step=lambda _: probe.step(), bar=False)
        with probe:
            trainer.train()
        found = {key: torch.tensor(value, dtype=torch.float64) for key, value in _seen(probe, model).items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, save(found))
    return {key: float(value) for key, value in load_file(path).items()}


def _seen(probe: Probe, model: nn.Module) -> dict[str, float]:
    found: dict[str, float] = {}
    for operand in (Operand.INPUT, Operand.GRAD_OUTPUT):
        growth = [
            _growth(known[operand].history.values())
            for known in probe.statistics.values()
            if operand in known and len(known[operand].history.steps) > 3
        ]
        found[f"amax_growth_worst@{operand}"] = max(growth)
        found[f"amax_growth_geomean@{operand}"] = math.exp(sum(map(math.log, growth)) / len(growth))
    biases = [m.bias for m in model.modules() if isinstance(m, nn.Linear) and m.bias is not None]
    found["bias_norm_worst"] = max(float(bias.detach().norm()) for bias in biases)
    table = probe.errors
    for recipe in RECIPES:
        for pass_ in (Pass.FWD, Pass.DGRAD):
            found[f"sqnr_db@{pass_}.{recipe}"] = _mean(
                [
                    db
                    for site, p, a, db in zip(
                        table.site, table.pass_, table.spec_a, table.sqnr_db, strict=True
                    )
                    if p is pass_ and a == recipe and (".fmb." in site or ".top." in site)
                ]
            )
    return found


def _growth(amax: Tensor) -> float:
    """Mean of the last quarter over that of the first."""
    quarter = max(1, len(amax) // 4)
    return float(amax[-quarter:].mean() / amax[:quarter].mean())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scratch", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--movielens", type=Path, help="MovieLens-100k as scripts/fetch_movielens.py puts it")
    parser.add_argument("--seeds", type=int, default=40, help="pairs")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    studies = {"adult": "adult"}
    if args.movielens is not None:
        studies["movielens"] = f"movielens:{args.movielens}"
    seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
    metrics: dict[str, float] = {"seeds": len(seeds)}
    for name, data in studies.items():
        spread(args.workers, observe_task, [(args.scratch, data, name, variant) for variant in VARIANTS])
        tasks = [(args.scratch, data, name, variant, seed) for seed in seeds for variant in VARIANTS]
        spread(args.workers, judge_task, tasks)
        metrics |= compared(args.scratch, data, name, seeds)
        for variant in VARIANTS:
            seen = observed(args.scratch, data, name, variant)
            metrics |= {f"{key}@{variant}@{name}": value for key, value in seen.items()}
        details = {
            "train": {n: replace(config_of(n, 0)).identity() for n in studies},
            "variants": {v: [str(mod) for mod in mods] for v, mods in VARIANTS.items()},
            "sizes": str(SIZES),
        }
        write_benchmark(args.out / "mods_quality.json", metrics, details)
    for key, value in metrics.items():
        print(f"{key:64} {value:.5g}")


if __name__ == "__main__":
    main()
