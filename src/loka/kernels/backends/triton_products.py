"""LoKA's own Triton products: FP8 of any m, n and k, and a bf16 product for skinny sites.

tensorwise, rowwise   y = (q(x) @ q(w).T) * s_x * s_w
blockwise             y = sum over blocks of k: (q(x) @ q(w).T) * s_x[:, block] * s_w[:, block]

They serve what the libraries serve badly: N or K no multiple of 16, small N and K, and weight gradients whose
long k is split over programs (reduced through a workspace in a fixed order, so that runs are bitwise equal).
Triton is imported when a kernel is first asked whether it is available, or run.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.kernels.base import BaseKernel
from loka.kernels.operands import linear_operands
from loka.kernels.triton.products.rules import bf16_rules, fp8_rules
from loka.numerics import Quantized
from loka.numerics.dtypes import torch_dtype
from loka.vocab import (
    PASS_OPERANDS,
    Accumulation,
    Device,
    GemmProblem,
    Granularity,
    OperandSpec,
    Support,
)

__all__ = ["KERNELS", "TritonBF16", "TritonFP8"]

_PAD_K = 16  # rows of codes then start at multiples of 16 bytes, the widest load
_PRODUCTS = "loka.kernels.triton.products"


@functools.cache
def _installed() -> Support:
    try:
        importlib.import_module(f"{_PRODUCTS}.scaled")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # missing, broken or too old
        return Support.no(f"needs Triton, which cannot be loaded: {error}")
    return Support.yes()


@dataclass(frozen=True, slots=True)
class TritonFP8(BaseKernel):
    """One FP8 recipe.

    Attributes:
        name: `triton.<granularity>[.fast]`.
        granularity: Of input and grad_output.
        weight_granularity: Of the weight, in fwd and dgrad.
        accumulation: Exact or fast; blockwise is always exact.
    """

    granularity: Granularity
    weight_granularity: Granularity

    def available(self) -> Support:
        """Whether Triton can be imported."""
        return _installed()

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """See `loka.kernels.triton.products.rules.fp8_rules`."""
        return fp8_rules(problem, device)

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """Both operands padded along k to a multiple of 16; scales as they are, in any stride."""
        return linear_operands(problem, self.granularity, self.weight_granularity, pad=_PAD_K)

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]; the bias is added in fp32, before the one rounding."""
        out: Tensor
        if self.granularity is Granularity.BLOCKWISE_1X128:
            # A statement, not importlib: torch.compile traces the one and not the other.
            from loka.kernels.triton.products.blockwise import blockwise_product

            square_b = b.spec.granularity is Granularity.BLOCKWISE_128X128
            out = blockwise_product(
                a.values, b.values, a.scale, b.scale, bias, out_dtype, square_b, 0, 0, 0.0
            )
        else:
            from loka.kernels.triton.products.scaled import scaled_product

            fast = self.accumulation is Accumulation.FAST
            out = scaled_product(a.values, b.values, a.scale, b.scale, bias, out_dtype, fast, 0, 0, 0.0)
        return out

    def warm_up(self, problem: GemmProblem, where: torch.device) -> None:
        """Compile the problem's tiles by running it once on zeros."""
        spec_a, spec_b = self.operands(problem)
        k = problem.k + -problem.k % _PAD_K
        a, b = (_zeros(rows, k, spec, where) for rows, spec in ((problem.m, spec_a), (problem.n, spec_b)))
        bias = torch.zeros(problem.n, device=where) if problem.bias else None
        self.matmul(a, b, out_dtype=torch_dtype(problem.out_dtype), bias=bias)


def _zeros(rows: int, k: int, spec: OperandSpec, where: torch.device) -> Quantized:
    from loka.numerics import scale_shape

    values = torch.zeros((rows, k), dtype=torch.uint8, device=where).view(torch_dtype(spec.format))
    return Quantized(values, torch.ones(scale_shape(spec, rows, k), device=where), spec)


@dataclass(frozen=True, slots=True)
class TritonBF16(BaseKernel):
    """y = x @ w.T, dx = g @ w, dw = g.T @ x in the operands' own dtype, read where they lie.

    Nothing is cast or copied: operands are views in the pass's orientation. fp32 operands are multiplied in
    fp32, without TF32.
    """

    def available(self) -> Support:
        """Whether Triton can be imported."""
        return _installed()

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """See `loka.kernels.triton.products.rules.bf16_rules`."""
        return bf16_rules(problem, device)

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """Both operands as they are, in the orientation of the pass."""
        (_, a_transposed), (_, b_transposed) = PASS_OPERANDS[problem.pass_]
        return (
            OperandSpec.high_precision(transposed=a_transposed),
            OperandSpec.high_precision(transposed=b_transposed),
        )

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]: fp32 sums and bias, rounded once to `out_dtype`."""
        from loka.kernels.triton.products.bf16 import plain_product

        out: Tensor = plain_product(a.values, b.values, bias, out_dtype, a.values.dtype, 0, 0, 0.0)
        return out

    def warm_up(self, problem: GemmProblem, where: torch.device) -> None:
        """Compile the problem's tiles, for operands that lie as in its pass, by running it once on zeros."""
        specs = self.operands(problem)
        dtype = torch.bfloat16
        a, b = (
            Quantized(
                torch.zeros((problem.k, rows), dtype=dtype, device=where).t()
                if spec.transposed
                else torch.zeros((rows, problem.k), dtype=dtype, device=where),
                torch.ones((), device=where),
                spec,
            )
            for rows, spec in zip((problem.m, problem.n), specs, strict=True)
        )
        bias = torch.zeros(problem.n, device=where) if problem.bias else None
        self.matmul(a, b, out_dtype=torch_dtype(problem.out_dtype), bias=bias)


_T, _R = Granularity.TENSORWISE, Granularity.ROWWISE
_B1, _B2 = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
_FAST = Accumulation.FAST

KERNELS = (
    TritonFP8("triton.tensorwise", _T, _T),
    TritonFP8("triton.tensorwise.fast", _T, _T, accumulation=_FAST),
    TritonFP8("triton.rowwise", _R, _R),
    TritonFP8("triton.rowwise.fast", _R, _R, accumulation=_FAST),
    TritonFP8("triton.blockwise_1x128", _B1, _B2),
    TritonBF16("triton.bf16"),
)
