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
        verified: False for a kernel written by its library's contract alone, never run by us on hardware.
            Like every kernel it is picked only once it is vetted on the device itself.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - described above

    @property
    def accumulation(self) -> Accumulation: ...  # noqa: D102

    @property
    def emulated(self) -> bool: ...  # noqa: D102

    @property
    def exportable(self) -> bool: ...  # noqa: D102

    @property
    def verified(self) -> bool: ...  # noqa: D102

    def available(self) -> Support:
        """Whether the kernel's library is usable in this process; no with what is missing, old or broken.

        Loads the library, once. `supports` is about the device; this is about the installation.
        """
        ...

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

    def warm_up(self, problem: GemmProblem, where: torch.device) -> None:
        """Compile what would otherwise compile inside a training step; nothing where nothing compiles."""
        ...

    def repro(self) -> str:
        """Python source of `def product(a, b, scale_a, scale_b, out_dtype):`, free of LoKA.

        a [m, k], b [n, k] and the scales arrive as this kernel's operand specs say. It stands in the script
        that `loka doctor --vet --repro` writes for the library's authors. Empty where there is no library.
        """
        ...
