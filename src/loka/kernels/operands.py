"""The specs of a linear layer's operands, from the granularities of a recipe."""

from __future__ import annotations

from loka.vocab import PASS_OPERANDS, GemmProblem, Granularity, OperandSpec, Pass

__all__ = ["linear_operands"]


def linear_operands(
    problem: GemmProblem, granularity: Granularity, weight_granularity: Granularity, *, pad: int = 1
) -> tuple[OperandSpec, OperandSpec]:
    """Specs of A and B in their pass's orientation, with natural scale layouts.

    Args:
        problem: Tells the pass and the formats.
        granularity: Of input and grad_output.
        weight_granularity: Of the weight, which is B in fwd and dgrad; wgrad multiplies no weight.
        pad: The multiple to which the cast zero-pads k.
    """
    (_, a_transposed), (_, b_transposed) = PASS_OPERANDS[problem.pass_]
    of_b = granularity if problem.pass_ is Pass.WGRAD else weight_granularity
    return (
        OperandSpec.of(problem.a_format, granularity, transposed=a_transposed, pad=pad),
        OperandSpec.of(problem.b_format, of_b, transposed=b_transposed, pad=pad),
    )
