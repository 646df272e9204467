"""FP8 numbers on any device: decode both operands, multiply and add in FP32.

Accumulation is exact. The result differs from a real kernel of the same operands only by that kernel's own
accumulation error; nothing here is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka.kernels.base import BaseKernel
from loka.kernels.operands import linear_operands
from loka.kernels.rules import emulated_rules
from loka.numerics import Quantized, product_of_operands
from loka.vocab import Device, GemmProblem, Granularity, OperandSpec, Pass, Support

__all__ = ["KERNELS", "Emulated"]


@dataclass(frozen=True, slots=True)
class Emulated(BaseKernel):
    """One recipe, emulated.

    Attributes:
        name: `emulated.<granularity>[.<variant>]`.
        granularity: Of input and grad_output.
        weight_granularity: Of the weight, in fwd and dgrad.
        passes: The passes the recipe is defined for.
    """

    granularity: Granularity
    weight_granularity: Granularity
    passes: tuple[Pass, ...] = tuple(Pass)
    emulated: bool = field(default=True, kw_only=True)

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """Any shape; the formats must be a pair that hardware has."""
        if problem.pass_ not in self.passes:
            return Support.no(f"not defined for {problem.pass_}")
        return emulated_rules(problem)

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """Natural layouts, no padding."""
        return linear_operands(problem, self.granularity, self.weight_granularity)

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]: decoded, summed in FP32, bias added in FP32, rounded once."""
        # Autocast would put this FP32 product back into bf16.
        with torch.autocast(a.values.device.type, enabled=False):
            return product_of_operands(a, b, bias=bias).to(out_dtype)


KERNELS = (
    Emulated("emulated.tensorwise", Granularity.TENSORWISE, Granularity.TENSORWISE),
    Emulated("emulated.rowwise", Granularity.ROWWISE, Granularity.ROWWISE),
    Emulated(
        "emulated.rowwise.tensorwise_weight",
        Granularity.ROWWISE,
        Granularity.TENSORWISE,
        passes=(Pass.DGRAD,),
    ),
    Emulated("emulated.blockwise_1x128", Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128),
    Emulated("emulated.mx_1x32", Granularity.MX_1X32, Granularity.MX_1X32),
)
