"""No kernel is believed: its output is checked before it may be chosen.

A wrong scale layout runs without an error, so does a kernel that leaves a tile unwritten or reads past its
operand. Each trial therefore has uneven scales, NaN around the operands and in the memory that the kernel
gets for its output, and counts the worst row and column, not only the norm.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from loka.kernels.device import device_of
from loka.kernels.protocol import Kernel
from loka.kernels.vetting.limits import HIDDEN_ROUNDING, limits_of, one_sign_limit
from loka.kernels.vetting.notes import LARGE, Notes, output_of
from loka.kernels.vetting.operands import PlacedOperand, make_operand
from loka.kernels.vetting.reference import Errors, Reference, errors_of, reference_of
from loka.kernels.vetting.verdict import Data, Trial, Verdict
from loka.vocab import Device, Format, GemmProblem, Pass, Support

__all__ = ["examine", "neighbour", "vet"]

_RUNS = 3
_RUNS_OF_LARGE = 2


def vet(kernel: Kernel, problem: GemmProblem, device: torch.device | str) -> Support:
    """`examine`, as the planner reads it: yes, or no with what was found, a nondeterministic kernel too."""
    return examine(kernel, problem, device).support


def examine(kernel: Kernel, problem: GemmProblem, device: torch.device | str) -> Verdict:
    """Run a kernel on known operands and compare every element with FP64 of the same operands.

    Trials: the problem's own shape several times, which must agree bitwise; with the bias, where the problem
    has one; wgrad with an fp32 result too, where the kernel supports it; data of one sign; and a neighbour
    off the tiles.
    A kernel that raises for a problem that it claims to support has failed.

    Args:
        kernel: Usable for the problem on the device; `Kernel.warm_up` is called first.
        problem: The shape, pass, formats and out_dtype.
        device: Where to run.
    """
    where = torch.device(device)
    here = device_of(where)
    notes = Notes(kernel, where)
    if notes.runs(Trial(problem), lambda: kernel.warm_up(problem, where)):
        _examine_two_signed(notes, problem, here, own=True)
        _examine_one_signed(notes, problem)
        other = neighbour(kernel, problem, here)
        if other is not None and notes.runs(Trial(other), lambda: kernel.warm_up(other, where)):
            _examine_two_signed(notes, other, here, own=False)
    return notes.verdict(problem)


def neighbour(kernel: Kernel, problem: GemmProblem, device: Device) -> GemmProblem | None:
    """The problem with m one less, and n and k less by the least that the kernel supports; None if none."""
    choices = itertools.product((problem.n - d for d in (1, 8, 16, 0)), (problem.k - d for d in (1, 16, 0)))
    for n, k in choices:
        near = replace(problem, m=max(1, problem.m - 1), n=n, k=k)
        if min(n, k) > 0 and near != problem and kernel.supports(near, device):
            return near
    return None


def _placed(notes: Notes, problem: GemmProblem, data: Data) -> tuple[PlacedOperand, PlacedOperand]:
    generator = torch.Generator(device=notes.where).manual_seed(0)
    spec_a, spec_b = notes.kernel.operands(problem)
    a = make_operand(problem.m, problem.k, spec_a, data, generator)
    return a, make_operand(problem.n, problem.k, spec_b, data, generator)


def _examine_two_signed(notes: Notes, problem: GemmProblem, here: Device, *, own: bool) -> None:
    a, b = _placed(notes, problem, Data.TWO_SIGNED)
    reference = reference_of(a, b)
    trial = Trial(problem, out_dtype=problem.out_dtype)
    out = output_of(notes, trial, a, b)
    if out is not None:
        errors = _judged(notes, trial, out, reference)
        notes.rel_err = errors.norm if own else notes.rel_err
        _repeat(notes, trial, a, b, out)
    del out
    if problem.bias:
        _examine_bias(notes, problem, a, b, reference)
    if problem.pass_ is Pass.WGRAD and _has_fp32(notes, problem, here):
        _examine_fp32(notes, problem, a, b, reference)


def _repeat(notes: Notes, trial: Trial, a: PlacedOperand, b: PlacedOperand, first: Tensor) -> None:
    runs = _RUNS_OF_LARGE if first.numel() > LARGE else _RUNS
    for _ in range(1, runs):
        again = output_of(notes, trial, a, b)
        if again is None:
            return
        if not torch.equal(first, again):
            count = int((first != again).sum())
            share = f"{count} of {first.numel()} elements"
            notes.differs.append((trial, f"two runs on the same operands differ in {share}"))
            return


def _examine_bias(
    notes: Notes, problem: GemmProblem, a: PlacedOperand, b: PlacedOperand, reference: Reference
) -> None:
    """A bias of the size of the results, whose numbers bf16 holds exactly."""
    trial = Trial(problem, out_dtype=problem.out_dtype, bias=True)
    generator = torch.Generator(device=notes.where).manual_seed(1)
    usual = reference.size.mean(dim=0) if reference.size.numel() else reference.size.new_ones(problem.n)
    usual = usual if reference.columns is None else usual[reference.columns]
    drawn = torch.randn(problem.n, generator=generator, device=notes.where)
    bias = (drawn * usual).bfloat16().float()
    out = output_of(notes, trial, a, b, bias)
    if out is not None:
        _judged(notes, trial, out, reference, bias)


def _has_fp32(notes: Notes, problem: GemmProblem, here: Device) -> bool:
    wide = replace(problem, out_dtype=Format.FP32)
    return problem.out_dtype is not Format.FP32 and bool(notes.kernel.supports(wide, here))


def _examine_fp32(
    notes: Notes, problem: GemmProblem, a: PlacedOperand, b: PlacedOperand, reference: Reference
) -> None:
    """The fp32 gradient of an fp32 weight. Rounded to 16 bits inside it is a remark: autocast does so too."""
    trial = Trial(problem, out_dtype=Format.FP32)
    out = output_of(notes, trial, a, b)
    if out is None:
        return
    errors = errors_of(out, reference)
    notes.checked.append(str(trial))
    notes.fp32_error = max(errors.norm, notes.fp32_error or 0.0)
    limits = limits_of(problem.out_dtype, notes.kernel.accumulation)
    text = _excess(errors, limits.norm, limits.row)
    if text:
        notes.wrong.append((trial, text))
    elif errors.norm > max(HIDDEN_ROUNDING, limits_of(Format.FP32, notes.kernel.accumulation).norm):
        notes.remarks.append(f"{trial}: rounded to 16 bits inside (off by {errors.norm:.2g})")


def _judged(
    notes: Notes, trial: Trial, out: Tensor, reference: Reference, bias: Tensor | None = None
) -> Errors:
    errors = errors_of(out, reference, bias=bias)
    notes.checked.append(str(trial))
    notes.rows.append(errors.row)
    notes.columns.append(errors.column)
    limits = limits_of(trial.out_dtype, notes.kernel.accumulation)
    text = _excess(errors, limits.norm, limits.row)
    if text:
        notes.wrong.append((trial, text))
    return errors


def _excess(errors: Errors, norm: float, row: float) -> str:
    """What is beyond the limits; empty where nothing is."""
    worst = max((errors.row, "row", errors.row_index), (errors.column, "column", errors.column_index))
    if worst[0] > row:
        return f"worst {worst[1]} {worst[2]} is off by {worst[0]:.2g} (limit {row:.2g})"
    if errors.norm > norm:
        return f"the whole is off by {errors.norm:.2g} (limit {norm:.2g})"
    return ""


def _examine_one_signed(notes: Notes, problem: GemmProblem) -> None:
    """Sums that only grow: what the fast mode loses at long k, and nobody sees on centred data."""
    trial = Trial(problem, Data.ONE_SIGNED, problem.out_dtype)
    a, b = _placed(notes, problem, Data.ONE_SIGNED)
    out = output_of(notes, trial, a, b)
    if out is None:
        return
    notes.one_sign_error = errors_of(out, reference_of(a, b)).norm
    notes.checked.append(str(trial))
    limit = one_sign_limit(notes.kernel.accumulation)
    if notes.one_sign_error > limit:
        notes.wrong.append((trial, f"off by {notes.one_sign_error:.2g} (limit {limit:.2g})"))
