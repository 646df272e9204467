"""Times of every cast that a plan could use, on the GPU in hand, each shape once."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from loka.artifacts.profile import CastTable
from loka.kernels import cast
from loka.kernels.preparing import CastTask, Prepared
from loka.numerics import format_of
from loka.probe.timed_problems import timed_kernels, timed_problems
from loka.probe.timing_cost import Spent
from loka.timing import measure_or_reason
from loka.vocab import PASS_OPERANDS, Device, Operand, OperandSpec, Pass, Site

__all__ = ["cast_tasks", "time_casts"]

_log = logging.getLogger("loka.probe")

_ROUNDS, _LEAST_ROUNDS, _BUDGET_US = 20, 5, 10_000.0  # as for products

# Shape and dtype of a tensor to the casts that are wanted of it.
_Wanted = dict[tuple[int, int, torch.dtype], dict[tuple[OperandSpec, ...], None]]


def cast_tasks(
    sites: Sequence[Site], device: Device, *, dtypes: Mapping[Operand, torch.dtype]
) -> list[CastTask]:
    """What `time_casts` runs: processes may compile it before, beside each other.

    Args: as for `time_casts`.
    """
    return [
        CastTask(rows, columns, format_of(dtype), specs)
        for (rows, columns, dtype), spec_sets in _wanted(sites, device, dtypes).items()
        for specs in spec_sets
    ]


def time_casts(
    sites: Sequence[Site],
    device: Device,
    where: torch.device,
    *,
    dtypes: Mapping[Operand, torch.dtype],
    on_shape: Callable[[str], None],
    prepared: Prepared | None = None,
) -> tuple[CastTable, list[str]]:
    """Time every cast, and every pair of casts of one tensor that shares a read, that a plan could ask for.

    Args:
        sites: Where the tensors are.
        device: Named in the table.
        where: Runs there.
        dtypes: The dtype in which each operand arrives.
        on_shape: Told what is being timed.
        prepared: What was found about `cast_tasks` before: one that failed is not tried here.

    Returns:
        The table, and a note for each cast that failed.

    Raises:
        DeviceLostError: where a cast leaves the GPU unusable.
    """
    table, notes, spent = CastTable(), dict[str, None](), Spent()
    for (rows, columns, dtype), spec_sets in _wanted(sites, device, dtypes).items():
        on_shape(f"casts {rows}x{columns}")
        generator = torch.Generator(device=where).manual_seed(0)
        x = torch.randn(rows, columns, generator=generator, device=where, dtype=dtype)
        names = {specs: " and ".join(map(repr, specs)) for specs in spec_sets}
        failed = _failed_before(rows, columns, dtype, names, prepared)
        calls = {name: _cast_call(x, specs) for specs, name in names.items() if name not in failed}
        measured = measure_or_reason(
            calls, device=where, rounds=_ROUNDS, budget_us=_BUDGET_US, least_rounds=_LEAST_ROUNDS
        )
        shown = {name: " and ".join(map(str, specs)) for specs, name in names.items()}
        cost = spent.add(measured, shown=shown)
        _log.debug("casts %dx%d: %s", rows, columns, cost)
        for specs, name in names.items():
            if name not in measured.timings:
                reason = failed.get(name) or measured.reasons[name]
                notes[f"cast of {rows}x{columns} to {shown[name]} failed: {reason}"] = None
                continue
            table.device.append(device.name)
            table.rows.append(rows)
            table.columns.append(columns)
            table.from_dtype.append(format_of(dtype))
            table.producer.append("memory")
            table.specs.append(list(specs))
            table.p50_us.append(measured.timings[name].p50_us)
    _log.info("casts: %s", spent)
    return table, list(notes)


def _failed_before(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    names: Mapping[tuple[OperandSpec, ...], str],
    prepared: Prepared | None,
) -> dict[str, str]:
    """Why casts failed, by name."""
    if prepared is None:
        return {}
    answers = {
        name: prepared.of(CastTask(rows, columns, format_of(dtype), specs)) for specs, name in names.items()
    }
    return {name: answer.failed for name, answer in answers.items() if answer is not None and answer.failed}


def _wanted(sites: Sequence[Site], device: Device, dtypes: Mapping[Operand, torch.dtype]) -> _Wanted:
    wanted: _Wanted = {}
    for site in {(site.n, site.k, site.rows): site for site in sites}.values():
        shapes = {
            Operand.INPUT: (site.rows, site.k),
            Operand.WEIGHT: (site.n, site.k),
            Operand.GRAD_OUTPUT: (site.rows, site.n),
        }
        for operand, sets in _spec_sets(site, device).items():
            tensor = (*shapes[operand], dtypes[operand])
            wanted.setdefault(tensor, {}).update(dict.fromkeys(sets))
    return wanted


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
