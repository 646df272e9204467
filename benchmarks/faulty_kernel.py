"""What learned inputs show and random normal ones hide: the published MERE table and a planted scale fault.

    python benchmarks/faulty_kernel.py [--device cpu] [--seed 0] [--out faulty_kernel.json]

Trains a Wukong on the synthetic click log with raw dense features and learns its statistics. Then, at every
linear:

- MERE of each kernel on random normal inputs and weights, and on learned inputs (copula) with the model's own
  weights; geometric mean over the linears, as published.
- A rowwise FP8 product with its decode scales put along the wrong axis, against the correct one, in forward
  and input gradient. `columns`: row m's scale multiplies column m. `channels`: output channel n's scale
  multiplies row n. Scales of normal rows hardly differ, so the fault hides; those of real rows differ by
  decades.

The separation is the faulty product's error over the correct one's. `fault_separation_*` is the largest over
the linears (a fault is found where one shows it) by MERE; `_rel_err` and `_geomean` stand beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fidelity import Case, Learned, Look, train
from loka.artifacts import write_benchmark
from loka.kernels import device_of
from loka.numerics import amax_of, cast_operand, product_error
from loka.probe.live import LIVE_ROWS, Captured, live_errors, site_generator
from loka.probe.sampler import draw_rows
from loka.probe.trial import ERROR_FIELDS, kernel_trials_of
from loka.recsys import build_model, open_source
from loka.recsys.models.registry import model_config
from loka.vocab import Format, Granularity, Operand, OperandSpec, Pass, Site

ROWS = 512
CASE = Case("wukong:synthetic_raw", "wukong", "synthetic?rows=200000&variant=raw", 512, (200,))
FAULTS = ("columns", "channels")
_ROWWISE = OperandSpec.of(Format.E4M3, Granularity.ROWWISE)
_MERE = ERROR_FIELDS.index("mere")


def product_errors(a_mk: Tensor, b_nk: Tensor) -> dict[str, tuple[float, float]]:
    """(MERE, relative L2 error) of the correct rowwise product of [m, k] and [n, k] and of faulty ones."""
    a, b = cast_operand(a_mk, _ROWWISE), cast_operand(b_nk, _ROWWISE)
    codes = a.values.double() @ b.values.double().t()
    m, n = codes.shape
    by_row, by_column = a.scale.double(), b.scale.double()
    columns = by_row[torch.arange(n, device=codes.device) % m]
    channels = by_column[torch.arange(m, device=codes.device) % n]
    outs = {
        "correct": codes * by_row[:, None] * by_column,
        "columns": codes * columns * by_column,
        "channels": codes * by_row[:, None] * channels[:, None],
    }
    reference = a_mk.double() @ b_nk.double().t()
    found = {}
    for name, out in outs.items():
        error = product_error(out, reference)
        found[name] = (float(error.mere), math.sqrt(float(error.noise) / float(error.signal)))
    return found


def separations(a_mk: Tensor, b_nk: Tensor) -> dict[str, tuple[float, float]]:
    """By fault: how many times the correct product's (MERE, relative L2 error) the faulty one's are."""
    errors = product_errors(a_mk, b_nk)
    mere, rel_err = errors["correct"]
    return {fault: (errors[fault][0] / mere, errors[fault][1] / rel_err) for fault in FAULTS}


def _products(name: str, known: Learned, w: Tensor, seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(kind, A, B) of the linear's forward and input gradient, on normal and on learned inputs."""
    for pass_, operand, weight in ((Pass.FWD, Operand.INPUT, w), (Pass.DGRAD, Operand.GRAD_OUTPUT, w.t())):
        if operand not in known.operands or min(w.shape) < 16:
            continue
        generator = site_generator(seed, name, f"fault/{pass_}")
        normal = torch.randn(ROWS, weight.shape[1], generator=generator).to(w.device)
        weights = torch.randn(weight.shape, generator=generator).to(w.device)
        yield "normal", normal, weights
        yield "learned", draw_rows(known.operands[operand], ROWS, generator), weight


def fault_metrics(look: Look, seed: int) -> dict[str, float]:
    """Separation of the planted faults by normal and by learned inputs."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, known in look.learned.items():
        weight = look.linears[name].get_parameter("weight").detach().float()
        for kind, a, b in _products(name, known, weight, seed):
            for fault, pair in separations(a, b.float()).items():
                found[f"{kind}.{fault}"].append(pair)
    out: dict[str, float] = {}
    for kind in ("learned", "normal"):
        for fault in FAULTS:
            for column, tail in ((0, ""), (1, "_rel_err")):
                values = [pair[column] for pair in found[f"{kind}.{fault}"]]
                out[f"fault_separation_{kind}{tail}@{fault}"] = max(values)
                out[f"fault_separation_{kind}{tail}_geomean@{fault}"] = statistics.geometric_mean(values)
        out[f"fault_separation_{kind}"] = out[f"fault_separation_{kind}@columns"]
        out[f"fault_separation_{kind}_rel_err"] = out[f"fault_separation_{kind}_rel_err@columns"]
    out["fault_products"] = len(found["normal.columns"])
    return out


def mere_table(look: Look, seed: int) -> dict[str, float]:
    """Geometric mean over linears of each kernel's MERE in the forward, on normal and on learned inputs."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, known in look.learned.items():
        weight = look.linears[name].get_parameter("weight").detach().float()
        n, k = weight.shape
        site = Site(name, "linear", n, k, True, LIVE_ROWS)
        trials = kernel_trials_of(site, device_of(weight.device), (Pass.FWD,))
        for kind in ("normal", "learned"):
            generator = site_generator(seed, name, f"mere/{kind}")
            if kind == "normal":
                x = torch.randn(ROWS, weight.shape[1], generator=generator).to(weight.device)
                w = torch.randn(weight.shape, generator=generator).to(weight.device)
            else:
                x, w = draw_rows(known.operands[Operand.INPUT], ROWS, generator), weight
            captured = Captured(x=x, w=w, x_amax=amax_of(x, Granularity.TENSORWISE))
            errors = live_errors(captured, trials, generator)
            for trial, row in zip(trials, errors.tolist(), strict=True):
                if math.isfinite(row[_MERE]) and row[_MERE] > 0:
                    found[f"mere_{kind}@{trial.kernel.name}"].append(row[_MERE])
    return {name: statistics.geometric_mean(values) for name, values in sorted(found.items())}


def measure(device: torch.device | str = "cpu", *, seed: int = 0, case: Case = CASE) -> dict[str, float]:
    """The MERE table and the separation of planted faults, learned against normal inputs."""
    source = open_source(case.data)
    config = model_config(case.model, overrides=case.overrides)
    model = build_model(case.model, source.schema, config=config, seed=seed).to(device)
    out: dict[str, float] = {}

    def at_look(look: Look, step: int, first: int) -> None:
        look.learn(source, first)
        out.update(fault_metrics(look, seed))
        out.update(mere_table(look, seed))

    train(Look(case, model, seed, 0), source, at_look)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    metrics = measure(args.device, seed=args.seed)
    print(json.dumps(metrics, indent=1))
    if args.out:
        write_benchmark(args.out, metrics, {})


if __name__ == "__main__":
    main()
