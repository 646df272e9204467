"""What most kernels have in common: the defaults of the protocol."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from loka.vocab import Accumulation, GemmProblem, Support

__all__ = ["BaseKernel"]


@dataclass(frozen=True, slots=True)
class BaseKernel:
    """The protocol's fields with their usual values; see `loka.kernels.protocol.Kernel`."""

    name: str
    _: KW_ONLY
    accumulation: Accumulation = Accumulation.EXACT
    emulated: bool = False
    exportable: bool = True
    verified: bool = True

    def available(self) -> Support:
        """Yes: it needs nothing but torch."""
        return Support.yes()

    def warm_up(self, problem: GemmProblem, where: torch.device) -> None:
        """Nothing compiles."""

    def repro(self) -> str:
        """No library to report to."""
        return ""
