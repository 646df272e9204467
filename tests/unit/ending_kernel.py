"""A kernel that ends its process or loses the device; a module like a backend's, so that workers find it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.kernels import kernel
from loka.kernels.base import BaseKernel
from loka.numerics import Quantized
from loka.timing import DeviceLostError
from loka.vocab import Device, GemmProblem, OperandSpec, Support

ENDS_AT, LOSES_AT, SHORT_AT = 48, 80, 112  # n


@dataclass(frozen=True, slots=True)
class Ending(BaseKernel):
    """Right at every other n."""

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        return Support.yes()

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        return kernel("torch.tensorwise").operands(problem)

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        n = b.values.shape[0]
        print("what a library prints is no answer")
        if n == ENDS_AT:
            os._exit(7)
        if n == LOSES_AT:
            raise DeviceLostError(self.name, "an illegal instruction was encountered")
        if n == SHORT_AT:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return kernel("torch.tensorwise").matmul(a, b, out_dtype=out_dtype, bias=bias)


KERNELS = (Ending("ending.tensorwise"),)
