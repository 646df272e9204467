"""Compile and vet beside each other, in processes of their own, before anything is timed.

See `loka.kernels.preparing` for the processes. A kernel that kills the CUDA context or hangs takes only its
process along, and has a reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from loka.bench.accounting import Pair
from loka.bench.settings import GemmBench
from loka.kernels import HIGH_PRECISION, Kernel, device_of, usable
from loka.kernels.preparing import ProductTask, kernel_type, prepare_all
from loka.vocab import PASS_OPERANDS, Format, Operand

__all__ = ["Verdicts", "prepare"]

# Pair key to kernel name to why it is not timed there; empty where it is.
Verdicts = dict[str, dict[str, str]]


def prepare(
    settings: GemmBench,
    *,
    workers: int,
    left_out: Mapping[str, Mapping[str, str]] | None = None,
    done: Collection[str] = (),
) -> Verdicts:
    """Compile and vet every usable kernel at every pair.

    Args:
        settings: What will be timed, and where.
        workers: Processes.
        left_out: Pair key to kernels that are not to be tried, and why.
        done: Keys of pairs that were timed before and need nothing.

    Returns:
        Why each kernel is not timed at each pair, empty where it is. What no process could answer, such as a
        kernel that only this program knows, is not in it.
    """
    where = torch.device(settings.device)
    device = device_of(where)
    known: Verdicts = {key: dict(reasons) for key, reasons in (left_out or {}).items()}
    tasks = {
        (pair.key, kernel.name): _task(pair, kernel)
        for pair in settings.pairs
        if pair.key not in done
        for kernel in settings.chosen()
        if kernel.name not in known.get(pair.key, {}) and usable(kernel, pair.problem, device)
    }
    prepared = prepare_all(tasks.values(), where, workers=workers)
    for (pair, kernel), task in tasks.items():
        answer = prepared.of(task)
        if answer is not None:
            known.setdefault(pair, {})[kernel] = answer.unfit or answer.failed
    return known


def _task(pair: Pair, kernel: Kernel) -> ProductTask:
    """All that will be timed of the kernel, once: casts from what the pass finds in memory, product, bias."""
    problem = pair.problem
    a, b = (
        Format.FP32 if operand is Operand.WEIGHT else Format.BF16 for operand, _ in PASS_OPERANDS[pair.pass_]
    )
    return ProductTask(
        kernel.name,
        kernel_type(kernel),
        problem,
        dtypes=(a, b),
        vet_as=None if kernel.name == HIGH_PRECISION else problem,
        biased=problem.bias,
    )
