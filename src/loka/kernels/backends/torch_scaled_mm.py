"""torch._scaled_mm: cuBLASLt on a GPU, oneDNN or plain loops on a CPU.

tensorwise   y = (q(x) @ q(w).T) * s_x * s_w
rowwise      y = (q(x) @ q(w).T) * s_x[:, None] * s_w[None, :]

Fast and exact accumulation are different kernels: the fast one is biased on data of one sign and grows
with k (31 % at k = 65,536 on positive data).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loka.kernels.base import BaseKernel
from loka.kernels.operands import linear_operands
from loka.kernels.rules import scaled_mm_rules
from loka.numerics import Quantized
from loka.vocab import (
    Accumulation,
    Device,
    GemmProblem,
    Granularity,
    OperandSpec,
    Pass,
    ScaleLayout,
    Support,
)

__all__ = ["KERNELS", "ScaledMM"]

_PAD_K = 16  # cuBLASLt's rule for 8-bit operands; the cast pads with zeros


@dataclass(frozen=True, slots=True)
class ScaledMM(BaseKernel):
    """One variant of torch._scaled_mm.

    Attributes:
        name: `torch.<granularity>[.<variant>]`.
        granularity: Of input and grad_output.
        weight_granularity: Of the weight in dgrad; a tensorwise scale is then repeated over the rows.
        passes: Where the variant is defined.
        accumulation: Exact or fast.
    """

    granularity: Granularity
    weight_granularity: Granularity
    passes: tuple[Pass, ...] = tuple(Pass)

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """See `loka.kernels.rules.scaled_mm_rules`."""
        if problem.pass_ not in self.passes:
            return Support.no(f"not defined for {problem.pass_}")
        return scaled_mm_rules(
            problem,
            device,
            rowwise=self.granularity is Granularity.ROWWISE,
            fast=self.accumulation is Accumulation.FAST,
        )

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """Both operands padded along k to a multiple of 16."""
        a, b = linear_operands(problem, self.granularity, self.weight_granularity, pad=_PAD_K)
        if self.granularity is Granularity.ROWWISE:
            b = replace(b, scale_layout=ScaleLayout.VECTOR)
        return a, b

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]; the bias is added inside where cuBLASLt can (bf16 and fp16 outputs)."""
        rowwise = self.granularity is Granularity.ROWWISE
        inside = bias is not None and out_dtype in (torch.bfloat16, torch.float16)
        # On a CPU the product runs through ordinary operators, which autocast would round to bf16.
        with torch.autocast(a.values.device.type, enabled=False):
            out = torch._scaled_mm(
                a.values,
                b.values.t(),
                a.scale[:, None] if rowwise else a.scale,
                b.scale[None, :] if rowwise else b.scale,
                bias=bias.to(out_dtype) if inside and bias is not None else None,
                out_dtype=out_dtype,
                use_fast_accum=self.accumulation is Accumulation.FAST,
            )
        return out if bias is None or inside else out + bias.to(out_dtype)


_T, _R = Granularity.TENSORWISE, Granularity.ROWWISE
_FAST = Accumulation.FAST

KERNELS = (
    ScaledMM("torch.tensorwise", _T, _T),
    ScaledMM("torch.tensorwise.fast", _T, _T, accumulation=_FAST),
    ScaledMM("torch.rowwise", _R, _R),
    ScaledMM("torch.rowwise.fast", _R, _R, accumulation=_FAST),
    ScaledMM("torch.rowwise.tensorwise_weight", _R, _T, passes=(Pass.DGRAD,)),
    ScaledMM("torch.rowwise.tensorwise_weight.fast", _R, _T, passes=(Pass.DGRAD,), accumulation=_FAST),
)
