"""The metrics of a record: one flat map, from what was kept of the pairs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from loka.bench.picks import SLOWER
from loka.bench.results import KernelRow, PairResult
from loka.kernels import HIGH_PRECISION

__all__ = ["metrics_of"]


def metrics_of(pairs: Sequence[PairResult]) -> dict[str, float]:
    """Every metric that is defined; those over FP8 picks are left out where nothing was picked.

    - `pairs`, `pairs_failed`: pairs measured, and pairs where bf16 itself could not be timed.
    - `fp8_total_speedup_geomean`: of FP8 picks over bf16, casts included, on the judging half.
    - `fp8_total_speedup_geomean_exact`: the same where only exact accumulation may be picked.
    - `fp8_share_of_pairs`, `fp8_share_of_flops`: where FP8 is picked.
    - `slower_than_bf16_share`: picks whose median ratio to bf16 is under 0.98 on the judging half.
    - `quantization_share_percent`: casts over casts and products, summed over FP8 picks.
    - `roofline_fraction_geomean`: the product alone of every pick, at the peak of its own formats.
    - `best_count@LIBRARY`, `pick_count@LIBRARY`: pairs where its kernel had the least total; was picked.
      Libraries that could run no pair are left out.
    - `speedup@MxNxK.pass`: of the pick over bf16 on the judging half; 1 where bf16 stays.

    Args:
        pairs: What was kept.
    """
    done = [pair for pair in pairs if not pair.failed]
    picked = [(pair, row) for pair in done if (row := pair.row(pair.pick)) is not None]
    fp8 = [(pair, row) for pair, row in picked if row.quantized]
    metrics: dict[str, float] = {"pairs": len(done), "pairs_failed": len(pairs) - len(done)}
    if done:
        metrics["fp8_share_of_pairs"] = len(fp8) / len(done)
        metrics["fp8_share_of_flops"] = sum(p.flops for p, _ in fp8) / sum(p.flops for p in done)
        metrics["slower_than_bf16_share"] = sum(_speedup(r) < SLOWER for _, r in picked) / len(done)
    exact = [row for pair in done if (row := pair.row(pair.pick_exact)) is not None and row.quantized]
    _add_geomean(metrics, "fp8_total_speedup_geomean", [_speedup(row) for _, row in fp8])
    _add_geomean(metrics, "fp8_total_speedup_geomean_exact", [_speedup(row) for row in exact])
    _add_geomean(metrics, "roofline_fraction_geomean", [r.roofline for _, r in picked if r.roofline])
    casts = sum(row.cast_us or 0.0 for _, row in fp8)
    products = sum(row.product_us or 0.0 for _, row in fp8 if row.cast_us is not None)
    if products:
        metrics["quantization_share_percent"] = 100 * casts / (casts + products)
    best = Counter(_library(pair.fastest) for pair in done)
    pick = Counter(_library(pair.pick) for pair in done)
    for library in sorted({_library(row.kernel) for pair in done for row in pair.kernels}):
        metrics[f"best_count@{library}"] = best[library]
        metrics[f"pick_count@{library}"] = pick[library]
    return metrics | {f"speedup@{pair.key}": _speedup(row) for pair, row in picked}


def _library(kernel: str) -> str:
    return kernel.partition(".")[0]


def _speedup(row: KernelRow) -> float:
    """bf16 against itself is 1; a pick was timed to the end, so it has a ratio."""
    return 1.0 if row.kernel == HIGH_PRECISION or row.speedup is None else row.speedup


def _add_geomean(metrics: dict[str, float], name: str, values: Sequence[float]) -> None:
    if values:
        metrics[name] = math.exp(sum(math.log(value) for value in values) / len(values))
