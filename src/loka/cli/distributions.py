"""The numbers behind the pictures of `loka show --site`: what the statistics of one operand say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.numerics import HISTOGRAM_MIN_EXPONENT, Marginals, OperandStatistics, format_loss
from loka.vocab import Format

__all__ = ["FORMATS", "QUANTILES", "Fate", "fate_of", "operand_numbers", "subnormal_share"]

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
FORMATS = (Format.E4M3, Format.E5M2)


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of the magnitudes in one octave [2^e, 2^(e+1)) in a format, at a tensorwise scale.

    Attributes:
        zero: Share of the octave that rounds to zero, magnitudes taken as uniform in log2.
        subnormal: Share that keeps fewer mantissa bits than the format has.
    """

    zero: float
    subnormal: float


def fate_of(exponent: int, amax: float, format: Format) -> Fate:  # noqa: A002 - the field's own word
    """The fate of an octave whose tensor has this amax: its decode scale is amax / max of the format.

    Half of the smallest subnormal and less rounds to zero; below smallest subnormal times 2^mantissa bits
    numbers are subnormal.

    Args:
        exponent: e of the octave.
        amax: Largest magnitude of the tensor, above 0.
        format: An 8-bit format.
    """
    scale = amax / format.max
    flushed = math.log2(format.smallest_subnormal / 2 * scale)
    normal = math.log2(format.smallest_subnormal * 2.0**format.mantissa_bits * scale)
    zero = min(1.0, max(0.0, flushed - exponent))
    return Fate(zero, min(1.0, max(0.0, normal - exponent)) - zero)


def subnormal_share(exponents: Sequence[int], amax: float, format: Format) -> float:  # noqa: A002
    """Share of the non-zero elements that become subnormal; resolution: one octave."""
    total = sum(exponents)
    if not total or not amax > 0:
        return 0.0
    fates = (n * fate_of(i + HISTOGRAM_MIN_EXPONENT, amax, format).subnormal for i, n in enumerate(exponents))
    return sum(fates) / total


def operand_numbers(statistics: OperandStatistics) -> dict[str, Any]:
    """Everything that is shown of one operand, as plain values; None for what was not kept."""
    moments = statistics.moments
    rows, features = int(moments.count), moments.mean.numel()
    elements = rows * features
    exponents = [int(n) for n in moments.exponents.tolist()]
    amax = float(moments.amax.max()) if features else 0.0
    drift = statistics.drift()
    return {
        "rows": rows,
        "features": features,
        "nonfinite_rows": int(moments.nonfinite_rows),
        "zero_share": int(moments.zeros) / elements if elements else None,
        "negative_share": int(moments.negatives) / elements if elements else None,
        "amax": amax,
        "amax_history": _history(statistics),
        "exponents": {i + HISTOGRAM_MIN_EXPONENT: n for i, n in enumerate(exponents) if n},
        "formats": {
            str(f): {
                "underflow": format_loss(moments, f).underflow.value,
                "subnormal": subnormal_share(exponents, amax, f),
            }
            for f in FORMATS
        },
        "row_amax_octaves": _row_spread([int(n) for n in moments.row_exponents.tolist()]),
        "feature_amax_octaves": _feature_spread(moments.amax),
        "drift": None if drift is None else drift._asdict(),
        "quantiles": None if statistics.marginals is None else _quantiles(statistics.marginals),
    }


def _history(statistics: OperandStatistics) -> dict[str, list[float]]:
    history = statistics.history
    return {"steps": list(history.steps), "amax": history.values().tolist()}


def _row_spread(histogram: Sequence[int]) -> dict[str, float] | None:
    """log2 of the row amax at 1, 50 and 99 % of the rows that are not all zero; None without any."""
    total = sum(histogram)
    if not total:
        return None
    found = {}
    for name, share in (("p1", 0.01), ("p50", 0.5), ("p99", 0.99)):
        below = 0
        for i, n in enumerate(histogram):
            below += n
            if below >= share * total:
                found[name] = float(i + HISTOGRAM_MIN_EXPONENT)
                break
    return found


def _feature_spread(amax: Tensor) -> dict[str, float] | None:
    """log2 of the features' amax at 1, 50 and 99 % of those not always zero, and how many always were."""
    alive = amax[amax > 0].double()
    if not alive.numel():
        return None
    logs = torch.log2(alive).sort().values
    last = logs.numel() - 1
    places = {"p1": 0.01, "p50": 0.5, "p99": 0.99}
    spread = {name: float(logs[round(share * last)]) for name, share in places.items()}
    return spread | {"always_zero": float(amax.numel() - alive.numel())}


def _quantiles(marginals: Marginals) -> list[dict[str, Any]]:
    """Quantiles of the feature with the largest magnitude, of the middle and of the smallest not always 0."""
    largest = torch.maximum(marginals.low.abs(), marginals.high.abs())
    order = [f for f in largest.argsort(descending=True).tolist() if largest[f] > 0]
    if not order:
        return []
    u = torch.tensor(QUANTILES)[:, None].expand(len(QUANTILES), largest.numel())
    values = marginals.quantile(u)
    picked = dict.fromkeys((order[0], order[len(order) // 2], order[-1]))
    return [
        {
            "feature": feature,
            "low": float(marginals.low[feature]),
            "values": [float(v) for v in values[:, feature]],
            "high": float(marginals.high[feature]),
        }
        for feature in picked
    ]
