"""torch._scaled_mm: cuBLASLt on a GPU, oneDNN or plain loops on a CPU.

tensorwise   y = (q(x) @ q(w).T) * s_x * s_w
rowwise      y = (q(x) @ q(w).T) * s_x[:, None] * s_w[None, :]

Fast and exact accumulation are different kernels: the fast one is biased on data of one sign and grows
with k (31 % at k = 65,536 on positive data).
"""

from __future__ import annotations

from dataclasses import dataclass

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

__all__ = ["KERNELS", "ScaledMM", "added_after", "bias_inside"]

_PAD_K = 16  # cuBLASLt's rule for 8-bit operands; the cast pads with zeros

_REPRO = """\
import torch


def product(a, b, scale_a, scale_b, out_dtype):
    return torch._scaled_mm(
        a, b.t(), {scale_a}, {scale_b}, out_dtype=out_dtype, use_fast_accum={fast}
    )
"""


def bias_inside(bias: Tensor | None, out_dtype: torch.dtype) -> Tensor | None:
    """The bias as cuBLASLt's epilogue takes it: 16-bit, beside a 16-bit output; None where it cannot.

    The epilogue adds to the fp32 sum and rounds once. The bias itself is rounded to the output's dtype, as
    autocast does for F.linear. Adding an fp32 bias to a finished bf16 product would round twice.
    """
    return bias.to(out_dtype) if bias is not None and out_dtype in (torch.bfloat16, torch.float16) else None


def added_after(out: Tensor, bias: Tensor | None, inside: Tensor | None) -> Tensor:
    """The product with a bias that the epilogue did not take: fp32 to fp32, one rounding."""
    return out if bias is None or inside is not None else out + bias.to(out.dtype)


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
        vector = ScaleLayout.VECTOR if self.granularity is Granularity.ROWWISE else None
        return linear_operands(
            problem, self.granularity, self.weight_granularity, pad=_PAD_K, b_layout=vector
        )

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]; the bias is added inside where cuBLASLt can (bf16 and fp16 outputs)."""
        rowwise = self.granularity is Granularity.ROWWISE
        inside = bias_inside(bias, out_dtype)
        # On a CPU the product runs through ordinary operators, which autocast would round to bf16.
        with torch.autocast("cpu", enabled=False):
            out = torch._scaled_mm(
                a.values,
                b.values.t(),
                a.scale[:, None] if rowwise else a.scale,
                b.scale[None, :] if rowwise else b.scale,
                bias=inside,
                out_dtype=out_dtype,
                use_fast_accum=self.accumulation is Accumulation.FAST,
            )
        return added_after(out, bias, inside)

    def repro(self) -> str:
        """The same call without LoKA."""
        rowwise = self.granularity is Granularity.ROWWISE
        return _REPRO.format(
            scale_a="scale_a[:, None]" if rowwise else "scale_a",
            scale_b="scale_b[None, :]" if rowwise else "scale_b",
            fast=self.accumulation is Accumulation.FAST,
        )


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
