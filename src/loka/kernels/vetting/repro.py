"""A script for a library's authors: the failed product without LoKA, from operands made of a seed.

It imports torch and the library alone, builds FP8 values and strongly differing scales directly, calls the
library as the kernel's own `repro()` source does, compares with FP64 and exits 1 where the result is wrong
or two runs differ.
"""

from __future__ import annotations

import re

import torch

from loka.kernels.protocol import Kernel
from loka.kernels.vetting.limits import Limits, limits_of, one_sign_limit
from loka.kernels.vetting.repro_template import SCRIPT
from loka.kernels.vetting.verdict import Data, Trial
from loka.numerics import torch_dtype
from loka.vocab import GemmProblem, Granularity, OperandSpec, ScaleLayout

__all__ = ["repro_name", "repro_script"]


def repro_name(kernel: Kernel, trial: Trial) -> str:
    """The script's file name: `torch_rowwise_wgrad_48x272x18_e5m2_fp32.py`."""
    problem = trial.problem
    parts = [kernel.name, problem.pass_, problem.key, problem.a_format, trial.out_dtype]
    parts += ["one_signed"] if trial.data is Data.ONE_SIGNED else []
    return re.sub(r"\W", "_", "_".join(parts)) + ".py"


def repro_script(kernel: Kernel, trial: Trial, *, reason: str, device: torch.device | str) -> str:
    """The whole script; empty where the kernel is of no library, so that nobody else can be asked.

    Args:
        kernel: Its `repro()` is the call.
        trial: What failed. A bias is left out: the call takes none.
        reason: What vetting found, put at the head.
        device: Where it failed.
    """
    call = kernel.repro().strip()
    if not call:
        return ""
    problem = trial.problem
    spec_a, spec_b = kernel.operands(problem)
    limits = _limits(kernel, trial)
    return SCRIPT.substitute(
        name=kernel.name,
        pass_=problem.pass_,
        shape=f"m = {problem.m}, n = {problem.n}, k = {problem.k}",
        reason=_one_line(reason),
        device=str(torch.device(device)),
        m=problem.m,
        n=problem.n,
        k=problem.k,
        a=_operand_arguments(spec_a),
        b=_operand_arguments(spec_b),
        one_signed=trial.data is Data.ONE_SIGNED,
        out_dtype=str(torch_dtype(trial.out_dtype)),
        norm=f"{limits.norm:.2g}",
        row=f"{limits.row:.2g}",
        call=call,
        note=_note(problem, trial),
    )


def _limits(kernel: Kernel, trial: Trial) -> Limits:
    if trial.data is Data.ONE_SIGNED:
        limit = one_sign_limit(kernel.accumulation)
        return Limits(limit, 4 * limit)
    return limits_of(trial.out_dtype, kernel.accumulation)


def _one_line(text: str) -> str:
    # It stands in a docstring: nothing in an error's text may end that.
    return re.sub(r"\s+", " ", text).replace("\\", "/").replace('"', "'").strip() or "nothing was found"


def _note(problem: GemmProblem, trial: Trial) -> str:
    signs = "one sign" if trial.data is Data.ONE_SIGNED else "both signs"
    return f"{problem.a_format} x {problem.b_format}, operands of {signs}"


def _operand_arguments(spec: OperandSpec) -> str:
    """The arguments of `dict` in the script that describe an operand."""
    block_rows, block_k = _blocks(spec)
    return (
        f"dtype={torch_dtype(spec.format)}, most={spec.format.max if spec.is_quantized else 0}, "
        f"block_rows={block_rows}, block_k={block_k}, layout={str(spec.scale_layout)!r}, pad={spec.pad}, "
        f"transposed={spec.transposed}"
    )


def _blocks(spec: OperandSpec) -> tuple[int, int]:
    """Rows and columns that share a scale; 0 for all."""
    if not spec.is_quantized:
        return 0, 0
    if spec.granularity is Granularity.TENSORWISE and spec.scale_layout is not ScaleLayout.VECTOR:
        return 0, 0
    if spec.granularity in (Granularity.TENSORWISE, Granularity.ROWWISE):
        return 1, 0
    return spec.granularity.block_rows or 1, spec.granularity.block_k or 0
