"""Times of every product and cast that a plan could use, on the GPU in hand, each shape once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from loka.artifacts.profile import CastTable, ProductTable
from loka.kernels import KERNELS, Kernel, cast, usable, vet
from loka.numerics import format_of
from loka.timing import Timing, measure
from loka.vocab import A_FORMATS, Device, Format, GemmProblem, Operand, OperandSpec, Pass, Site, Support
from loka.vocab.operands import PASS_OPERANDS

__all__ = ["time_casts", "time_products"]

_ROUNDS = 20


def _problems(sites: Iterable[Site]) -> list[GemmProblem]:
    """Unique problems of all passes, both gradient formats."""
    found: dict[GemmProblem, None] = {}
    for site, pass_ in itertools.product(sites, Pass):
        for grad in A_FORMATS[pass_]:
            problem = GemmProblem.of_linear(
                pass_, rows=site.rows, out_features=site.n, in_features=site.k, grad_format=grad
            )
            found[problem] = None
    return list(found)


def time_products(
    sites: Sequence[Site], device: Device, where: torch.device, *, on_shape: Callable[[str], None]
) -> tuple[ProductTable, list[str]]:
    """Time every real kernel on every (shape, pass); operands ready, bf16 output.

    Only the E4M3 form is timed: E5M2 runs on the same units at the same rate.

    Returns:
        The table, and a note for each kernel that failed its vetting.
    """
    table, notes = ProductTable(), []
    for problem in _problems(sites):
        if problem.a_format is Format.E5M2:
            continue
        on_shape(f"{problem.pass_} {problem.key}")
        runnable: list[tuple[Kernel, bool]] = []
        for kernel in KERNELS.values():
            if kernel.emulated or not usable(kernel, problem, device):
                continue
            quantized = kernel.operands(problem)[0].is_quantized
            verdict = vet(kernel, problem, where) if quantized else Support.yes()
            if not verdict:
                notes.append(
                    f"{kernel.name} failed vetting at {problem.pass_} {problem.key}: {verdict.reason}"
                )
            runnable.append((kernel, bool(verdict)))
        calls = {kernel.name: _product_call(kernel, problem, where) for kernel, _ in runnable}
        timings = measure(calls, device=where, rounds=_ROUNDS)
        for kernel, vetted in runnable:
            _add_product(table, device, problem, kernel.name, timings[kernel.name], vetted)
    return table, notes


def _product_call(kernel: Kernel, problem: GemmProblem, where: torch.device) -> Callable[[], object]:
    spec_a, spec_b = kernel.operands(problem)
    generator = torch.Generator(device=where).manual_seed(0)
    a = cast(_operand(problem.m, problem.k, spec_a, generator), (spec_a,))[0]
    b = cast(_operand(problem.n, problem.k, spec_b, generator), (spec_b,))[0]
    return lambda: kernel.matmul(a, b, out_dtype=torch.bfloat16)


def _operand(rows: int, k: int, spec: OperandSpec, generator: torch.Generator) -> Tensor:
    """The tensor that autograd would hold: its transpose where the spec says so."""
    shape = (k, rows) if spec.transposed else (rows, k)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)


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


def time_casts(
    sites: Sequence[Site],
    device: Device,
    where: torch.device,
    *,
    dtypes: dict[Operand, torch.dtype],
    on_shape: Callable[[str], None],
) -> CastTable:
    """Time every cast, and every pair of casts of one tensor, that a plan could ask for.

    Args:
        sites: Where the tensors are.
        device: Named in the table.
        where: Runs there.
        dtypes: The dtype in which each operand arrives.
        on_shape: Told what is being timed.
    """
    table = CastTable()
    wanted: dict[tuple[tuple[int, int], torch.dtype], dict[tuple[OperandSpec, ...], None]] = {}
    for site in sites:
        shapes = {
            Operand.INPUT: (site.rows, site.k),
            Operand.WEIGHT: (site.n, site.k),
            Operand.GRAD_OUTPUT: (site.rows, site.n),
        }
        for operand, sets in _spec_sets(site, device).items():
            wanted.setdefault((shapes[operand], dtypes[operand]), {}).update(dict.fromkeys(sets))
    for ((rows, columns), dtype), spec_sets in wanted.items():
        on_shape(f"casts {rows}x{columns}")
        generator = torch.Generator(device=where).manual_seed(0)
        x = torch.randn(rows, columns, generator=generator, device=where, dtype=dtype)
        timings = measure(
            {str(i): _cast_call(x, s) for i, s in enumerate(spec_sets)}, device=where, rounds=_ROUNDS
        )
        for i, specs in enumerate(spec_sets):
            table.device.append(device.name)
            table.rows.append(rows)
            table.columns.append(columns)
            table.from_dtype.append(format_of(dtype))
            table.producer.append("memory")
            table.specs.append(list(specs))
            table.p50_us.append(timings[str(i)].p50_us)
    return table


def _cast_call(x: Tensor, specs: tuple[OperandSpec, ...]) -> Callable[[], object]:
    return lambda: cast(x, specs)


def _spec_sets(site: Site, device: Device) -> dict[Operand, list[tuple[OperandSpec, ...]]]:
    """For each operand: single specs, and pairs of specs from the two passes that use it."""
    by_use: dict[Operand, dict[Pass, list[OperandSpec]]] = {o: {p: [] for p in Pass} for o in Operand}
    for problem in _problems([site]):
        for kernel in KERNELS.values():
            if kernel.emulated or not usable(kernel, problem, device):
                continue
            for (operand, _), spec in zip(
                PASS_OPERANDS[problem.pass_], kernel.operands(problem), strict=True
            ):
                if spec.is_quantized and spec not in by_use[operand][problem.pass_]:
                    by_use[operand][problem.pass_].append(spec)
    out: dict[Operand, list[tuple[OperandSpec, ...]]] = {}
    for operand, uses in by_use.items():
        used = [specs for specs in uses.values() if specs]
        out[operand] = [(spec,) for specs in used for spec in specs]
        if len(used) == 2:  # both passes that use the operand have a kernel
            out[operand] += list(itertools.product(*used))
    return out
