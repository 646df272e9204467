"""What the loss feels: estimates from gradients against direct trials, on reference models that were trained.

    python benchmarks/loss_prediction.py [--device cuda] [--rows 200000] [--only wukong:synthetic]

Three models are trained: Wukong and DCN-V2 on the synthetic click log, DCN-V2 on Adult. For each linear the
change of NE when its forward is switched is estimated (`row_scores`) and measured (`direct_changes`) on the
same held-out rows. The switches are coarser than any FP8 format, so that effects stand out of the rows'
noise: both operands rounded to one explicit mantissa bit, and to none; what does stand out is ranked. Then
whole plans in real formats: predicted from some held-out batches, measured on the others. The batches take
turns, because the synthetic log drifts with time and its two held-out stretches are no sample of one another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.probe.sensitivity import (
    Switch,
    direct_changes,
    joint_change,
    predicted_joint,
    row_scores,
)
from loka.recsys import TrainConfig
from loka.recsys.batch import Batch
from loka.recsys.data.registry import open_source
from loka.recsys.evaluation.metrics import log_loss_rows
from loka.recsys.models.base import RecModel
from loka.recsys.models.registry import build_model, model_config
from loka.recsys.source import Source, Split
from loka.recsys.training.config import ComputeDtype
from loka.recsys.training.trainer import Trainer
from loka.sites import plannable_linears
from loka.vocab import NARROW, RECIPES, Format, Granularity, OperandSpec, ProductRecipe

STANDARD_ERRORS = 3.0  # what an effect must exceed to be ranked
_BATCH_ROWS = 4096
Rows = tuple[Tensor, Tensor, Tensor]  # dense features, embeddings, labels


@dataclass(frozen=True, slots=True)
class Coarse:
    """Both operands rounded to few mantissa bits, products and sums in FP32: no format that exists."""

    mantissa_bits: int

    @property
    def spec_a(self) -> str:
        return f"m{self.mantissa_bits}"

    @property
    def spec_b(self) -> str:
        return self.spec_a

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = _rounded(x, self.mantissa_bits) @ _rounded(w, self.mantissa_bits).t()
            return (y if bias is None else y + bias.float()).to(out_dtype)


def _rounded(t: Tensor, mantissa_bits: int) -> Tensor:
    fraction, exponent = torch.frexp(t.detach().float())  # 0.5 <= |fraction| < 1
    steps = 2.0 ** (mantissa_bits + 1)
    return torch.ldexp((fraction * steps).round() / steps, exponent)


COARSE = (Coarse(1), Coarse(0))
E5M2 = ProductRecipe(
    OperandSpec.of(Format.E5M2, Granularity.TENSORWISE), OperandSpec.of(Format.E5M2, Granularity.TENSORWISE)
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its data and how it is trained.

    Attributes:
        name: `model:data`.
        source: As `--data` takes it; `{rows}` is replaced by all rows of the log.
        overrides: Of the model's tiny preset.
        train: How to train.
    """

    name: str
    source: str
    overrides: Mapping[str, Any]
    train: TrainConfig

    @property
    def model(self) -> str:
        return self.name.partition(":")[0]


CASES = (
    Case(
        "wukong:synthetic",
        "synthetic?rows={rows}",
        {"layers": 3, "fmb_hidden": 128, "top": (128,)},
        TrainConfig(max_rows=200_000),
    ),
    Case(
        "dcnv2:synthetic",
        "synthetic?rows={rows}",
        {"cross_layers": 3, "deep": (128, 64, 64)},
        TrainConfig(max_rows=200_000),
    ),
    Case(
        "dcnv2:adult",
        "adult",
        {"cross_layers": 2, "deep": (256, 128)},
        TrainConfig(batch_size=512, epochs=4),
    ),
)


class Embedded:
    """Held-out rows after their lookups, which no switch changes: read once, kept on the device.

    Args:
        model: Its embeddings are used.
        source: Where the rows come from.
        split: Which rows.
        rows: At most so many.
        device: Where they are kept.
    """

    def __init__(
        self, model: RecModel, source: Source, split: Split, *, rows: int, device: torch.device
    ) -> None:
        self.batches: list[Rows] = []
        left = rows
        with torch.no_grad():
            for batch in source.batches(split, min(_BATCH_ROWS, rows)):
                if left <= 0:
                    break
                self.batches.append(self._looked_up(model, batch.to(device)))
                left -= len(batch)

    def __iter__(self) -> Iterator[Rows]:
        return iter(self.batches)

    @property
    def rows(self) -> int:
        return sum(len(labels) for _, _, labels in self.batches)

    @staticmethod
    def _looked_up(model: RecModel, batch: Batch) -> Rows:
        return batch.dense, model.embeddings(batch.ids), batch.labels


def row_loss(dtype: ComputeDtype) -> Callable[[Any, Rows], Tensor]:
    def evaluate(tower: nn.Module, batch: Rows) -> Tensor:
        dense, embedded, labels = batch
        with torch.autocast(dense.device.type, dtype=torch.bfloat16, enabled=dtype is ComputeDtype.BF16):
            logits = tower(dense, embedded)
        return log_loss_rows(logits, labels).mean(dim=1)

    return evaluate


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: Pearson's of the ranks, ties sharing the mean of theirs; NaN for fewer than two."""
    if len(x) < 2:
        return math.nan
    ranks = torch.stack([_ranks(x), _ranks(y)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> Tensor:
    v = torch.tensor(values, dtype=torch.float64)
    return (v[:, None] > v[None, :]).sum(1) + ((v[:, None] == v[None, :]).sum(1) - 1) / 2.0


def measure(
    device: str | torch.device = "cpu", *, rows: int = 200_000, only: str = "", seed: int = 0
) -> dict[str, float]:
    """Train, estimate, try, compare.

    Args:
        device: Where to train and evaluate.
        rows: Held-out rows of the synthetic log for the comparison of sites; as many again for plans. Of
            Adult the whole test split is taken in any case.
        only: One case by name; all when empty.
        seed: Of the models' initial weights.

    Returns:
        Metrics by name: over all switches whose direct effect exceeds three standard errors (at
        `loss_prediction_sites@fwd` sites) the rank correlation of estimate and trial,
        `loss_prediction_rank_correlation@fwd`; the same for a prediction from the error of the product alone
        (`loss_prediction_error_only_...`); both for each case too; and `joint_within_2se`: of four whole
        plans those whose measured change lies within two standard errors of the predicted one, the least
        over the models.
    """
    return measured(device, rows=rows, only=only, seed=seed)[0]


def measured(
    device: str | torch.device = "cpu", *, rows: int = 200_000, only: str = "", seed: int = 0
) -> tuple[dict[str, float], dict[str, Any]]:
    """The metrics of `measure`, and a table for each case."""
    where = torch.device(device)
    metrics: dict[str, float] = {}
    details: dict[str, Any] = {}
    ranked: list[dict[str, Any]] = []
    within: list[int] = []
    for case in CASES:
        if only and case.name != only:
            continue
        started = time.perf_counter()
        sites, plans, about = _run(case, where, rows, seed)
        visible = [s for s in sites if abs(s["direct"]) > STANDARD_ERRORS * s["direct_se"]]
        ranked += visible
        # Adult's splits are too small to tell plans apart; they are in the details.
        if not case.source.startswith("adult"):
            within.append(sum(p["within_2se"] for p in plans))
            metrics[f"joint_within_2se@{case.name}"] = float(within[-1])
            for plan in plans:
                for value in ("predicted", "predicted_se", "measured", "measured_se"):
                    metrics[f"joint_{value}@{case.name}.{plan['plan']}"] = plan[value]
                own = plan["predicted_on_the_measured_rows"]
                metrics[f"joint_predicted_on_the_measured_rows@{case.name}.{plan['plan']}"] = own
        metrics |= _correlations(visible, case.name)
        metrics[f"loss_prediction_rows@{case.name}"] = float(about["rows"])
        metrics[f"estimate_speedup_over_trials@{case.name}"] = about["direct_s"] / about["scores_s"]
        details[case.name] = {"sites": sites, "plans": plans, **about}
        details[case.name]["seconds"] = time.perf_counter() - started
    metrics |= _correlations(ranked, "fwd")
    if within:
        metrics["joint_within_2se"] = float(min(within))
    return {name: value for name, value in metrics.items() if math.isfinite(value)}, details


def _correlations(sites: list[dict[str, Any]], name: str) -> dict[str, float]:
    direct = [s["direct"] for s in sites]
    return {
        f"loss_prediction_rank_correlation@{name}": rank_correlation([s["estimate"] for s in sites], direct),
        f"loss_prediction_error_only_rank_correlation@{name}": rank_correlation(
            [s["relative_error"] for s in sites], direct
        ),
        f"loss_prediction_sites@{name}": float(len({(s["case"], s["site"]) for s in sites})),
        f"loss_prediction_switches@{name}": float(len(sites)),
    }


def _run(
    case: Case, where: torch.device, rows: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    # The splits of the synthetic log are stretches of time: 80 % train (of which the head is used), then a
    # tenth for prediction and a tenth for judging.
    source = open_source(case.source.format(rows=10 * rows))
    config = model_config(case.model, overrides=case.overrides)
    model = build_model(case.model, source.schema, seed=seed, config=config)
    train = TrainConfig(
        batch_size=case.train.batch_size,
        epochs=case.train.epochs,
        max_rows=case.train.max_rows,
        device=str(where),
        checkpoint_every_s=None,
    )
    began = time.perf_counter()
    Trainer(model, source, train, bar=False).train()
    trained = time.perf_counter()
    evaluate, tower = row_loss(train.dtype), model.tower
    test = Embedded(model, source, Split.TEST, rows=rows, device=where)
    valid = Embedded(model, source, Split.VALID, rows=rows, device=where)
    looked_up = time.perf_counter()
    names = list(plannable_linears(tower))
    scores = row_scores(tower, evaluate, test, dict.fromkeys(names, COARSE))
    if scores is None:
        raise RuntimeError("no gradient flows from the reference models' loss")
    scored = time.perf_counter()
    direct = direct_changes(tower, evaluate, test, [{name: switch} for name, switch in scores.pairs])
    tried = time.perf_counter()
    errors = {switch: _relative_errors(tower, evaluate, test.batches[0], switch) for switch in COARSE}
    sites = [
        {
            "case": case.name,
            "site": name,
            "switch": switch.spec_a,
            "estimate": scores.change([i]).delta,
            "direct": direct.change(i).delta,
            "direct_se": direct.change(i).se,
            "second_order": scores.second(i),
            "relative_error": errors[switch][name],
        }
        for i, (name, switch) in enumerate(scores.pairs)
        if isinstance(switch, Coarse)
    ]
    about = {
        "rows": test.rows,
        "loss": float(scores.losses.mean()),
        "curvature": scores.basis,
        "train_s": trained - began,
        "read_s": looked_up - trained,
        "scores_s": scored - looked_up,
        "direct_s": tried - scored,
    }
    turns = [batch for pair in itertools.zip_longest(valid, test) for batch in pair if batch is not None]
    return sites, _plans(tower, evaluate, turns[0::4] + turns[1::4], turns[2::4] + turns[3::4]), about


def _plans(
    tower: nn.Module, evaluate: Callable[[Any, Any], Tensor], probe: list[Rows], others: list[Rows]
) -> list[dict[str, Any]]:
    """Whole plans at every site that is wide enough: predicted on the one part, measured on the other.

    The prediction for the other part stands beside it: what of a difference is the method's, not the rows'.
    """
    wide = [n for n, m in plannable_linears(tower).items() if min(m.weight.shape) >= NARROW]
    tensorwise, rowwise = RECIPES["tensorwise"].fwd, RECIPES["rowwise"].fwd
    cycle = (E5M2, rowwise, tensorwise, None)
    mixed = {n: s for i, n in enumerate(wide) if (s := cycle[i % 4]) is not None}
    plans: dict[str, Mapping[str, Switch]] = {
        "tensorwise": dict.fromkeys(wide, tensorwise),
        "rowwise": dict.fromkeys(wide, rowwise),
        "e5m2": dict.fromkeys(wide, E5M2),
        "mixed": mixed,
    }
    recipes = {n: [tensorwise, rowwise, E5M2] for n in wide}
    scores = row_scores(tower, evaluate, probe, recipes)
    same_rows = row_scores(tower, evaluate, others, recipes)
    if scores is None or same_rows is None:
        raise RuntimeError("no gradient flows from the reference models' loss")
    found = []
    for name, plan in plans.items():
        predicted = predicted_joint(scores, plan)
        measured_ = joint_change(tower, evaluate, others, plan)
        se = math.hypot(predicted.se, measured_.se)
        found.append(
            {
                "plan": name,
                "sites": len(plan),
                "predicted": predicted.delta,
                "predicted_se": predicted.se,
                "measured": measured_.delta,
                "measured_se": measured_.se,
                "predicted_on_the_measured_rows": predicted_joint(same_rows, plan).delta,
                "within_2se": abs(predicted.delta - measured_.delta) <= 2 * se,
            }
        )
    return found


def _relative_errors(
    tower: nn.Module, evaluate: Callable[[Any, Any], Tensor], batch: Any, product: Coarse
) -> dict[str, float]:
    """Relative L2 error of each site's product on one batch: what per-site error alone would rank by."""
    found: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Linear, args: tuple[Tensor, ...], out: Tensor) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            exact = nn.functional.linear(x.float(), module.weight.float())
            wrong = product(x, module.weight, None, out_dtype=torch.float32)
            found[name] = float((wrong - exact).norm() / exact.norm())

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in plannable_linears(tower).items()]
    try:
        with torch.no_grad():
            evaluate(tower, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--only", default="", choices=["", *(case.name for case in CASES)])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    metrics, details = measured(args.device, rows=args.rows, only=args.only, seed=args.seed)
    print(json.dumps({"metrics": metrics, "details": details}, indent=1))


if __name__ == "__main__":
    main()
