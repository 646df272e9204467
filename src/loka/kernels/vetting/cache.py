"""Verdicts kept by shape class."""

from __future__ import annotations

from dataclasses import replace

import torch

from loka.kernels.device import device_of
from loka.kernels.protocol import Kernel
from loka.kernels.vetting.examine import examine
from loka.kernels.vetting.verdict import Verdict
from loka.vocab import GemmProblem, Pass, shape_class

__all__ = ["Vetting"]


class Vetting:
    """Each kernel vetted once a shape class, pair of formats, form of the result and device.

    The caller holds it for as long as nothing of the machine or the libraries can change: a session of
    Probe, a benchmark. Nothing is kept elsewhere.
    """

    def __init__(self) -> None:
        self._verdicts: dict[tuple[str, ...], Verdict] = {}

    def vetted(self, kernel: Kernel, problem: GemmProblem, device: torch.device | str) -> Verdict:
        """The verdict on the kernel for the problem's shape class; examined now if it is the first of it.

        Where a shape of the class was examined before, the verdict tells of that shape: see its `checked`.
        fwd is examined with a bias, whether this problem has one or not, where the kernel supports that.
        """
        biased = replace(problem, bias=True)
        if problem.pass_ is Pass.FWD and kernel.supports(biased, device_of(device)):
            problem = biased
        formats = (problem.a_format, problem.b_format, problem.out_dtype)
        key = (kernel.name, shape_class(problem), *formats, str(problem.bias), str(torch.device(device)))
        if key not in self._verdicts:
            self._verdicts[key] = examine(kernel, problem, device)
        return self._verdicts[key]

    def __len__(self) -> int:
        return len(self._verdicts)
