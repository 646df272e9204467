"""Times of every cast that a plan could use, on the GPU in hand, each shape once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from loka.artifacts.profile import CastTable
from loka.kernels import cast
from loka.numerics import format_of
from loka.probe.timed_problems import timed_kernels, timed_problems
from loka.timing import measure_or_reason
from loka.vocab import PASS_OPERANDS, Device, Operand, OperandSpec, Pass, Site

__all__ = ["time_casts"]

_ROUNDS = 20


def time_casts(
    sites: Sequence[Site],
    device: Device,
    where: torch.device,
    *,
    dtypes: Mapping[Operand, torch.dtype],
    on_shape: Callable[[str], None],
) -> tuple[CastTable, list[str]]:
    """Time every cast, and every pair of casts of one tensor that shares a read, that a plan could ask for.

    Args:
        sites: Where the tensors are.
        device: Named in the table.
        where: Runs there.
        dtypes: The dtype in which each operand arrives.
        on_shape: Told what is being timed.

    Returns:
        The table, and a note for each cast that failed.

    Raises:
        DeviceLostError: where a cast leaves the GPU unusable.
    """
    table, notes = CastTable(), dict[str, None]()
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
        calls = {" and ".join(map(repr, specs)): _cast_call(x, specs) for specs in spec_sets}
        measured = measure_or_reason(calls, device=where, rounds=_ROUNDS)
        for name, specs in zip(calls, spec_sets, strict=True):
            if name not in measured.timings:
                shown = " and ".join(map(str, specs))
                notes[f"cast of {rows}x{columns} to {shown} failed: {measured.reasons[name]}"] = None
                continue
            table.device.append(device.name)
            table.rows.append(rows)
            table.columns.append(columns)
            table.from_dtype.append(format_of(dtype))
            table.producer.append("memory")
            table.specs.append(list(specs))
            table.p50_us.append(measured.timings[name].p50_us)
    return table, list(notes)


def _cast_call(x: Tensor, specs: tuple[OperandSpec, ...]) -> Callable[[], object]:
    return lambda: cast(x, specs)


def _spec_sets(site: Site, device: Device) -> dict[Operand, list[tuple[OperandSpec, ...]]]:
    """For each operand: single specs, and the pairs from the two passes that use it which share a read.

    One recipe in two orientations is one call of the cast engine. Any other two casts of a tensor are two
    calls whose times add up, so their pair need not be timed.
    """
    by_use: dict[Operand, dict[Pass, list[OperandSpec]]] = {o: {p: [] for p in Pass} for o in Operand}
    for problem in timed_problems([site]):
        for kernel in timed_kernels(problem, device):
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
            out[operand] += [(a, b) for a, b in itertools.product(*used) if _share_a_read(a, b)]
    return out


def _share_a_read(a: OperandSpec, b: OperandSpec) -> bool:
    return a.recipe_key == b.recipe_key and a.transposed is not b.transposed
