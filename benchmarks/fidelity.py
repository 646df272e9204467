"""How well drawn operands predict the error of real ones.

    python benchmarks/fidelity.py [--device cpu] [--seed 0] [--out fidelity.json]

Trains DCN-V2 on Adult and Wukong on the synthetic click log with raw dense features (heavy tails up to 1.6
million), the latter also with hard swish in place of its activation. Early and late in training the weights
are held still for a look: statistics are learned on training batches, the error of every recipe at every
linear is measured on real operands of held-out batches, pooled over them, and compared with predictions by

    live        real rows of the training batches
    trailing    real rows of the observed training steps before the look, while the weights moved
    copula      rows drawn from the elliptical copula, the model's own weights
    mvn         rows drawn from the multivariate normal, the model's own weights
    published   rows drawn from the multivariate normal, weights from the matrix normal
    normal      rows of independent normal features, the model's own weights
    other       real rows of as many batches of a third split: what a perfect model of the rows would reach

The figure of merit is |predicted SQNR - real SQNR| in dB, over (site, recipe). SQNR is pooled as the profile
pools it, the mean in dB over batches or draws; `fidelity_of_sums_*` pools signals and noises instead, which a
few rows decide where features are heavy-tailed. A weight gradient is a mean that fluctuates from batch to
batch by itself; its spread over single batches stands beside it. `fidelity_percent_unsettled` is the share of
(site, recipe) whose real SQNR itself is known no better than to 0.5 dB (half its 90 % interval, from the
spread over the held-out batches): there a miss tells nothing. `@copula.fwd.settled` and its like leave those
out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fidelity_shares import QUANTILE_90, Record, metrics_of
from loka.artifacts import write_benchmark
from loka.kernels import device_of
from loka.numerics import OperandStatistics, amax_of, sqnr_db
from loka.probe.distributions import MatrixNormal
from loka.probe.live import Captured, live_errors, site_generator
from loka.probe.observer import Observer
from loka.probe.sampler import OperandModel, RowModel, row_model
from loka.probe.trial import Trial, trials_of
from loka.recsys import Batch, TrainConfig, Trainer, build_model, open_source
from loka.recsys.models.layers import NormSwish
from loka.recsys.models.registry import model_config
from loka.recsys.source import Source, Split
from loka.recsys.training.config import ComputeDtype
from loka.recsys.training.predict import forward
from loka.recsys.training.step import StepInfo, click_loss
from loka.sites import plannable_linears
from loka.vocab import NARROW, Granularity, Operand, Site

_FLIP_FLOPS = 4  # steps of the matrix normal at every look at the weight


@dataclass(frozen=True)
class Case:
    """One training: which model on which rows, and after how many steps to look.

    Attributes:
        name: Of the case, in the details.
        model: Reference model.
        data: Source.
        batch: Rows a step.
        looks: Steps after which predictions are compared.
        batches: Training batches that a look learns from, and draws that it predicts with.
        observed: Observed training steps before a look.
        apart: Steps from one observed step to the next.
        hard_swish: Hard swish instead of x * sigmoid(LayerNorm(x)).
        overrides: Sizes of the model that differ from the preset `tiny`.
    """

    name: str
    model: str
    data: str
    batch: int
    looks: tuple[int, ...]
    batches: int = 8
    observed: int = 4
    apart: int = 8
    hard_swish: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def observes(self, step: int) -> bool:
        """Whether the step with this number (from 1) is observed."""
        return any(
            0 <= look - step < self.observed * self.apart and (look - step) % self.apart == 0
            for look in self.looks
        )


RAW = "synthetic?rows=200000&variant=raw"
SMALLER = {"rank": 8, "fmb_hidden": 128, "fmb_outputs": 8, "lcb_outputs": 8, "top": (128,)}


def cases_of(device: torch.device | str) -> tuple[Case, ...]:
    """The three trainings; on a CPU with a smaller Wukong and batch, and fewer batches to learn from."""
    gpu = torch.device(device).type == "cuda"
    rows, learned = (512, 24) if gpu else (256, 8)
    sizes = {} if gpu else SMALLER
    swish, hard = "wukong:synthetic_raw", "wukong_hard_swish:synthetic_raw"
    looks = (40, 200) if gpu else (200,)
    return (
        Case("dcnv2:adult", "dcnv2", "adult", rows, (40, 300), batches=learned),
        Case(swish, "wukong", RAW, rows, (40, 200), batches=learned, overrides=sizes),
        Case(hard, "wukong", RAW, rows, looks, batches=learned, hard_swish=True, overrides=sizes),
    )


@dataclass
class Learned:
    """What a look learned at one site."""

    trailing: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)
    operands: dict[Operand, OperandStatistics] = field(default_factory=dict)
    weights: MatrixNormal | None = None
    trials: list[Trial] = field(default_factory=list)


class Look:
    """Learns from observed training steps, then predicts and compares."""

    def __init__(self, case: Case, model: nn.Module, seed: int, held_out: int) -> None:
        self.case, self.model, self.seed, self.held_out = case, model, seed, held_out
        self.linears = plannable_linears(model)
        self.learned: dict[str, Learned] = defaultdict(Learned)
        self.observer = self._observer(self._trail)
        self.step = 0

    def _observer(self, on_captured: Callable[[str, Captured], None]) -> Observer:
        return Observer(self.linears, on_captured=on_captured, seed=self.seed, is_training=lambda: True)

    def trials(self, name: str, captured: Captured) -> list[Trial]:
        """Every FP8 recipe of the linear."""
        known = self.learned[name]
        if not known.trials:
            n, k = captured.w.shape
            site = Site(name, "linear", n, k, True, captured.x.shape[0])
            known.trials = [t for t in trials_of(site, device_of(captured.x.device)) if t.spec_a.is_quantized]
        return known.trials

    def _trail(self, name: str, captured: Captured) -> None:
        self.learned[name].trailing.append(self._errors(name, captured, f"trail/{self.step}"))
        weights = self.learned[name].weights or MatrixNormal(*captured.w.shape)
        weights.update(captured.w, steps=_FLIP_FLOPS)
        self.learned[name].weights = weights

    def _errors(self, name: str, captured: Captured, purpose: str) -> Tensor:
        generator = site_generator(self.seed, name, purpose)
        return live_errors(captured, self.trials(name, captured), generator)

    def learn(self, source: Source, first: int) -> None:
        """Statistics, and the errors of real rows, from training batches with numbers from `first` on."""
        batches = source.batches(Split.TRAIN, self.case.batch, skip=first)
        for name, captured in self.seen(source, islice(batches, self.case.batches)):
            known = self.learned[name]
            known.errors.append(self._errors(name, captured, f"live/{len(known.errors)}"))
            for operand, rows in ((Operand.INPUT, captured.x), (Operand.GRAD_OUTPUT, captured.g)):
                if rows is not None:
                    empty = OperandStatistics.empty(rows.shape[1], rows.device)
                    known.operands.setdefault(operand, empty).add(rows)

    def compare(self, source: Source, look: int, first: int) -> Iterator[Record]:
        """Learn, then real errors on held-out batches beside the predicted ones.

        Args:
            source: Rows.
            look: Number of the look's step.
            first: Number of the first training batch to learn from.
        """
        self.learn(source, first)
        real: dict[str, list[Tensor]] = defaultdict(list)
        seen: dict[str, Captured] = {}
        other: dict[str, list[Tensor]] = defaultdict(list)
        for split, errors, purpose in ((Split.TEST, other, "other"), (Split.VALID, real, "real")):
            batches = source.batches(split, self.case.batch)
            for name, captured in self.seen(source, islice(batches, self.held_out)):
                errors[name].append(self._errors(name, captured, f"{purpose}/{len(errors[name])}"))
                seen[name] = captured
        for name, captured in seen.items():
            known = self.learned[name]
            predicted = {"live": known.errors, "trailing": known.trailing} | self._predicted(name, captured)
            predicted["other"] = other[name]
            yield from self._records(name, look, real[name], predicted)
        self.learned.clear()

    def seen(self, source: Source, batches: Iterator[Batch]) -> Iterator[tuple[str, Captured]]:
        """What every linear sees in forward and backward of these batches; no weight changes."""
        where = next(self.model.parameters()).device
        captured: list[tuple[str, Captured]] = []
        observer = self._observer(lambda name, seen: captured.append((name, seen)))
        for number, batch in enumerate(batches):
            on_device = batch.to(where)
            observer.arm(number)
            logits = forward(self.model, on_device, dtype=ComputeDtype.BF16, tasks=len(source.schema.tasks))
            click_loss(logits, on_device.labels, on_device.weight).backward()
            observer.disarm()
            yield from captured
            captured.clear()
        self.model.zero_grad()

    def _predicted(self, name: str, real: Captured) -> dict[str, list[Tensor]]:
        known = self.learned[name]
        operands = known.operands
        out: dict[str, list[Tensor]] = defaultdict(list)
        for model in OperandModel:
            fitted = {
                operand: row_model(operands[operand], model=model)
                for operand in (Operand.INPUT, Operand.GRAD_OUTPUT)
                if operand in operands
            }
            for draw in range(len(known.errors)):
                generator = site_generator(self.seed, name, f"draw/{model}/{draw}")
                captured = self._drawn(operands, fitted, real, generator)
                out[str(model)].append(live_errors(captured, known.trials, generator))
                if model is OperandModel.MVN and known.weights is not None:
                    captured.w = known.weights.draw(generator).to(real.w.device)
                    out["published"].append(live_errors(captured, known.trials, generator))
        return out

    def _drawn(
        self,
        operands: dict[Operand, OperandStatistics],
        fitted: dict[Operand, RowModel],
        real: Captured,
        generator: torch.Generator,
    ) -> Captured:
        rows = real.x.shape[0]
        x = fitted[Operand.INPUT].draw(rows, generator)
        captured = Captured(x=x, w=real.w, x_amax=_amax(operands[Operand.INPUT], x), passes=real.passes)
        if Operand.GRAD_OUTPUT in fitted:
            captured.g = fitted[Operand.GRAD_OUTPUT].draw(rows, generator)
            captured.g_amax = _amax(operands[Operand.GRAD_OUTPUT], captured.g)
        return captured

    def _records(
        self, name: str, look: int, real: list[Tensor], predicted: dict[str, list[Tensor]]
    ) -> Iterator[Record]:
        for row, trial in enumerate(self.learned[name].trials):
            singles = [_db([batch], row) for batch in real]
            if not all(math.isfinite(s) for s in singles):
                continue
            yield Record(
                case=self.case.name,
                look=look,
                site=name,
                pass_=trial.pass_,
                recipe="*".join(trial.key[1:]),
                narrow=min(self.linears[name].weight.shape) < NARROW,
                real_db=statistics.fmean(singles),
                spread_db=statistics.stdev(singles),
                unsure_db=QUANTILE_90 * statistics.stdev(singles) / math.sqrt(len(singles)),
                predicted_db={
                    method: statistics.fmean(_db([v], row) for v in values) if values else math.nan
                    for method, values in predicted.items()
                },
                off_sums_db={
                    method: _db(values, row) - _db(real, row) for method, values in predicted.items()
                },
            )


def _amax(known: OperandStatistics, drawn: Tensor) -> Tensor:
    """As Probe takes it: the median of the observed batches, or that of the draw where it is larger."""
    return torch.maximum(known.history.values().median(), amax_of(drawn, Granularity.TENSORWISE))


def _db(batches: Sequence[Tensor], row: int) -> float:
    """Pooled SQNR of one recipe: signals and noises of the batches added up."""
    signal = sum(float(values[row, 0]) for values in batches)
    noise = sum(float(values[row, 1]) for values in batches)
    if not (math.isfinite(signal) and math.isfinite(noise) and signal > 0):
        return math.nan
    return sqnr_db(signal, noise)


def records(
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
    cases: Sequence[Case] | None = None,
    held_out: int | None = None,
) -> list[Record]:
    """Train every case and compare at every look.

    Args:
        device: Where.
        seed: Of weights, samples and draws.
        cases: Trainings; by default those of `cases_of`.
        held_out: Batches of each site's real error.
    """
    out: list[Record] = []
    if held_out is None:
        held_out = 24 if torch.device(device).type == "cuda" else 8
    for case in cases or cases_of(device):
        source = open_source(case.data)
        config = model_config(case.model, overrides=case.overrides)
        model = build_model(case.model, source.schema, config=config, seed=seed)
        if case.hard_swish:
            _swap_activation(model)
        out += _trained(case, model, source, torch.device(device), seed, held_out)
    return out


def _trained(
    case: Case, model: nn.Module, source: Source, device: torch.device, seed: int, held_out: int
) -> list[Record]:
    out: list[Record] = []

    def at_look(look: Look, step: int, first: int) -> None:
        out.extend(look.compare(source, step, first))

    train(Look(case, model.to(device), seed, held_out), source, at_look)
    return out


def train(look: Look, source: Source, at_look: Callable[[Look, int, int], None]) -> None:
    """Train the look's model; at every look call `at_look(look, step, first batch to learn from)`."""
    case = look.case
    config = TrainConfig(
        batch_size=case.batch,
        epochs=1000,
        max_rows=max(case.looks) * case.batch,
        seed=look.seed,
        device=str(next(look.model.parameters()).device),
        checkpoint_every_s=None,
    )
    an_epoch = -(-(source.rows(Split.TRAIN) or 1) // case.batch)

    def after_step(info: StepInfo) -> None:
        if case.observes(info.step):
            look.observer.disarm()
        if info.step in case.looks:
            at_look(look, info.step, max(info.step % an_epoch - case.batches, 0))
        if case.observes(info.step + 1):
            look.step = info.step + 1
            look.observer.arm(look.step)

    Trainer(look.model, source, config, after_step=after_step, bar=False).train()


def _swap_activation(model: nn.Module) -> None:
    """Hard swish for every x * sigmoid(LayerNorm(x)): exact zeros below -3."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, NormSwish):
                setattr(parent, name, nn.Hardswish())


def measure(
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
    cases: Sequence[Case] | None = None,
    held_out: int | None = None,
) -> dict[str, float]:
    """Fidelity of every method: percent of (site, recipe) within 0.5 and 1 dB by pass, medians, counts."""
    return metrics_of(records(device, seed=seed, cases=cases, held_out=held_out))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = records(args.device, seed=args.seed)
    metrics = metrics_of(found)
    print(json.dumps(metrics, indent=1))
    if args.out:
        details = {"records": [dict(vars(r), pass_=str(r.pass_)) for r in found]}
        write_benchmark(args.out, metrics, details)


if __name__ == "__main__":
    main()
