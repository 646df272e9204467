"""What a kernel is: one product, one way of computing it (decisions 1 and 2)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from loka.numerics import Quantized
from loka.vocab import Accumulation, Device, GemmProblem, OperandSpec, Support

__all__ = ["Kernel"]


class Kernel(Protocol):
    """One way to compute D_mn = A_mk @ B_nk.T of two cast operands. Casting belongs to no kernel.

    Attributes:
        name: `<library>.<granularity>[.<variant>]`; no suffix `.fast` means exact accumulation.
        accumulation: How partial sums are kept.
        emulated: True where nothing is faster for it: FP8 numbers, computed in a wide format.
        exportable: Whether torch.export and AOTInductor can carry it.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - described above

    @property
    def accumulation(self) -> Accumulation: ...  # noqa: D102

    @property
    def emulated(self) -> bool: ...  # noqa: D102

    @property
    def exportable(self) -> bool: ...  # noqa: D102

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """Whether the kernel can run the problem on the device: a pure function, testable anywhere."""
        ...

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """The specs of A and B that the kernel takes for this problem's formats."""
        ...

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n] in `out_dtype`, plus bias [n]."""
        ...
