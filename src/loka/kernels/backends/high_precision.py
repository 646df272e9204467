"""bf16: the product as PyTorch would have run it, in the operands' own dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.kernels.base import BaseKernel
from loka.numerics import Quantized
from loka.vocab import Device, GemmProblem, OperandSpec, Support
from loka.vocab.operands import PASS_OPERANDS

__all__ = ["KERNELS", "HighPrecision"]


@dataclass(frozen=True, slots=True)
class HighPrecision(BaseKernel):
    """y = x @ w.T, dx = g @ w, dw = g.T @ x, nothing cast.

    Operands are views, so each pass is the very call that autograd of F.linear makes: bit-identical.
    """

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """Every problem on every device."""
        return Support.yes()

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """Both operands as they are, in the orientation of the pass."""
        (_, a_transposed), (_, b_transposed) = PASS_OPERANDS[problem.pass_]
        return (
            OperandSpec.high_precision(transposed=a_transposed),
            OperandSpec.high_precision(transposed=b_transposed),
        )

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n] in the operands' dtype, then in `out_dtype`."""
        if bias is not None:
            return torch.nn.functional.linear(a.values, b.values, bias.to(a.values.dtype)).to(out_dtype)
        return (a.values @ b.values.t()).to(out_dtype)


KERNELS = (HighPrecision("high_precision.bf16"),)
