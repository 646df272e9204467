"""No kernel is believed: its output is checked before it may be chosen.

Wrong scale layouts run without an error, so the operands' scales differ strongly from row to row and block
to block, and the worst row counts, not only the norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka.kernels.cast_engine import cast
from loka.kernels.protocol import Kernel
from loka.numerics import product_of_operands
from loka.vocab import GemmProblem, Support

__all__ = ["vet"]

# A bf16 result of operands of both signs differs from FP64 by 2^-9 of an element at most, 1.7e-3 of a row.
# Fast accumulation adds up to 5.6e-3 at k = 131,072 on such data. A wrong scale is off by factors.
_WORST_ROW = 2e-2


def vet(kernel: Kernel, problem: GemmProblem, device: torch.device | str) -> Support:
    """Run the kernel on operands whose scales differ, against FP64 of the same operands, twice.

    Returns:
        Yes, or no with what was found: non-finite output, a ruined row, or two runs that differ.
    """
    spec_a, spec_b = kernel.operands(problem)
    generator = torch.Generator(device=device).manual_seed(0)
    a = cast(_uneven(problem.m, problem.k, generator), (spec_a.with_transposed(False),))[0]
    b = cast(_uneven(problem.n, problem.k, generator), (spec_b.with_transposed(False),))[0]
    first = kernel.matmul(a, b, out_dtype=torch.bfloat16)
    second = kernel.matmul(a, b, out_dtype=torch.bfloat16)
    if not bool(torch.isfinite(first).all()):
        return Support.no("non-finite output on finite operands")
    if not torch.equal(first, second):
        return Support.no("two runs on the same operands differ")
    worst = _worst_row(first, product_of_operands(a, b, dtype=torch.float64))
    if worst > _WORST_ROW:
        return Support.no(f"worst row is off by {worst:.2g} (limit {_WORST_ROW:.2g})")
    return Support.yes()


def _uneven(rows: int, k: int, generator: torch.Generator) -> Tensor:
    """[rows, k]: normal numbers whose size varies 2^12-fold over rows and over blocks of 32 columns."""
    place = generator.device

    def powers(low: int, high: int, shape: tuple[int, int]) -> Tensor:
        return torch.exp2(torch.randint(low, high, shape, generator=generator, device=place).float())

    x = torch.randn(rows, k, generator=generator, device=place)
    blocks = powers(-3, 4, (1, -(-k // 32))).repeat_interleave(32, dim=1)[:, :k]
    return x * powers(-6, 7, (rows, 1)) * blocks


def _worst_row(out: Tensor, ref: Tensor) -> float:
    diff = (out.double() - ref).norm(dim=1)
    size = ref.norm(dim=1)
    return float((diff / size.clamp(min=1e-300)).max()) if out.numel() else 0.0
