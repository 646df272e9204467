"""FP8 on an MI300X: torch._scaled_mm over hipBLASLt in AMD's FNUZ formats. Written by contract, not run.

E4M3FNUZ ends at 240, not 448, and has no negative zero. A recipe asks for E4M3 or E5M2; these kernels take
the FNUZ twin of what was asked, so recipes need not know the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loka.kernels.backends.torch_scaled_mm import ScaledMM
from loka.kernels.rules import FNUZ, fnuz_scaled_mm_rules
from loka.numerics import Quantized
from loka.vocab import Device, GemmProblem, Granularity, OperandSpec, Support

__all__ = ["KERNELS", "FnuzScaledMM"]


@dataclass(frozen=True, slots=True)
class FnuzScaledMM(ScaledMM):
    """`torch.<granularity>.fnuz`; not verified."""

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """See `loka.kernels.rules.fnuz_scaled_mm_rules`."""
        return fnuz_scaled_mm_rules(problem, device)

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """As asked for, in FNUZ; formats that are FNUZ already stay."""
        twin = replace(
            problem,
            a_format=FNUZ.get(problem.a_format, problem.a_format),
            b_format=FNUZ.get(problem.b_format, problem.b_format),
        )
        return ScaledMM.operands(self, twin)

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]; rowwise writes bf16 only, another dtype is converted from it."""
        if self.granularity is Granularity.ROWWISE and out_dtype is not torch.bfloat16:
            out = ScaledMM.matmul(self, a, b, out_dtype=torch.bfloat16).to(out_dtype)
            return out if bias is None else out + bias.to(out_dtype)
        return ScaledMM.matmul(self, a, b, out_dtype=out_dtype, bias=bias)


_T, _R = Granularity.TENSORWISE, Granularity.ROWWISE

KERNELS = (
    FnuzScaledMM("torch.tensorwise.fnuz", _T, _T, verified=False),
    FnuzScaledMM("torch.rowwise.fnuz", _R, _R, verified=False),
)
