"""First- and second-order change of every row's loss when one site's forward product is switched.

One forward and one backward of the summed losses give the gradient g of each row's loss with respect to each
site's output y. A switched product differs from the model's own by e, so that row r's loss changes by

    a_r + c_r a_r^2 / 2,     a_r = <g_r, e_r>.

The second term is the curvature of the loss along e with the network between site and loss taken as linear
(Gauss-Newton; Martens 2020, "New Insights and Perspectives on the Natural Gradient Method", section 8). Two
ways to c:

- `logit`: the loss depends on the model through one number z a row, the only output of a linear with one
  feature. Then e moves z by a / l', and c = l'' / l'^2, exact for any l that can be differentiated twice.
- `fisher`: c = 1. E[g g^T] is the Hessian of a negative log-likelihood in nats where the model's
  probabilities are right (Fisher's identity); an expectation, not true of single rows.

What neither sees is how the network itself bends between site and loss; direct trials do.

Shapes: R rows of a batch, P switches; M rows, N output features of a site.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.errors import UsageError
from loka.probe.sensitivity.changes import Change, relative_change
from loka.probe.sensitivity.frozen import Evaluate, Frozen, frozen, numbered, site_linears
from loka.probe.sensitivity.stand_in import StandIn, Switch, stand_in_of
from loka.probe.sensitivity.taps import Call, Taps

__all__ = ["Pair", "RowScores", "predicted_joint", "row_scores"]

Pair = tuple[str, StandIn]


@dataclass(frozen=True, slots=True)
class RowScores:
    """What switching each site does to each row's loss, to second order.

    Attributes:
        losses: fp64 [rows], the model's own.
        pairs: (site, what stands in), P of them.
        first: fp32 [P, rows], the first-order changes a.
        curvature: fp64 [rows], c.
        basis: `logit` or `fisher`: where c comes from.
        batch_rows: Rows of each batch.
        unattributed: Numbers of the pairs whose site's rows could not be told apart by the rows of the loss,
            or that no gradient reached: nothing is known of them.
        unreached: Sites that the model did not call.
    """

    losses: Tensor
    pairs: tuple[Pair, ...]
    first: Tensor
    curvature: Tensor
    basis: str
    batch_rows: tuple[int, ...]
    unattributed: frozenset[int] = frozenset()
    unreached: frozenset[str] = frozenset()

    def shift(self, numbers: Sequence[int]) -> Tensor:
        """fp64 [rows]: the change of each row's loss when these pairs are switched together.

        First-order changes are summed before they are squared, so that errors that add or cancel in a row
        are seen.
        """
        a = self.first[list(numbers)].sum(dim=0, dtype=torch.float64)
        return a + self.curvature * a.square() / 2

    def second(self, number: int) -> float:
        """The second-order part of a pair's relative change."""
        a = self.first[number].double()
        return float((self.curvature * a.square() / 2).mean() / self.losses.mean())

    def change(self, numbers: Sequence[int]) -> Change:
        """Relative change of the mean loss when these pairs are switched together."""
        return relative_change(self.shift(numbers), self.losses)

    def batches_with(self, rows: int) -> int:
        """How many of the first batches hold at least so many rows; all where they hold less."""
        reached = list(itertools.accumulate(self.batch_rows))
        return next((i for i, total in enumerate(reached, start=1) if total >= rows), len(reached))

    def numbers_of(self, plan: Mapping[str, Switch]) -> list[int]:
        """The numbers of the pairs of a plan.

        Raises:
            UsageError: for a pair that was not scored, or of which nothing is known.
        """
        places = {(site, product): i for i, (site, product) in enumerate(self.pairs)}
        found = []
        for site, switch in plan.items():
            number = places.get((site, stand_in_of(switch)))
            if number is None or number in self.unattributed:
                raise UsageError(f"the switch at `{site}` has no row scores", hint="score it, or measure it")
            found.append(number)
        return found


def row_scores(
    model: nn.Module,
    evaluate: Evaluate,
    batches: Iterable[object],
    products: Mapping[str, Sequence[Switch]],
) -> RowScores | None:
    """Score every switch on every row of the batches, for about two forwards and a backward in all.

    The rows of a site are taken to be those of the loss in order: a dimension of its output that has the
    loss's length, or else consecutive groups of equal size. Memory: the activations of one batch twice, and
    4 bytes a switch and row.

    Args:
        model: In any mode; it is evaluated, and put back as it was.
        evaluate: Loss of each row.
        batches: Read once.
        products: What to try at each site.

    Returns:
        The scores on the CPU; None where no gradient flows from the losses to the model, as when `evaluate`
        runs under `no_grad`.

    Raises:
        UsageError: for losses that are not one finite number a row, batches that are none or can be read only
            once, or an evaluate that calls no linear of the model.
        UnknownNameError: for a site that is no plain nn.Linear of the model.
    """
    pairs = tuple((site, stand_in_of(s)) for site, switches in products.items() for s in switches)
    linears = site_linears(model, products)
    pieces: list[_Piece] = []
    with frozen(model, evaluate) as held:
        for number, batch in numbered(batches):
            piece = _batch_scores(model, held, batch, number, linears, pairs)
            if piece is None:
                return None
            pieces.append(piece)
    return _joined(pieces, pairs)


def predicted_joint(scores: RowScores, plan: Mapping[str, Switch]) -> Change:
    """Relative change of the mean loss when all sites of a plan are switched together, from row scores.

    Errors are added over sites within each row and squared once, so that those which add or cancel are seen.

    Args:
        scores: As `row_scores` gives them, with every switch of the plan among them.
        plan: What stands in at each site; one that names no site changes nothing.

    Raises:
        UsageError: for a switch that was not scored, or of which nothing is known.
    """
    return scores.change(scores.numbers_of(plan))


@dataclass(frozen=True, slots=True)
class _Piece:
    """One batch: losses [R], first [P, R], curvature [R] or None, what is not known, sites called."""

    losses: Tensor
    first: Tensor
    curvature: Tensor | None
    unattributed: frozenset[int]
    reached: frozenset[str]


def _joined(pieces: list[_Piece], pairs: tuple[Pair, ...]) -> RowScores:
    losses = torch.cat([p.losses for p in pieces])
    curvatures = [p.curvature for p in pieces if p.curvature is not None]
    exact = len(curvatures) == len(pieces)
    reached = frozenset().union(*(p.reached for p in pieces))
    return RowScores(
        losses=losses,
        pairs=pairs,
        first=torch.cat([p.first for p in pieces], dim=1),
        curvature=torch.cat(curvatures) if exact else torch.ones_like(losses),
        basis="logit" if exact else "fisher",
        batch_rows=tuple(p.losses.numel() for p in pieces),
        unattributed=frozenset().union(*(p.unattributed for p in pieces)),
        unreached=frozenset(site for site, _ in pairs) - reached,
    )


def _batch_scores(
    model: nn.Module,
    held: Frozen,
    batch: object,
    number: int,
    linears: Mapping[str, nn.Linear],
    pairs: tuple[Pair, ...],
) -> _Piece | None:
    taps = Taps(linears)
    with taps.placed(model), torch.enable_grad():
        with taps.listening():
            losses = held.losses(batch, number)
        if not taps.calls:
            raise UsageError(
                f"evaluate(model, batch) called none of the model's linears for batch {number}",
                hint="it must call the model that it is given",
            )
        if not losses.requires_grad:
            return None
        total = losses.sum()
        curvature = _logit_curvature(total, taps, losses.numel())
        by_logit = None if curvature is None else [call.g for call in taps.calls]
        torch.autograd.grad(total, [taps.anchor])
    if by_logit is not None and not _all_equal(by_logit, [call.g for call in taps.calls]):
        curvature = None  # some of the gradient goes around that number: it is not the logit
    R = losses.numel()
    first = torch.zeros(len(pairs), R)
    unknown: set[int] = set()
    with torch.no_grad():
        for call in taps.calls:
            mine = [i for i, (site, _) in enumerate(pairs) if site == call.site]
            for i in mine:
                a = _first_order(call, linears[call.site], pairs[i][1], R)
                if a is None:
                    unknown.add(i)
                else:
                    first[i] += a.cpu()
    reached = frozenset(call.site for call in taps.calls)
    return _Piece(losses.detach().double().cpu(), first, curvature, frozenset(unknown), reached)


def _first_order(call: Call, linear: nn.Linear, product: StandIn, R: int) -> Tensor | None:
    """<g, e> of each row of the loss, fp32 [R]; None where it cannot be said."""
    if call.g is None:
        return None
    N, K = linear.weight.shape
    lead = call.y.shape[:-1]
    if not math.prod(lead):
        return torch.zeros(R)
    switched = product(call.x.reshape(-1, K), linear.weight, linear.bias, out_dtype=call.y.dtype)
    e = switched.float() - call.y.reshape(-1, N).float()
    a_M = (e * call.g.reshape(-1, N).float()).sum(dim=1)
    return _by_loss_row(a_M, lead, R)


def _by_loss_row(a_M: Tensor, lead: torch.Size, R: int) -> Tensor | None:
    if lead.count(R) > 1:
        return None  # which of these dimensions are the rows of the loss?
    if R in lead:
        axis = lead.index(R)
        others = [d for d in range(len(lead)) if d != axis]
        a = a_M.view(lead)
        return a.sum(dim=others) if others else a
    return None if a_M.numel() % R else a_M.view(R, -1).sum(dim=1)


def _all_equal(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    """Whether gradients are the same up to rounding, in half precision too; none on either side is none."""
    for a, b in zip(some, others, strict=True):
        if a is None or b is None:
            some_one = a if a is not None else b
            if some_one is not None and int(some_one.count_nonzero()):
                return False
        elif float((a.float() - b.float()).norm()) > 1e-2 * float(b.float().norm()):
            return False
    return True


def _logit_curvature(total: Tensor, taps: Taps, R: int) -> Tensor | None:
    """The c of each row by its one logit, l'' / l'^2: fp64 [R] on the CPU; None where there is none.

    Leaves at every call the gradient that passes through that number, for the caller to hold against all of
    it: a linear with one output may be a gate.
    """
    heads = [call for call in taps.calls if call.y.shape[-1] == 1]
    if len(heads) != 1 or heads[0].out.numel() != R or heads[0].out._version:
        return None
    z = heads[0].out
    # A loss without a second derivative, or one that does not depend on z, says so by a RuntimeError.
    with contextlib.suppress(RuntimeError):
        (slope,) = torch.autograd.grad(total, z, create_graph=True)
        if not slope.requires_grad:
            return torch.zeros(R, dtype=torch.float64)
        (bend,) = torch.autograd.grad(slope.sum(), z, retain_graph=True)
        for call in taps.calls:
            call.arrived.clear()
        torch.autograd.grad(z, [taps.anchor], grad_outputs=slope.detach(), retain_graph=True)
        slope, bend = slope.detach().double().reshape(R), bend.double().reshape(R)
        # Where the slope vanishes so does every first-order change, and nothing can be said from them.
        return torch.where(slope != 0, bend / slope.square().clamp(min=1e-300), 0.0).cpu()
    return None
