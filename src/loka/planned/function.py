"""The three products of a linear layer in one autograd function, each on its own kernel.

    y_MN = x_MK @ w_NK.T        dx_MK = g_MN @ w_NK        dw_NK = g_MN.T @ x_MK

M rows, N output features, K input features; x input, w weight, g gradient of the output. A pass takes two of
the three tensors (`PASS_OPERANDS`); each tensor is cast once for all the passes that take it. Operands that
are not quantized enter in the compute dtype: the autocast dtype, or the input's own. FP8 stays inside: what
enters and leaves are ordinary tensors, because autograd casts a gradient to FP8 without a scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka.numerics import Quantized
from loka.planned.operands import LinearRoutes, cast_for, multiply, spec_of, weight_for
from loka.vocab import Operand, Pass

__all__ = ["planned_product"]


def planned_product(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    *,
    routes: LinearRoutes,
    compute_dtype: torch.dtype,
    fixed: tuple[Tensor | None, ...] = (),
) -> Tensor:
    """y_MN in `compute_dtype`, differentiable once in x, w and the bias.

    Args:
        x_MK: Input, any stride.
        w_NK: Weight.
        bias_N: Bias or None.
        routes: What runs fwd, dgrad and wgrad at this M.
        compute_dtype: Dtype of y and of operands that are not quantized.
        fixed: The weight as it was cast before, see `weight_for`.

    Returns:
        y_MN. Gradients come in the dtypes of x, w and the bias.
    """
    needs_grad = torch.is_grad_enabled() and (
        x_MK.requires_grad or w_NK.requires_grad or (bias_N is not None and bias_N.requires_grad)
    )
    # The dtypes are settled. Left on, a CPU's autocast would reach into kernels: torch._scaled_mm multiplies
    # there with aten's own matmul and would round its operands to bf16. A GPU's has nothing left to change,
    # and torch 2.11 loses its state when it traces the switch around operators that are Triton kernels.
    with torch.autocast("cpu", enabled=False):
        if needs_grad:
            y_MN: Tensor = _PlannedProduct.apply(  # type: ignore[no-untyped-call]
                x_MK, w_NK, bias_N, routes, compute_dtype, *fixed
            )
            return y_MN
        operands = cast_for((Pass.FWD,), Operand.INPUT, x_MK, routes, compute_dtype)
        operands |= weight_for((Pass.FWD,), w_NK, routes, compute_dtype, fixed)
        return multiply(Pass.FWD, operands, routes, compute_dtype, bias_N)


class _PlannedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        routes: LinearRoutes,
        compute_dtype: torch.dtype,
        *fixed: Tensor | None,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        backward = tuple(p for p, needed in ((Pass.DGRAD, needs[0]), (Pass.WGRAD, needs[1])) if needed)
        passes = (Pass.FWD, *backward)
        operands = cast_for(passes, Operand.INPUT, x_MK, routes, compute_dtype)
        operands |= weight_for(passes, w_NK, routes, compute_dtype, fixed)
        y_MN = multiply(Pass.FWD, operands, routes, compute_dtype, bias_N)

        kept = [use for use in operands if use[0] is not Pass.FWD]
        ctx.save_for_backward(*(t for use in kept for t in operands[use][:2]))
        ctx.kept = kept
        ctx.backward_passes = backward
        ctx.routes = routes
        ctx.compute_dtype = compute_dtype
        ctx.more = len(fixed)
        ctx.out_dtypes = {Pass.DGRAD: x_MK.dtype, Pass.WGRAD: w_NK.dtype}
        ctx.bias_dtype = bias_N.dtype if bias_N is not None and needs[2] else None
        # A kernel may end in a cast that casts nothing. torch 2.11's dynamo takes the result of such a no-op
        # for another tensor than the output, and every gradient of the compiled function is then zero. An
        # ordinary view would forbid in-place activations on y.
        unaliased: Tensor = torch.ops.aten._unsafe_view.default(y_MN, y_MN.shape)
        return unaliased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        operands = {
            use: Quantized(saved[2 * i], saved[2 * i + 1], spec_of(ctx.routes, use))
            for i, use in enumerate(ctx.kept)
        }
        gradients: dict[Pass, Tensor] = {}
        with torch.autocast("cpu", enabled=False):
            operands |= cast_for(
                ctx.backward_passes, Operand.GRAD_OUTPUT, g_MN, ctx.routes, ctx.compute_dtype
            )
            for pass_ in ctx.backward_passes:
                gradients[pass_] = multiply(pass_, operands, ctx.routes, ctx.out_dtypes[pass_])
            bias_gradient = None if ctx.bias_dtype is None else g_MN.sum(0).to(ctx.bias_dtype)
        none = (None,) * (2 + ctx.more)
        return gradients.get(Pass.DGRAD), gradients.get(Pass.WGRAD), bias_gradient, *none
