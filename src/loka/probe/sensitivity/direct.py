"""Direct trials: the model run with some sites' forward products switched, row by row against itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.errors import UsageError
from loka.planned import compute_dtype_of
from loka.probe.sensitivity.changes import Change, relative_change
from loka.probe.sensitivity.frozen import Evaluate, frozen, numbered, site_linears
from loka.probe.sensitivity.stand_in import StandIn, Switch, stand_in_of

__all__ = ["DirectChanges", "direct_changes", "joint_change", "switched"]


@dataclass(frozen=True, slots=True)
class DirectChanges:
    """Paired differences of rows.

    Attributes:
        losses: fp64 [rows], the model's own.
        differences: fp64 [trials, rows], switched minus plain.
    """

    losses: Tensor
    differences: Tensor

    def change(self, trial: int) -> Change:
        """Relative change of the mean loss in one trial."""
        return relative_change(self.differences[trial], self.losses)


def direct_changes(
    model: nn.Module,
    evaluate: Evaluate,
    batches: Iterable[object],
    trials: Sequence[Mapping[str, Switch]],
    *,
    max_batches: int | None = None,
) -> DirectChanges:
    """Run the model as it is and with each trial's sites switched, on the same rows.

    Args:
        model: In any mode; it is evaluated without gradients, and put back as it was.
        evaluate: Loss of each row.
        batches: Read once; all trials of a batch run before the next.
        trials: Each names what stands in at which sites, one or many.
        max_batches: Only so many; None for all.

    Raises:
        UsageError: for losses that are not one finite number a row, an evaluate whose number of rows changes,
            batches that are none or can be read only once.
        UnknownNameError: for a site that is no plain nn.Linear of the model.
    """
    names = {site for trial in trials for site in trial}
    linears = site_linears(model, sorted(names))
    losses, differences = [], []
    with frozen(model, evaluate) as held, torch.no_grad():
        for number, batch in numbered(batches, limit=max_batches):
            plain = held.losses(batch, number).double().cpu()
            rows = torch.zeros(len(trials), plain.numel(), dtype=torch.float64)
            for i, trial in enumerate(trials):
                with switched({linears[site]: (site, stand_in_of(s)) for site, s in trial.items()}):
                    changed = held.losses(batch, number).double().cpu()
                if changed.shape != plain.shape:
                    raise UsageError(
                        f"evaluate(model, batch) gave {plain.numel()} losses and then {changed.numel()} for "
                        f"the same batch {number}",
                        hint="which rows are evaluated must not depend on the model or on chance",
                    )
                rows[i] = changed - plain
            losses.append(plain)
            differences.append(rows)
    return DirectChanges(torch.cat(losses), torch.cat(differences, dim=1))


def joint_change(
    model: nn.Module, evaluate: Evaluate, batches: Iterable[object], plan: Mapping[str, Switch]
) -> Change:
    """Relative change of the mean loss when all sites of a plan are switched together, measured.

    Args:
        model: As in `direct_changes`.
        evaluate: Loss of each row.
        batches: Rows to measure on.
        plan: What stands in at each site.

    Raises:
        UsageError: as `direct_changes` does.
        UnknownNameError: for a site that is no plain nn.Linear of the model.
    """
    return direct_changes(model, evaluate, batches, [plan]).change(0)


@contextlib.contextmanager
def switched(products: Mapping[nn.Linear, tuple[str, StandIn]]) -> Iterator[None]:
    """Replace the forwards of linears on the instances; they are the classes' own again afterwards.

    Args:
        products: What stands in at each linear, with the site's name for messages.
    """
    try:
        for linear, (name, product) in products.items():
            linear.forward = _forward_of(linear, name, product)  # type: ignore[method-assign]
        yield
    finally:
        for linear in products:
            linear.__dict__.pop("forward", None)


def _forward_of(linear: nn.Linear, name: str, product: StandIn):  # type: ignore[no-untyped-def]
    def forward(input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
        N, K = linear.weight.shape
        lead = input.shape[:-1]
        if not math.prod(lead):
            return nn.functional.linear(input, linear.weight, linear.bias)
        dtype = compute_dtype_of(input, linear.weight, site=name)
        y_MN = product(input.reshape(-1, K), linear.weight, linear.bias, out_dtype=dtype)
        return y_MN.view(*lead, N)

    return forward
