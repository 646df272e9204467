"""Times of every product that a plan could use, on the GPU in hand, each shape once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loka.artifacts.profile import ProductTable
from loka.kernels import HIGH_PRECISION, Kernel, cast
from loka.kernels.preparing import Prepared, Preparer, ProductTask, kernel_type
from loka.numerics import Quantized, format_of, torch_dtype
from loka.probe.timed_problems import timed_kernels, timed_problems
from loka.probe.timing_cost import Spent
from loka.timing import Timing, measure_or_reason
from loka.vocab import Device, Format, GemmProblem, Operand, OperandSpec, Site, shape_class

__all__ = ["product_tasks", "time_products"]

_log = logging.getLogger("loka.probe")

# At most 20 samples, and for long calls as many as this takes, at least 5: with 20 samples of a call of 3 ms
# by 15 kernels a shape would take a second.
_ROUNDS, _LEAST_ROUNDS, _BUDGET_US = 20, 5, 10_000.0
# Three times slower than the fastest after two rounds is no candidate; going on would only cost time.
_DROP_SLOWER_THAN, _DROP_AFTER = 3.0, 2


def product_tasks(
    sites: Sequence[Site], device: Device, *, dtypes: Mapping[Operand, torch.dtype]
) -> list[ProductTask]:
    """What `time_products` vets and runs: processes may do it before, beside each other.

    Args: as for `time_products`.
    """
    return [
        _task(kernel, problem)
        for problem in _problems(sites, dtypes)
        for kernel in timed_kernels(problem, device)
    ]


def time_products(
    sites: Sequence[Site],
    device: Device,
    where: torch.device,
    *,
    dtypes: Mapping[Operand, torch.dtype],
    on_shape: Callable[[str], None],
    prepared: Prepared | None = None,
) -> tuple[ProductTable, list[str]]:
    """Vet and time every real kernel on every (shape, pass), operands ready.

    Results come as training wants them: a weight's gradient in the weight's own dtype, the others in bf16.
    Only the E4M3 form is timed: E5M2 runs on the same units at the same rate. A kernel that is wrong in the
    class of a shape is timed all the same, marked as not vetted; one that fails is left out.

    Args:
        sites: Where the products are.
        device: Named in the table.
        where: Runs there.
        dtypes: The dtype of each operand as training holds it.
        on_shape: Told what is being timed.
        prepared: What was found about `product_tasks` before; the rest is vetted here.

    Returns:
        The table, and a note for each kernel that failed its vetting, or to run, in a class of shapes.

    Raises:
        DeviceLostError: where a kernel leaves the GPU unusable.
    """
    table, notes, spent = ProductTable(), _Notes(), Spent()
    prepared, preparer = prepared or Prepared(), Preparer(where)
    for problem in _problems(sites, dtypes):
        on_shape(f"{problem.pass_} {problem.key}")
        kernels = {kernel.name: kernel for kernel in timed_kernels(problem, device)}
        vetted: dict[str, bool] = {}
        for kernel in kernels.values():
            task = _task(kernel, problem)
            answer = prepared.of(task) or preparer.carry_out(task, kernel)
            if answer.unfit:
                notes.add(kernel, problem, "failed vetting", answer.unfit)
            if answer.failed:
                notes.add(kernel, problem, "failed", answer.failed)
            else:
                vetted[kernel.name] = not answer.unfit
        operands = _Operands(problem, where)
        measured = measure_or_reason(
            {name: _product_call(operands, kernels[name]) for name in vetted},
            device=where,
            rounds=_ROUNDS,
            drop_slower_than=_DROP_SLOWER_THAN,
            drop_after=_DROP_AFTER,
            keep=(HIGH_PRECISION,),
            budget_us=_BUDGET_US,
            least_rounds=_LEAST_ROUNDS,
        )
        cost = spent.add(measured, making=operands.seconds)
        _log.debug("%s %s: %s", problem.pass_, problem.key, cost)
        for name, timing in measured.timings.items():
            _add_product(table, device, problem, name, timing, vetted[name])
        for name, reason in measured.reasons.items():
            if name not in measured.timings:  # one that was too slow has a time, and no need of more samples
                notes.add(kernels[name], problem, "failed", reason)
    _log.info("products: %s", spent)
    return table, notes.texts


def _problems(sites: Sequence[Site], dtypes: Mapping[Operand, torch.dtype]) -> list[GemmProblem]:
    found = timed_problems(sites, weight_dtype=format_of(dtypes[Operand.WEIGHT]))
    return [problem for problem in found if problem.a_format is not Format.E5M2]


def _task(kernel: Kernel, problem: GemmProblem) -> ProductTask:
    """What PyTorch does by itself is not vetted.

    A weight's gradient is vetted as bf16 and, besides, as fp32: a kernel that rounds to 16 bits inside does
    no more than bf16 autocast does.
    """
    narrow = None if kernel.name == HIGH_PRECISION else replace(problem, out_dtype=Format.BF16)
    return ProductTask(kernel.name, kernel_type(kernel), problem, vet_as=narrow, run_unfit=True)


class _Notes:
    """A note for each kernel and class of shapes, however many shapes of the class there are."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str, str], str] = {}

    def add(self, kernel: Kernel, problem: GemmProblem, what: str, reason: str) -> None:
        """Keep the first of its class."""
        text = f"{kernel.name} {what} at {problem.pass_} {problem.key}: {reason}"
        self._texts.setdefault((kernel.name, shape_class(problem), what), text)

    @property
    def texts(self) -> list[str]:
        """In the order in which they were added."""
        return list(self._texts.values())


class _Operands:
    """The operands of one problem: each is drawn once, and cast once for all the kernels that take a spec.

    Attributes:
        problem: The problem.
        seconds: Of the host, so far: what casts compile, not how long they run.
    """

    def __init__(self, problem: GemmProblem, where: torch.device) -> None:
        self.problem = problem
        self.seconds = 0.0
        self._where = where
        self._drawn: dict[tuple[int, bool], Tensor] = {}
        self._made: dict[tuple[int, OperandSpec], Quantized] = {}

    def of(self, kernel: Kernel) -> tuple[Quantized, Quantized]:
        """A and B as the kernel takes them."""
        spec_a, spec_b = kernel.operands(self.problem)
        return self._one(self.problem.m, 0, spec_a), self._one(self.problem.n, 1, spec_b)

    def _one(self, rows: int, side: int, spec: OperandSpec) -> Quantized:
        if (side, spec) not in self._made:
            begun = time.monotonic()
            self._made[side, spec] = cast(self._tensor(rows, side, transposed=spec.transposed), (spec,))[0]
            self.seconds += time.monotonic() - begun
        return self._made[side, spec]

    def _tensor(self, rows: int, side: int, *, transposed: bool) -> Tensor:
        """The tensor that autograd would hold: its transpose where the spec says so."""
        if (side, transposed) not in self._drawn:
            generator = torch.Generator(device=self._where).manual_seed(side)
            shape = (self.problem.k, rows) if transposed else (rows, self.problem.k)
            self._drawn[side, transposed] = torch.randn(
                shape, generator=generator, device=self._where, dtype=torch.bfloat16
            )
        return self._drawn[side, transposed]


def _product_call(operands: _Operands, kernel: Kernel) -> Callable[[], object]:
    """The product; operands are cast when it is first called, so that a failure is the kernel's own."""
    out_dtype = torch_dtype(operands.problem.out_dtype)
    ready: list[tuple[Quantized, Quantized]] = []

    def call() -> Tensor:
        if not ready:
            ready.append(operands.of(kernel))
        return kernel.matmul(*ready[0], out_dtype=out_dtype)

    return call


def _add_product(
    table: ProductTable, device: Device, problem: GemmProblem, name: str, timing: Timing, vetted: bool
) -> None:
    table.device.append(device.name)
    table.m.append(problem.m)
    table.n.append(problem.n)
    table.k.append(problem.k)
    table.pass_.append(problem.pass_)
    table.out_dtype.append(problem.out_dtype)
    table.kernel.append(name)
    table.p10_us.append(timing.quantile(0.1))
    table.p50_us.append(timing.p50_us)
    table.p90_us.append(timing.quantile(0.9))
    table.vetted.append(vetted)
