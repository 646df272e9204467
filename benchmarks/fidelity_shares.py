"""How often predictions of `fidelity.py` hit: shares within limits, medians, counts, by method and pass."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from loka.errors import UsageError
from loka.vocab import Pass

METHODS = ("live", "trailing", "copula", "mvn", "published", "normal", "other")
LIMITS_DB = (0.5, 1.0)
UNSETTLED_DB = 0.5
QUANTILE_90 = 1.645  # of a normal distribution, both sides


@dataclass(frozen=True)
class Record:
    """Real and predicted SQNR of one recipe at one site.

    Attributes:
        case: Which training.
        look: After how many steps.
        site: Which linear.
        pass_: Which product.
        recipe: Recipe keys of both operands and accumulation.
        real_db: On the held-out batches, mean over them.
        narrow: The site has fewer than 16 inputs or outputs: no plan takes it to FP8.
        spread_db: Standard deviation of the real SQNR over single held-out batches.
        unsure_db: Half the 90 % interval of `real_db`.
        predicted_db: By method, mean over batches or draws.
        off_sums_db: By method, predicted less real where signals and noises are added up instead.
    """

    case: str
    look: int
    site: str
    pass_: Pass
    recipe: str
    narrow: bool
    real_db: float
    spread_db: float
    unsure_db: float
    predicted_db: dict[str, float]
    off_sums_db: dict[str, float]


def metrics_of(found: Sequence[Record]) -> dict[str, float]:
    """Of the sites that a plan may take to FP8, of all (with `.all_sites` behind), and of settled ones."""
    for pass_ in Pass:
        if not any(record.pass_ is pass_ for record in found):
            raise UsageError(f"no recipe of {pass_} was measured")
    every = {f"{name}.all_sites": value for name, value in _shares(found).items()}
    wide = [record for record in found if not record.narrow]
    settled = [record for record in wide if record.unsure_db <= UNSETTLED_DB]
    known = {f"{name}.settled": value for name, value in _shares(settled).items()}
    return _shares(wide) | every | known


def _shares(found: Sequence[Record]) -> dict[str, float]:
    """Shares within 0.5 and 1 dB, medians and counts, by method and pass."""
    out: dict[str, float] = {}
    groups = {"fwd": (Pass.FWD,), "dgrad": (Pass.DGRAD,), "wgrad": (Pass.WGRAD,)}
    groups["fwd_dgrad"] = (Pass.FWD, Pass.DGRAD)
    for group, passes in groups.items():
        chosen = [r for r in found if r.pass_ in passes]
        if not chosen:
            continue
        out[f"fidelity_count@{group}"] = len(chosen)
        unsettled = sum(r.unsure_db > UNSETTLED_DB for r in chosen)
        out[f"fidelity_percent_unsettled@{group}"] = 100 * unsettled / len(chosen)
        for method in METHODS:
            off = [abs(r.predicted_db[method] - r.real_db) for r in chosen]
            for limit in LIMITS_DB:
                share = sum(o <= limit for o in off) / len(off)
                out[f"fidelity_percent_within_{limit:g}db@{method}.{group}"] = 100 * share
                share = sum(abs(r.off_sums_db[method]) <= limit for r in chosen) / len(off)
                out[f"fidelity_of_sums_percent_within_{limit:g}db@{method}.{group}"] = 100 * share
            out[f"fidelity_median_off_db@{method}.{group}"] = statistics.median(off)
        out[f"fidelity_median_batch_spread_db@{group}"] = statistics.median(r.spread_db for r in chosen)
    return out
