"""What the loss feels when one forward product is switched: every site, every recipe."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from loka.artifacts.profile import LossTable
from loka.errors import UsageError
from loka.probe.sensitivity.changes import Change
from loka.probe.sensitivity.direct import direct_changes
from loka.probe.sensitivity.estimate import Bend, bend_of, corrected, evenly_spread, uncertain, with_doubt
from loka.probe.sensitivity.frozen import Evaluate, site_linears
from loka.probe.sensitivity.scores import Pair, RowScores, row_scores
from loka.probe.sensitivity.stand_in import Switch, stand_in_of
from loka.vocab import Accumulation, Pass, ProductRecipe

__all__ = ["loss_changes"]

_log = logging.getLogger("loka")

_FEWEST_ROWS = 256  # of a trial: below it the slope of its control variate is guesswork


class _Found(NamedTuple):
    change: Change
    method: str


def loss_changes(
    model: nn.Module,
    evaluate: Evaluate,
    batches: Iterable[object],
    products: Mapping[str, Sequence[Switch]],
    *,
    budget: float | None = None,
    checks: int = 6,
    max_direct: int | None = None,
    direct_share: float = 0.25,
) -> LossTable:
    """Relative change of the mean loss when one site's forward product is switched, for each switch alone.

    Estimated from the gradients of one forward and backward a batch (`row_scores`); `checks` direct trials
    tell how good the estimates are; where they leave more doubt than the rows do, or doubt on which side of
    the budget a switch is, the model is run with it. The model is frozen and put back as it was: modes,
    buffers, random state; gradients are not touched.

    Args:
        model: The model, compiled or not.
        evaluate: `evaluate(model, batch)` gives the loss of each row, [rows]. Gradients should flow from it;
            where none do, every switch is tried directly.
        batches: Held-out batches that can be read again and again.
        products: What to try at each site. Recipes that quantize nothing are left out.
        budget: Largest relative change that a plan may cost; finds out more about switches near it.
        checks: Direct trials that are made in any case.
        max_direct: Most direct trials beside these; None for as many as there are sites.
        direct_share: Share of the rows that a trial runs on; the estimate carries its result
            over to the others. Whole batches are run, of at least 256 rows.

    Returns:
        A row for each switch of a site that was called; `method` is `estimate`, `direct` or
        `estimate+direct`.

    Raises:
        UsageError: for losses that are not one finite number a row, batches that are none or can be read only
            once, an evaluate that calls no linear of the model, a mean loss that is not above 0, or an option
            out of range.
        UnknownNameError: for a site that is no plain nn.Linear of the model.
    """
    if not 0 < direct_share <= 1 or checks < 0 or (max_direct is not None and max_direct < 0):
        raise UsageError(
            f"loss_changes(checks={checks}, max_direct={max_direct}, direct_share={direct_share}) is out of "
            "range",
            hint="counts are at least 0, the share is above 0 and at most 1",
        )
    tried = _distinct(model, products)
    work = _Work(model, evaluate, batches, direct_share)
    if not any(tried.values()):
        return LossTable()
    scores = row_scores(model, evaluate, batches, tried)
    if scores is None:
        _log.warning("no gradient flows from evaluate's losses: every switch is tried directly")
        found = work.all_directly([(site, stand_in_of(s)) for site, ss in tried.items() for s in ss])
    else:
        found = work.estimated(
            scores, budget, checks, max_direct=len(tried) if max_direct is None else max_direct
        )
    return _table(found)


class _Work:
    """The model with its rows, and on what share of them a trial runs."""

    def __init__(
        self, model: nn.Module, evaluate: Evaluate, batches: Iterable[object], direct_share: float
    ) -> None:
        self._model, self._evaluate, self._batches = model, evaluate, batches
        self._direct_share = direct_share

    def all_directly(self, pairs: Sequence[Pair]) -> list[tuple[Pair, _Found]]:
        direct = direct_changes(self._model, self._evaluate, self._batches, [{s: p} for s, p in pairs])
        return [(pair, _Found(direct.change(i), "direct")) for i, pair in enumerate(pairs)]

    def estimated(
        self, scores: RowScores, budget: float | None, checks: int, *, max_direct: int
    ) -> list[tuple[Pair, _Found]]:
        for site in sorted(scores.unreached):
            _log.warning("`%s` was not called for any held-out batch: nothing is said of it", site)
        reached = [i for i, (site, _) in enumerate(scores.pairs) if site not in scores.unreached]
        known = [i for i in reached if i not in scores.unattributed]
        found: dict[int, _Found] = {}

        first = evenly_spread(scores, known, checks)
        bend = self._try(scores, first, found)
        rest = [i for i in known if i not in found]
        self._try(scores, uncertain(scores, rest, bend, budget=budget, at_most=max_direct), found)
        for i in known:
            if i not in found:
                change = with_doubt(scores.change([i]), scores.second(i), bend)
                found[i] = _Found(change, "estimate")

        unknown = [i for i in reached if i not in found]
        if unknown:
            pairs = [scores.pairs[i] for i in unknown]
            found |= {i: f for i, (_, f) in zip(unknown, self.all_directly(pairs), strict=True)}
        _log.info(
            "loss of %d switches on %d rows: %d estimated (curvature: %s), %d of them corrected by trials, "
            "%d tried alone; estimates are off by %.2g of their second-order part",
            len(reached), scores.losses.numel(), len(known), scores.basis,
            sum(f.method == "estimate+direct" for f in found.values()), len(unknown), bend.share,
        )  # fmt: skip
        return [(scores.pairs[i], found[i]) for i in reached]

    def _try(self, scores: RowScores, numbers: Sequence[int], found: dict[int, _Found]) -> Bend:
        """Run the model with each of these pairs switched, and note what it and the estimate say together."""
        if not numbers:
            return Bend(1.0, 0)  # nothing is known: the whole second-order part is in doubt
        rows = scores.losses.numel()
        at_least = max(math.ceil(self._direct_share * rows), min(rows, _FEWEST_ROWS))
        trials = [{scores.pairs[i][0]: scores.pairs[i][1]} for i in numbers]
        direct = direct_changes(
            self._model,
            self._evaluate,
            self._batches,
            trials,
            max_batches=scores.batches_with(at_least),
        )
        tried = direct.losses.numel()
        if tried != sum(scores.batch_rows[: scores.batches_with(tried)]):
            raise UsageError(
                f"batches gave {rows} rows in batches of {scores.batch_rows[0]}, and then "
                f"{tried} rows in the first ones",
                hint="they must be the same each time they are read",
            )
        for trial, i in enumerate(numbers):
            change = corrected(scores.shift([i]), scores.losses, direct.differences[trial])
            found[i] = _Found(change, "estimate+direct")
        return bend_of(scores, direct, {i: trial for trial, i in enumerate(numbers)})


def _distinct(model: nn.Module, products: Mapping[str, Sequence[Switch]]) -> dict[str, list[Switch]]:
    """Switches without those that quantize nothing, or that would run as another one does.

    On a CPU fast accumulation is not emulated, so a recipe and its fast twin are one.
    """
    on_cpu = {site: m.weight.device.type == "cpu" for site, m in site_linears(model, products).items()}
    distinct: dict[str, list[Switch]] = {}
    for site, switches in products.items():
        kept: dict[object, Switch] = {}
        for switch in switches:
            if isinstance(switch, ProductRecipe):
                if not switch.is_quantized:
                    continue
                accumulation = Accumulation.EXACT if on_cpu[site] else switch.accumulation
                kept.setdefault((switch.a.recipe_key, switch.b.recipe_key, accumulation), switch)
            else:
                kept.setdefault(switch, switch)
        distinct[site] = list(kept.values())
    return distinct


def _table(found: Sequence[tuple[Pair, _Found]]) -> LossTable:
    table = LossTable()
    for (site, product), (change, method) in found:
        table.site.append(site)
        table.pass_.append(Pass.FWD)
        table.spec_a.append(product.spec_a)
        table.spec_b.append(product.spec_b)
        table.delta_ne.append(change.delta)
        table.se.append(change.se)
        table.method.append(method)
    return table
