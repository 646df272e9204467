"""Carry out a task in this process."""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from loka.kernels.cast_engine import cast
from loka.kernels.preparing.tasks import Answer, CastTask, ProductTask, Task, kernel_type
from loka.kernels.protocol import Kernel
from loka.kernels.registry import HIGH_PRECISION, KERNELS
from loka.kernels.vetting import Vetting
from loka.numerics import Quantized, torch_dtype
from loka.timing import attempt
from loka.vocab import Format, Granularity, OperandSpec

__all__ = ["Preparer", "known_kernel"]


class Preparer:
    """Vets and runs; verdicts are kept from task to task.

    Args:
        where: The device.

    Attributes:
        where: The device.
        vetting: Each kernel once a shape class.
    """

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.vetting = Vetting()

    def carry_out(self, task: Task, kernel: Kernel | None = None) -> Answer:
        """Do what the task says.

        Args:
            task: What.
            kernel: The task's kernel, where the caller has it; else it is looked up.

        Returns:
            The answer, numbered 0.

        Raises:
            DeviceLostError: where the GPU answers nothing any more.
        """
        if isinstance(task, CastTask):
            name = f"cast to {' and '.join(map(str, task.specs))}"
            return Answer(failed=attempt(name, functools.partial(self._cast, task), where=self.where)[1])
        kernel = kernel or known_kernel(task)
        if kernel is None or not kernel.available():
            return Answer(left=True)
        unfit = ""
        if task.vet_as is not None and kernel.name != HIGH_PRECISION:
            examine = functools.partial(self.vetting.vetted, kernel, task.vet_as, self.where)
            verdict, failed = attempt(kernel.name, examine, where=self.where)
            if verdict is None:
                return Answer(failed=failed)
            unfit = verdict.support.reason if not verdict.support else ""
            if unfit and not task.run_unfit:
                return Answer(unfit=unfit)
        return Answer(failed=self._why_not_run(kernel, task), unfit=unfit)

    def _why_not_run(self, kernel: Kernel, task: ProductTask) -> str:
        # The class may have been vetted on another of its shapes, so this one may still have to compile.
        warm_up = functools.partial(kernel.warm_up, task.problem, self.where)
        failed = attempt(kernel.name, warm_up, where=self.where)[1]
        return failed or attempt(kernel.name, functools.partial(self._run, kernel, task), where=self.where)[1]

    def _run(self, kernel: Kernel, task: ProductTask) -> None:
        problem = task.problem
        sides = zip((problem.m, problem.n), kernel.operands(problem), task.dtypes, strict=True)
        a, b = (
            self._operand(rows, problem.k, spec, dtype, given=task.given_scale) for rows, spec, dtype in sides
        )
        bias = torch.zeros(problem.n, device=self.where) if task.biased else None
        kernel.matmul(a, b, out_dtype=torch_dtype(problem.out_dtype), bias=bias)

    def _operand(self, rows: int, k: int, spec: OperandSpec, dtype: Format, *, given: bool) -> Quantized:
        """Cast from a tensor as autograd would hold it: the transpose where the spec says so."""
        shape = (k, rows) if spec.transposed else (rows, k)
        x = self._drawn(*shape, dtype if spec.is_quantized else Format.BF16)
        return cast(x, (spec,), scale=self._scale(spec, given=given))[0]

    def _cast(self, task: CastTask) -> None:
        x = self._drawn(task.rows, task.columns, task.dtype)
        cast(x, task.specs, scale=self._scale(task.specs[0], given=task.given_scale))

    def _scale(self, spec: OperandSpec, *, given: bool) -> Tensor | None:
        whole = spec.is_quantized and spec.granularity is Granularity.TENSORWISE
        return torch.ones((), device=self.where) if given and whole else None

    def _drawn(self, rows: int, columns: int, dtype: Format) -> Tensor:
        generator = torch.Generator(device=self.where).manual_seed(0)
        return torch.randn(rows, columns, generator=generator, device=self.where, dtype=torch_dtype(dtype))


def known_kernel(task: ProductTask) -> Kernel | None:
    """The task's kernel in this process: of the registry, or of the module that defines its class.

    A module offers its kernels as the backends do, in a `KERNELS` of its own. None where neither has one of
    that name and class; what a script defines is known to that script's process only.
    """
    found = KERNELS.get(task.kernel)
    if found is not None and kernel_type(found) == task.type_:
        return found
    module = task.type_.partition(":")[0]
    if module == "__main__":
        return None
    try:
        offered = getattr(importlib.import_module(module), "KERNELS", ())
    except ImportError:
        return None
    return next((k for k in offered if k.name == task.kernel and kernel_type(k) == task.type_), None)
