"""The specs of a linear layer's operands, from the granularities of a recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from loka.numerics import Quantized, lay_out, scale_shape, torch_dtype
from loka.vocab import PASS_OPERANDS, GemmProblem, Granularity, OperandSpec, Pass, ScaleLayout

if TYPE_CHECKING:
    from loka.kernels.protocol import Kernel

__all__ = ["blank_operands", "linear_operands"]


def linear_operands(
    problem: GemmProblem,
    granularity: Granularity,
    weight_granularity: Granularity,
    *,
    pad: int = 1,
    a_layout: ScaleLayout | None = None,
    b_layout: ScaleLayout | None = None,
) -> tuple[OperandSpec, OperandSpec]:
    """Specs of A and B in their pass's orientation.

    Args:
        problem: Tells the pass and the formats.
        granularity: Of input and grad_output.
        weight_granularity: Of the weight, which is B in fwd and dgrad; wgrad multiplies no weight.
        pad: The multiple to which the cast zero-pads k.
        a_layout: How A's scales lie; the granularity's natural layout if None.
        b_layout: The same for B.
    """
    (_, a_transposed), (_, b_transposed) = PASS_OPERANDS[problem.pass_]
    of_b = granularity if problem.pass_ is Pass.WGRAD else weight_granularity
    a = OperandSpec.of(problem.a_format, granularity, transposed=a_transposed, pad=pad)
    b = OperandSpec.of(problem.b_format, of_b, transposed=b_transposed, pad=pad)
    return (
        a if a_layout is None else replace(a, scale_layout=a_layout),
        b if b_layout is None else replace(b, scale_layout=b_layout),
    )


def blank_operands(kernel: Kernel, problem: GemmProblem, where: torch.device) -> tuple[Quantized, Quantized]:
    """Operands of a kernel that are all zero, with scales of one: enough to make it compile.

    Returns:
        A [m, k] and B [n, k] with k padded, in the kernel's formats and layouts, without casting anything.
    """
    spec_a, spec_b = kernel.operands(problem)
    return _blank(spec_a, problem.m, problem.k, where), _blank(spec_b, problem.n, problem.k, where)


def _blank(spec: OperandSpec, rows: int, k: int, where: torch.device) -> Quantized:
    padded = k + -k % spec.pad
    values = torch.zeros((rows, padded), dtype=torch.uint8, device=where).view(torch_dtype(spec.format))
    ones = torch.ones(scale_shape(spec, rows, padded), device=where)
    return Quantized(values, lay_out(ones, spec.scale_layout, rows), spec)
