"""What compiles, compiled before the first step: every kernel and cast of a plan, on the device in hand.

A Triton kernel compiles for a second when it is first launched, a DeepGEMM one for up to five. Each planned
site is therefore run once on zeros, forward and backward, before the plan is put on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from loka.artifacts.plan import Choice, SitePlan
from loka.errors import PlanMismatchError
from loka.kernels import kernel
from loka.numerics import format_of
from loka.planned import planned_product, routes_of
from loka.timing import attempt
from loka.vocab import Format, GemmProblem, Pass

__all__ = ["choice_problem", "row_counts", "warm_up"]

_USUAL_ROWS = 4096  # where nothing is known of M
_MOST_ROWS = 65536  # ranges beyond this are compiled when such a batch is seen, not for an invented one

# Activations come in bf16 under autocast, and in fp32 to the first layer of a tower.
_ARRIVALS = {
    torch.float32: (torch.bfloat16, torch.float32),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}

# Of input and weight: in a tower, in its first layer, in evaluation. Which casts share a read depends on it.
_NEEDS_GRAD = ((True, True), (False, True), (False, False))


def choice_problem(
    site: SitePlan, pass_: Pass, choice: Choice, rows: int, *, out_dtype: Format = Format.BF16
) -> GemmProblem:
    """The product that a choice is asked for, with the formats of its specs."""
    shape = GemmProblem.of_linear(pass_, rows=rows, out_features=site.n, in_features=site.k)
    return replace(
        shape,
        a_format=choice.spec_a.format,
        b_format=choice.spec_b.format,
        out_dtype=out_dtype,
        bias=site.bias and pass_ is Pass.FWD,
    )


def row_counts(site: SitePlan, seen: int = 0) -> list[int]:
    """An M for each range in which the site runs the same kernels; the M that was seen, in its range.

    Args:
        site: Its bounds make the ranges.
        seen: M of the model's batches; 0 where it is not known.
    """
    bounds = {c.m_below for pass_ in Pass for c in site.choices(pass_) if c.m_below is not None}
    counts = []
    for low, high in itertools.pairwise([1, *sorted(bounds), None]):
        if low is None or low == high:  # nothing lies below a first bound of 1
            continue
        if seen >= low and (high is None or seen < high):
            counts.append(seen)
        elif low > _MOST_ROWS:
            continue
        elif high is None:
            counts.append(max(low, _USUAL_ROWS))
        else:
            counts.append(min(high - 1, max(low, _MOST_ROWS)))
    return counts


def warm_up(planned: Iterable[tuple[nn.Linear, SitePlan]], *, rows: Mapping[str, int]) -> None:
    """Compile what the sites run, each shape once. Neither weights nor gradients change.

    Args:
        planned: Modules on the device they will run on, with what will be planned for them.
        rows: Site name to the M of its batches, where it is known.

    Raises:
        PlanMismatchError: naming every site whose kernels cannot be run.
        DeviceLostError: where one leaves the GPU unusable.
    """
    lines: list[str] = []
    done: set[tuple[object, ...]] = set()
    for module, site in planned:
        for count in row_counts(site, rows.get(site.name, 0)):
            routes = routes_of(site).for_rows(count)
            where, dtype = module.weight.device, module.weight.dtype
            key = (where, dtype, site.n, site.k, site.bias, count, routes)
            if key not in done:
                done.add(key)
                lines += _failures(module, site, count)
    if lines:
        raise PlanMismatchError(
            f"the plan names {len(lines)} sites that do not run here",
            lines=lines[:12],
            hint="make the plan without that kernel: `Requirement(deny=...)`",
        )


def _failures(module: nn.Linear, site: SitePlan, rows: int) -> list[str]:
    """A line for what fails first, or nothing."""
    where = module.weight.device
    for pass_ in Pass:
        choice = next(c for c in site.choices(pass_) if c.m_below is None or rows < c.m_below)
        out_dtype = format_of(module.weight.dtype) if pass_ is Pass.WGRAD else Format.BF16
        problem = choice_problem(site, pass_, choice, rows, out_dtype=out_dtype)
        call = functools.partial(kernel(choice.kernel).warm_up, problem, where)
        _, reason = attempt(choice.kernel, call, where=where)
        if reason:
            return [f"{site.name} {pass_}  {choice.kernel}  {reason}"]
    for arrives, needs_grad in itertools.product(_ARRIVALS.get(module.weight.dtype, ()), _NEEDS_GRAD):
        call = functools.partial(_rehearse, module, site, rows, arrives, needs_grad)
        _, reason = attempt(site.name, call, where=where)
        if reason:
            return [f"{site.name} at M={rows}  {reason}"]
    return []


def _rehearse(
    module: nn.Linear, site: SitePlan, rows: int, arrives: torch.dtype, needs_grad: tuple[bool, bool]
) -> None:
    """Forward and backward on zeros, as training under bf16 autocast does them: casts compile here too."""
    weight = module.weight.detach()
    compute = torch.bfloat16 if weight.dtype is torch.float32 else weight.dtype
    with torch.enable_grad():
        x = torch.zeros(rows, site.k, dtype=arrives, device=weight.device, requires_grad=needs_grad[0])
        w = weight.requires_grad_(needs_grad[1])
        y = planned_product(
            x,
            w,
            None if module.bias is None else module.bias.detach(),
            routes=routes_of(site).for_rows(rows),
            compute_dtype=compute,
        )
        if any(needs_grad):
            torch.autograd.grad(y, [t for t in (x, w) if t.requires_grad], torch.zeros_like(y))
