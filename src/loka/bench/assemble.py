"""From the timings of a pair to what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from loka.bench.accounting import Pair
from loka.bench.picks import fastest, judged, pick
from loka.bench.results import KernelRow, PairResult
from loka.kernels import HIGH_PRECISION, Kernel
from loka.timing import Peak, Timing, fraction_of_roofline, paired_ratio
from loka.vocab import Accumulation, Format, GemmProblem

__all__ = ["Times", "assembled"]


@dataclass(frozen=True, slots=True)
class Times:
    """Timings of one pair by kernel.

    Attributes:
        totals: Casts, product and bias.
        products: The product alone.
        casts: The casts alone, of FP8 kernels.
        reasons: Why a kernel has no total, or one of fewer rounds.
    """

    totals: Mapping[str, Timing] = field(default_factory=dict)
    products: Mapping[str, Timing] = field(default_factory=dict)
    casts: Mapping[str, Timing] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


def assembled(
    pair: Pair,
    kernels: Sequence[Kernel],
    times: Times,
    *,
    unfit: Mapping[str, str],
    refused: Mapping[str, str],
    rounds: int,
    peak: Peak | None,
) -> PairResult:
    """Pick, judge and lay out.

    Args:
        pair: The pair.
        kernels: Those that are usable here.
        times: What was measured.
        unfit: Kernels that were not timed, and why.
        refused: Kernels that are not usable here, and why.
        rounds: Samples of a total that was timed to the end; only such kernels are picked.
        peak: Of the device, where it is known.
    """
    problem = pair.problem
    rows = tuple(_row(kernel, problem, times, unfit.get(kernel.name, ""), rounds, peak) for kernel in kernels)
    common: dict[str, Any] = {
        "key": pair.key,
        "flops": problem.flops,
        "kernels": rows,
        "refused": dict(refused),
    }
    whole = {name: timing for name, timing in times.totals.items() if len(timing.samples_us) == rounds}
    if HIGH_PRECISION not in whole:
        return PairResult(**common, failed=times.reasons.get(HIGH_PRECISION, "bf16 was not timed"))
    quantized = {row.kernel for row in rows if row.quantized}
    exact = {row.kernel for row in rows if row.exact}
    return PairResult(
        **common,
        pick=pick(whole, quantized),
        pick_exact=pick({name: timing for name, timing in whole.items() if name in exact}, quantized),
        fastest=fastest(whole, whole) or HIGH_PRECISION,
        best_fp8=fastest(whole, quantized) or "",
    )


def _row(
    kernel: Kernel, problem: GemmProblem, times: Times, unfit: str, rounds: int, peak: Peak | None
) -> KernelRow:
    name = kernel.name
    quantized = kernel.operands(problem)[0].is_quantized
    total, product, casts = times.totals.get(name), times.products.get(name), times.casts.get(name)
    row = KernelRow(
        kernel=name,
        quantized=quantized,
        exact=kernel.accumulation is Accumulation.EXACT,
        vetted=not unfit,
        product_us=product.p50_us if product else None,
        cast_us=casts.p50_us if casts else None,
        reason=unfit or times.reasons.get(name, ""),
    )
    if product is not None:
        base = times.products.get(HIGH_PRECISION)
        reached = _roofline(problem, quantized, product, peak)
        row = _with(
            row, product_speedup=paired_ratio(base, product).median if base else None, roofline=reached
        )
    if total is None:
        return row
    row = _with(
        row,
        captured=total.captured,
        rounds=len(total.samples_us),
        p10_us=total.quantile(0.1),
        p50_us=total.p50_us,
        p90_us=total.quantile(0.9),
    )
    base = times.totals.get(HIGH_PRECISION)
    if base is None or not len(base.samples_us) == len(total.samples_us) == rounds:
        return row
    ratio = judged(times.totals, name)
    return _with(row, speedup=ratio.median, speedup_low=ratio.low, speedup_high=ratio.high)


def _with(row: KernelRow, **values: float | int | bool | None) -> KernelRow:
    return msgspec.structs.replace(row, **values)


def _roofline(problem: GemmProblem, quantized: bool, product: Timing, peak: Peak | None) -> float | None:
    """A bf16 kernel is held to what bf16 could reach."""
    if peak is None:
        return None
    if not quantized:
        problem = replace(problem, a_format=Format.BF16, b_format=Format.BF16)
    out_bytes = 4 if problem.out_dtype is Format.FP32 else 2
    return fraction_of_roofline(problem, peak, product.p50_us, out_bytes=out_bytes)
