"""Put together a profile from what was observed, drawn and timed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from loka.artifacts.fingerprint import fingerprint
from loka.artifacts.profile import (
    CastTable,
    LossTable,
    Overhead,
    ProductTable,
    Profile,
    SiteTable,
    StepShares,
)
from loka.probe.error_log import ErrorLog
from loka.probe.observer import SiteObservation
from loka.probe.sampled import sample_errors
from loka.probe.times import time_kernels
from loka.probe.trial import trials_of
from loka.sites.mods import mods_of
from loka.vocab import Accumulation, Device, Operand, Pass, ProductRecipe, Site

__all__ = ["Learned", "build_profile", "loss_products", "m_buckets", "m_quantiles"]

_NAMED = 6  # products in one note


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a training loop taught.

    Attributes:
        model: For the number of its parameters.
        linears: Site name to module, for its weights.
        sites: Every product found.
        observed: Statistics by site.
        log: Errors so far; the sampled ones in it are replaced.
        device: The machine.
        where: The torch device of the model.
        seed: For the draws.
        steps_seen: Steps that passed.
        steps_observed: Steps that were looked at.
        shares: Where the step's time goes.
        overhead: What observing cost.
        notes: Sentences worth keeping.
    """

    model: nn.Module
    linears: Mapping[str, nn.Module]
    sites: Sequence[Site]
    observed: Mapping[str, SiteObservation]
    log: ErrorLog
    device: Device
    where: torch.device
    seed: int
    steps_seen: int
    steps_observed: int
    shares: StepShares | None
    overhead: Overhead | None
    notes: Sequence[str] = ()


def build_profile(
    learned: Learned,
    *,
    timed: bool,
    rows: Sequence[int] = (),
    workers: int | None = None,
    loss: Callable[[Mapping[str, Sequence[ProductRecipe]]], LossTable] | None = None,
) -> Profile:
    """The profile of a model: errors live and sampled, times where `timed`, the loss where it can be asked.

    Args:
        learned: From the loop, or from a saved state.
        timed: Time kernels and casts, before any is tried on drawn operands: a kernel that cannot be run is
            found there.
        rows: Values of M beside those that were seen.
        workers: Processes that compile and vet beside each other before anything is timed; 0 does it in
            this one. By default one for each core, 14 at most.
        loss: Gives the change of the loss by forward products, each alone.
    """
    sites = [_as_observed(site, learned.observed) for site in learned.sites]
    plannable = [s for s in sites if s.plannable and s.rows]
    notes = list(learned.notes)
    products, casts = ProductTable(), CastTable()

    def buckets(site: Site) -> list[int]:
        return m_buckets(learned.observed, site, rows)

    left_out: Mapping[str, str] = {}
    if timed:
        times = time_kernels(plannable, learned.device, learned.where, rows_of=buckets, workers=workers)
        products, casts, left_out = times.products, times.casts, times.left_out
        notes += times.notes
    begun = time.monotonic()
    notes += sample_errors(
        plannable,
        _weights_of(learned.linears),
        learned.observed,
        learned.log,
        device=learned.device,
        rows_of=buckets,
        seed=learned.seed,
        left_out=left_out,
    )
    notes += _not_finite(learned.log)
    if timed:
        notes.append(f"kernels were tried on drawn operands in {time.monotonic() - begun:.1f} s")
    return Profile(
        model=fingerprint(sites, sum(p.numel() for p in learned.model.parameters()), mods_of(learned.model)),
        device=learned.device,
        steps_seen=learned.steps_seen,
        steps_observed=learned.steps_observed,
        sites=_site_table(sites, learned.observed),
        errors=learned.log.table(),
        products=products,
        casts=casts,
        loss=LossTable() if loss is None else loss(loss_products(plannable, learned.device)),
        step=learned.shares,
        overhead=learned.overhead,
        notes=notes,
    )


def _not_finite(log: ErrorLog) -> list[str]:
    """A note that names the products whose errors are no errors: their output was not finite."""
    keys = list(dict.fromkeys(f"`{k.site}` {k.pass_} {k.spec_a} x {k.spec_b}" for k in log.not_finite()))
    if not keys:
        return []
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return [
        f"the output was not finite where FP32's was: {', '.join(keys[:_NAMED])}{more}; an observation of "
        "such an output counts as -300 dB, its ruined rows as an error of 1e30"
    ]


def _as_observed(site: Site, observed: Mapping[str, SiteObservation]) -> Site:
    """With the median rows, and the calls of a whole step: the first may begin or end within a forward."""
    seen = observed.get(site.name)
    calls = seen.calls if seen is not None and seen.calls else site.calls
    return replace(site, rows=m_quantiles(observed, site)[1], calls=calls)


def _weights_of(linears: Mapping[str, nn.Module]) -> Callable[[str], Tensor]:
    """A site's weight [N, K], put together where ranks hold parts of it (then every rank must ask)."""

    def weight_of(name: str) -> Tensor:
        weight = linears[name].get_parameter("weight").detach()
        whole = getattr(weight, "full_tensor", None)  # a DTensor
        return weight if whole is None else whole()

    return weight_of


def loss_products(sites: Iterable[Site], device: Device) -> dict[str, list[ProductRecipe]]:
    """The forward recipes to ask the loss about: those that errors are measured for, by site."""
    asked: dict[str, list[ProductRecipe]] = {}
    for site in sites:
        found = [t for t in trials_of(site, device) if t.pass_ is Pass.FWD and t.spec_a.is_quantized]
        recipes = {(t.spec_a.recipe_key, t.spec_b.recipe_key): t for t in found}
        asked[site.name] = [ProductRecipe(t.spec_a, t.spec_b, Accumulation.EXACT) for t in recipes.values()]
    return asked


def m_quantiles(observed: Mapping[str, SiteObservation], site: Site) -> tuple[int, int, int]:
    """Least, median and most rows of a call; the site's own where none was counted.

    The median is of the calls that had rows: a site that is often empty still multiplies at some M.
    """
    counted: Counter[int] = observed[site.name].m_seen if site.name in observed else Counter()
    seen = Counter({rows: times for rows, times in counted.items() if rows})
    if not seen:
        return (site.rows, site.rows, site.rows)
    ranked = sorted(seen.items())
    middle, passed = sum(seen.values()) // 2, 0
    for rows, times in ranked:
        passed += times
        if passed > middle:
            return (min(counted), rows, ranked[-1][0])
    return (min(counted), ranked[-1][0], ranked[-1][0])


def m_buckets(observed: Mapping[str, SiteObservation], site: Site, rows: Sequence[int] = ()) -> list[int]:
    """Every M that is tried and timed: what was seen (least, median, most) and `rows`, rising, no 0."""
    return sorted({m for m in (*m_quantiles(observed, site), *rows) if m > 0})


def _site_table(sites: Sequence[Site], observed: Mapping[str, SiteObservation]) -> SiteTable:
    table = SiteTable()
    for site in sites:
        low, middle, high = m_quantiles(observed, site)
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
    seen = (site.moments[o] for o in (Operand.INPUT, Operand.GRAD_OUTPUT) if o in site.moments)
    return sum(int(moments.nonfinite_rows) for moments in seen)
