"""The numbers behind the pictures of `loka show --site`: what the statistics of one operand say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loka.numerics import (
    HISTOGRAM_MIN_EXPONENT,
    Marginals,
    Moments,
    OperandStatistics,
    column_octaves,
    format_loss,
    row_octaves,
)
from loka.vocab import Format

__all__ = ["FORMATS", "QUANTILES", "Fate", "fate_of", "operand_numbers", "subnormal_share"]

SPREAD = {"p1": 0.01, "p50": 0.5, "p99": 0.99}
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
        "row_amax_octaves": _named(row_octaves(moments, list(SPREAD.values()))),
        "feature_amax_octaves": _of_features(moments),
        "drift": None if drift is None else drift._asdict(),
        "quantiles": None if statistics.marginals is None else _quantiles(statistics.marginals),
    }


def _history(statistics: OperandStatistics) -> dict[str, list[float]]:
    history = statistics.history
    return {"steps": list(history.steps), "amax": history.values().tolist()}


def _named(octaves: Sequence[float] | None) -> dict[str, float] | None:
    return None if octaves is None else dict(zip(SPREAD, octaves, strict=True))


def _of_features(moments: Moments) -> dict[str, float] | None:
    """The octaves of the features, and how many features were always zero."""
    found = _named(column_octaves(moments, list(SPREAD.values())))
    return None if found is None else found | {"always_zero": float((moments.amax == 0).sum())}


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
