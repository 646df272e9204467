"""What is prepared: a kernel's product or a cast, in words that go to another process as a line of JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from loka.vocab import Format, GemmProblem, OperandSpec, shape_class

if TYPE_CHECKING:
    from loka.kernels.protocol import Kernel

__all__ = ["Answer", "CastTask", "ProductTask", "Task", "expected_seconds", "group_of", "kernel_type"]

# What a variant takes to compile on one core, by library; what is not named is compiled already. Only the
# order of the work depends on it.
_COMPILE_S = {"deep_gemm": 10.0, "triton": 5.0}
_CAST_S = 0.3  # many shapes share a variant
_VETTING_S = 1.0
_SECONDS_PER_ELEMENT = 1e-9


class ProductTask(msgspec.Struct, frozen=True, tag="product"):
    """Vet a kernel, where wanted, and run its product once, which compiles it and its casts.

    Attributes:
        kernel: Its name.
        type_: Its class, as `kernel_type` gives it: another process may know another kernel by the name.
        problem: What is run.
        dtypes: The formats in which the tensors of A and B arrive at the cast; a spec that is not quantized
            takes bf16.
        vet_as: The problem it is vetted at first; None where it need not be vetted.
        run_unfit: Run it even where it turns out wrong.
        given_scale: Casts of whole tensors are given their scale.
        biased: Run it with an fp32 bias.
    """

    kernel: str
    type_: str
    problem: GemmProblem
    dtypes: tuple[Format, Format] = (Format.BF16, Format.BF16)
    vet_as: GemmProblem | None = None
    run_unfit: bool = False
    given_scale: bool = False
    biased: bool = False

    @property
    def nbytes(self) -> int:
        """Memory of the device that it may take, roughly and rather too much."""
        problem = self.problem
        operands, out = (problem.m + problem.n) * problem.k, problem.m * problem.n
        return 8 * operands + 16 * out + (2**31 if self.vet_as is not None else 2**28)


class CastTask(msgspec.Struct, frozen=True, tag="cast"):
    """Cast a tensor once, which compiles the cast.

    Attributes:
        rows: Of the tensor.
        columns: Of the tensor.
        dtype: In which it arrives.
        specs: What is made of it in one call.
        given_scale: Casts of whole tensors are given their scale.
    """

    rows: int
    columns: int
    dtype: Format
    specs: tuple[OperandSpec, ...]
    given_scale: bool = False

    @property
    def nbytes(self) -> int:
        """Memory of the device that it may take."""
        return self.rows * self.columns * (6 + 4 * len(self.specs)) + 2**28


Task = ProductTask | CastTask


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What came of a task.

    Attributes:
        task: Its number in the order of what was asked.
        failed: Why it cannot be run; empty where it can.
        unfit: What vetting says against the kernel; empty where nothing.
        ended: It ended its process, or left the GPU unusable in it: not to be tried again in any process.
        left: Not tried, and another process has to: the kernel is unknown there, or memory was short.
        seconds: How long it took.
    """

    task: int = 0
    failed: str = ""
    unfit: str = ""
    ended: bool = False
    left: bool = False
    seconds: float = 0.0


def kernel_type(kernel: Kernel) -> str:
    """`module:Class` of a kernel."""
    return f"{type(kernel).__module__}:{type(kernel).__qualname__}"


def group_of(task: Task) -> tuple[str, ...]:
    """Tasks of one group go to one process, one after the other: they share a verdict or a compilation."""
    if isinstance(task, CastTask):
        recipes = sorted({str(spec) for spec in task.specs})
        return ("cast", str(task.dtype), str(task.given_scale), *recipes)
    return (task.kernel, str(task.vet_as is not None), shape_class(task.problem))


def expected_seconds(task: Task) -> float:
    """A guess, good enough to begin with what takes longest."""
    if isinstance(task, CastTask):
        return _CAST_S + task.rows * task.columns * _SECONDS_PER_ELEMENT
    problem = task.problem
    elements = (problem.m + problem.n) * problem.k + problem.m * problem.n
    compiling = _COMPILE_S.get(task.kernel.partition(".")[0], 0.0)
    vetting = 0.0 if task.vet_as is None else _VETTING_S + compiling + 5 * elements * _SECONDS_PER_ELEMENT
    return compiling + vetting + elements * _SECONDS_PER_ELEMENT
