"""A kernel after which the GPU answers nothing in its process; workers find it in this module."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.kernels import kernel
from loka.kernels.base import BaseKernel
from loka.numerics import Quantized
from loka.vocab import Device, GemmProblem, OperandSpec, Support

LOSES_AT = 4096  # n


@dataclass(frozen=True, slots=True)
class Losing(BaseKernel):
    """Reads far outside of a tensor at one n."""

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        return kernel("torch.tensorwise").supports(problem, device)

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        return kernel("torch.tensorwise").operands(problem)

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        if b.values.shape[0] == LOSES_AT:
            far = torch.full((1,), 2**40, device=a.values.device)
            torch.zeros(8, device=a.values.device)[far].add_(1)
            torch.cuda.synchronize()
        return kernel("torch.tensorwise").matmul(a, b, out_dtype=out_dtype, bias=bias)


KERNELS = (Losing("losing.tensorwise"),)
