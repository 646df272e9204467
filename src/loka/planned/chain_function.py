"""A chain of linears and block norms in one autograd function: FP8 goes from norm to product inside it.

What a norm gives is cast straight from its fp32 result, by the static scale that its bound allows, and no
bf16 copy of it is made where only FP8 is wanted. On the way back the norm's gradient comes with its amax,
which spares the cast for the product before it a read. Only ordinary tensors enter and leave: FP8 must not
cross an autograd edge, where a gradient would be cast to FP8 without a scale.

Shapes: M rows; each link takes and gives [M, features].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka.kernels.block_norm import block_norm, block_norm_gradients, block_norm_operands
from loka.numerics import Quantized
from loka.planned.operands import (
    LinearRoutes,
    Use,
    cast_for,
    multiply,
    spec_of,
    uses_of,
    weight_for,
)
from loka.vocab import BlockNormSpec, Operand, Pass

__all__ = ["LinearLink", "NormLink", "planned_chain"]


class LinearLink(NamedTuple):
    """A linear; its tensors are the weight [N, K] and the bias [N] or None.

    Attributes:
        routes: What runs its passes at this M.
        compute_dtype: Of its output and of operands that are not quantized.
        fixed_at: Where among the fixed tensors the four of its weight begin, see `weight_for`; -1 for none.
    """

    routes: LinearRoutes
    compute_dtype: torch.dtype
    fixed_at: int = -1


class NormLink(NamedTuple):
    """A block norm; its tensors are the weight [N] or None, and None.

    Attributes:
        norm: Block, eps, and whether hard swish follows.
    """

    norm: BlockNormSpec


Links = tuple[LinearLink | NormLink, ...]


def planned_chain(x: Tensor, links: Links, tensors: tuple[Tensor | None, ...]) -> Tensor:
    """The links one after the other, differentiable once.

    Args:
        x: [M, K], in the compute dtype of the first linear where a norm comes first.
        links: In order.
        tensors: Two for each link, then four for each linear whose weight is fixed.

    Returns:
        [M, N] in the compute dtype of the last linear. Gradients come in the dtypes of their tensors.
    """
    asks = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, *tensors)
    )
    with torch.autocast("cpu", enabled=False):  # as in `planned_product`
        if asks:
            y: Tensor = _PlannedChain.apply(x, links, *tensors)  # type: ignore[no-untyped-call]
            return y
        return _run(x, links, tensors, [()] * len(links))[0]


class _Saved(NamedTuple):
    """What a link needs on the way back: a linear its operands, a norm its input and weight."""

    uses: tuple[Use, ...]
    tensors: tuple[Tensor | None, ...]


def _run(
    x: Tensor, links: Links, tensors: tuple[Tensor | None, ...], backward: list[tuple[Pass, ...]]
) -> tuple[Tensor, list[_Saved]]:
    """The output, and what each link keeps for the passes of its way back."""
    h = x
    norm: NormLink | None = None  # still to be computed, of h
    norm_weight: Tensor | None = None
    saved: list[_Saved] = []
    for at, link in enumerate(links):
        weight, bias = tensors[2 * at], tensors[2 * at + 1]
        if isinstance(link, NormLink):
            if norm is not None:
                h = block_norm(h, norm.norm, norm_weight)
            norm, norm_weight = link, weight
            saved.append(_Saved((), (h, weight)))
            continue
        passes = (Pass.FWD, *backward[at])
        if norm is not None:
            operands = _normed_for(passes, h, norm.norm, norm_weight, link)
        else:
            operands = cast_for(passes, Operand.INPUT, h, link.routes, link.compute_dtype)
        norm = None
        if weight is not None:  # every linear has one
            fixed = tensors[link.fixed_at : link.fixed_at + 4] if link.fixed_at >= 0 else ()
            operands |= weight_for(passes, weight, link.routes, link.compute_dtype, fixed)
        h = multiply(Pass.FWD, operands, link.routes, link.compute_dtype, bias)
        kept = tuple(use for use in operands if use[0] is not Pass.FWD)
        saved.append(_Saved(kept, tuple(t for use in kept for t in operands[use][:2])))
    return (h if norm is None else block_norm(h, norm.norm, norm_weight)), saved


def _normed_for(
    passes: tuple[Pass, ...], h: Tensor, norm: BlockNormSpec, weight: Tensor | None, link: LinearLink
) -> dict[Use, Quantized]:
    """What the passes take of the normalized h."""
    uses = uses_of(Operand.INPUT, passes)
    specs = tuple(spec_of(link.routes, use) for use in uses)
    return dict(zip(uses, block_norm_operands(h, norm, specs, weight), strict=True))


class _PlannedChain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Links, *tensors: Tensor | None) -> Tensor:
        needs = ctx.needs_input_grad
        backward: list[tuple[Pass, ...]] = []
        asked = [needs[0]]  # whether anything before a link asks for a gradient
        for at, link in enumerate(links):
            own = needs[2 + 2 * at], needs[3 + 2 * at]
            passes: tuple[Pass, ...] = ()
            if isinstance(link, LinearLink):
                wanted = ((Pass.DGRAD, asked[at]), (Pass.WGRAD, own[0]))
                passes = tuple(pass_ for pass_, needed in wanted if needed)
            backward.append(passes)
            asked.append(asked[at] or own[0] or own[1])
        y, saved = _run(x, links, tensors, backward)
        ctx.save_for_backward(*(t for part in saved for t in part.tensors))
        ctx.links, ctx.backward_passes, ctx.asked = links, backward, asked
        ctx.uses = [part.uses for part in saved]
        ctx.x_dtype = x.dtype
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        ctx.more = len(tensors) - 2 * len(links)
        # As in `planned_product`.
        unaliased: Tensor = torch.ops.aten._unsafe_view.default(y, y.shape)
        return unaliased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        links: Links = ctx.links
        kept = list(ctx.saved_tensors)
        found: list[Tensor | None] = [None] * (2 * len(links))
        amax: Tensor | None = None
        with torch.autocast("cpu", enabled=False):
            for at in range(len(links) - 1, -1, -1):
                link = links[at]
                weight_dtype, bias_dtype = ctx.dtypes[2 * at], ctx.dtypes[2 * at + 1]
                if isinstance(link, NormLink):
                    weight, h = kept.pop(), kept.pop()
                    g, of_weight, amax = block_norm_gradients(g, h, link.norm, weight)
                    if of_weight is not None and ctx.needs_input_grad[2 + 2 * at]:
                        found[2 * at] = of_weight.to(weight_dtype)
                else:
                    if ctx.needs_input_grad[3 + 2 * at]:
                        found[2 * at + 1] = g.sum(0).to(bias_dtype)
                    operands = _kept_operands(ctx.uses[at], kept, link.routes)
                    dtype = _dtype_before(links, at, ctx.x_dtype)
                    g, found[2 * at] = _way_back(
                        g, amax, operands, link, ctx.backward_passes[at], dtype, weight_dtype
                    )
                    amax = None
                if not ctx.asked[at]:
                    break
        return (g if ctx.needs_input_grad[0] else None), None, *found, *((None,) * ctx.more)


def _dtype_before(links: Links, at: int, x_dtype: torch.dtype) -> torch.dtype:
    """Of what a link takes: norms keep the dtype, linears give their compute dtype."""
    for link in reversed(links[:at]):
        if isinstance(link, LinearLink):
            return link.compute_dtype
    return x_dtype


def _kept_operands(uses: tuple[Use, ...], kept: list[Tensor], routes: LinearRoutes) -> dict[Use, Quantized]:
    """Takes what the link kept off the end of the list."""
    first = len(kept) - 2 * len(uses)
    own = kept[first:]
    del kept[first:]
    return {use: Quantized(own[2 * i], own[2 * i + 1], spec_of(routes, use)) for i, use in enumerate(uses)}


def _way_back(
    g: Tensor,
    amax: Tensor | None,
    operands: dict[Use, Quantized],
    link: LinearLink,
    passes: tuple[Pass, ...],
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of a linear's input (g itself where nobody asks for one) and of its weight."""
    operands |= cast_for(passes, Operand.GRAD_OUTPUT, g, link.routes, link.compute_dtype, amax=amax)
    of_weight = None
    if Pass.WGRAD in passes:
        of_weight = multiply(Pass.WGRAD, operands, link.routes, weight_dtype)
    if Pass.DGRAD in passes:
        g = multiply(Pass.DGRAD, operands, link.routes, input_dtype)
    return g, of_weight
