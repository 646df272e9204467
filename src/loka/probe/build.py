"""Put together a profile from what was observed, drawn and timed."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from loka.artifacts.fingerprint import fingerprint
from loka.artifacts.profile import CastTable, LossTable, ProductTable, Profile, SiteTable, StepShares
from loka.numerics import amax_of
from loka.probe.error_log import ErrorLog
from loka.probe.live import LIVE_ROWS, Captured, live_errors, site_generator
from loka.probe.observer import SiteObservation
from loka.probe.sampler import draw_rows
from loka.probe.timed_casts import time_casts
from loka.probe.timed_products import time_products
from loka.probe.trial import Trial
from loka.vocab import Device, Granularity, Operand, Site

__all__ = ["build_profile"]

_DRAWS = 3
_log = logging.getLogger("loka.probe")


def build_profile(
    model: nn.Module,
    sites: Sequence[Site],
    trials: Mapping[str, list[Trial]],
    observed: Mapping[str, SiteObservation],
    log: ErrorLog,
    *,
    device: Device,
    where: torch.device,
    seed: int,
    steps: tuple[int, int],
    shares: StepShares | None,
    timed: bool,
) -> Profile:
    """The profile of a model: errors live and sampled, and times where `timed`.

    Args:
        model: For its weights and the number of its parameters.
        sites: Every product found.
        trials: Usable recipes by site.
        observed: Statistics by site.
        log: Errors so far; the sampled ones in it are replaced.
        device: The machine.
        where: The torch device of the model.
        seed: For the draws.
        steps: Steps seen and steps observed.
        shares: Where the step's time goes.
        timed: Time kernels and casts.
    """
    sample_errors(model, trials, observed, log, seed=seed)
    reached = [dataclasses.replace(s, rows=_m_quantiles(observed, s)[1]) for s in sites]
    plannable = [s for s in reached if s.plannable and s.rows]
    notes: list[str] = []
    products, casts = ProductTable(), CastTable()
    if timed:
        dtypes = _arrival_dtypes()
        products, notes = time_products(plannable, device, where, dtypes=dtypes, on_shape=_tell)
        casts, failed = time_casts(plannable, device, where, dtypes=dtypes, on_shape=_tell)
        notes += failed
        notes.append("casts are timed as LoKA's own kernels, each tensor read from memory")
    return Profile(
        model=fingerprint(sites, sum(p.numel() for p in model.parameters())),
        device=device,
        steps_seen=steps[0],
        steps_observed=steps[1],
        sites=_site_table(sites, observed),
        errors=log.table(),
        products=products,
        casts=casts,
        loss=LossTable(),
        step=shares,
        notes=notes,
    )


def sample_errors(
    model: nn.Module,
    trials: Mapping[str, list[Trial]],
    observed: Mapping[str, SiteObservation],
    log: ErrorLog,
    *,
    seed: int,
) -> None:
    """Trials on operands drawn from the learned statistics, with the model's own weights."""
    log.drop("sampled")
    for name, site_trials in trials.items():
        site = observed.get(name)
        if site is None or Operand.INPUT not in site.moments:
            continue
        weight = model.get_submodule(name).get_parameter("weight").detach()
        for draw in range(_DRAWS):
            generator = site_generator(seed, name, f"draw/{draw}")
            x = draw_rows(site.moments[Operand.INPUT], LIVE_ROWS, generator)
            captured = Captured(
                x=x, w=weight, x_amax=amax_of(x, Granularity.TENSORWISE), passes=frozenset(site.passes)
            )
            if Operand.GRAD_OUTPUT in site.moments:
                captured.g = draw_rows(site.moments[Operand.GRAD_OUTPUT], LIVE_ROWS, generator)
                captured.g_amax = amax_of(captured.g, Granularity.TENSORWISE)
            with torch.no_grad():
                log.add(name, site_trials, live_errors(captured, site_trials, generator), source="sampled")
    log.collect()


def _arrival_dtypes() -> dict[Operand, torch.dtype]:
    """Under bf16 autocast with fp32 masters: activations and gradients in bf16, weights in fp32."""
    return {
        Operand.INPUT: torch.bfloat16,
        Operand.WEIGHT: torch.float32,
        Operand.GRAD_OUTPUT: torch.bfloat16,
    }


def _m_quantiles(observed: Mapping[str, SiteObservation], site: Site) -> tuple[int, int, int]:
    seen: Counter[int] = observed[site.name].m_seen if site.name in observed else Counter()
    if not seen:
        return (site.rows, site.rows, site.rows)
    ranked = sorted(seen.elements())
    return (ranked[0], ranked[len(ranked) // 2], ranked[-1])


def _site_table(sites: Sequence[Site], observed: Mapping[str, SiteObservation]) -> SiteTable:
    table = SiteTable()
    for site in sites:
        low, middle, high = _m_quantiles(observed, site)
        for column in ("name", "kind", "n", "k", "bias", "calls", "input_group", "parameter", "not_planned"):
            getattr(table, column).append(getattr(site, column))
        table.m_min.append(low)
        table.m_p50.append(middle)
        table.m_max.append(high)
        table.nonfinite_rows.append(_nonfinite_rows(observed.get(site.name)))
    return table


def _nonfinite_rows(site: SiteObservation | None) -> int:
    if site is None:
        return 0
    counts = [
        site.moments[o].nonfinite_rows for o in (Operand.INPUT, Operand.GRAD_OUTPUT) if o in site.moments
    ]
    return sum(int(count) for count in counts)


def _tell(what: str) -> None:
    _log.info("timing %s", what)
