"""Kernels that commit the faults of real libraries, on the memory that vetting gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from loka.kernels.base import BaseKernel
from loka.numerics import Quantized, product_of_operands
from loka.vocab import Device, GemmProblem, Granularity, OperandSpec, Support
from loka.vocab.operands import PASS_OPERANDS

Product = Callable[[Quantized, Quantized], Tensor]


def right(a: Quantized, b: Quantized) -> Tensor:
    return product_of_operands(a, b)


@dataclass(frozen=True, slots=True)
class Double(BaseKernel):
    """`product` in fp32, then rounded to the output's format."""

    _: KW_ONLY
    product: Product = right
    granularity: Granularity = Granularity.ROWWISE
    of_b: Granularity | None = None
    drops_bias: bool = False
    hides_bf16: bool = False
    transposes: bool = False
    needs_n: int = 1
    source: str = ""

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        good = problem.n % self.needs_n == 0
        return Support.yes() if good else Support.no(f"needs N % {self.needs_n} == 0, got N={problem.n}")

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        (_, ta), (_, tb) = PASS_OPERANDS[problem.pass_]
        return (
            OperandSpec.of(problem.a_format, self.granularity, transposed=ta, pad=16),
            OperandSpec.of(problem.b_format, self.of_b or self.granularity, transposed=tb, pad=16),
        )

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        out = self.product(a, b)
        if bias is not None and not self.drops_bias:
            out = out + bias
        if self.hides_bf16:
            out = out.bfloat16()
        return (out.t().contiguous() if self.transposes else out).to(out_dtype)

    def repro(self) -> str:
        return self.source


def unpadded_block_scales(a: Quantized, b: Quantized) -> Tensor:
    """torch v1: the scales of 128 x 128 blocks are read with rows padded to 4, and lie unpadded.

    Indices wrap around inside the buffer, as if more scales of other blocks lay behind it.
    """
    rows, blocks = b.scale.shape
    flat = b.scale.flatten()
    place = torch.arange(rows)[:, None] * (-(-blocks // 4) * 4) + torch.arange(blocks)
    return right(a, b._replace(scale=flat[place % flat.numel()]))


def unpadded_block_scales_to_the_end(a: Quantized, b: Quantized) -> Tensor:
    """The same with nothing to stop at the end of the buffer, as on the GPU."""
    rows, blocks = b.scale.shape
    return right(a, b._replace(scale=b.scale.as_strided((rows, blocks), (-(-blocks // 4) * 4, 1))))


def k_major_read_as_mn_major(a: Quantized, b: Quantized) -> Tensor:
    """mslk groupwise: scales that lie K-major are read as if the rows' were neighbours."""
    rows, blocks = a.scale.shape
    return right(a._replace(scale=a.scale.as_strided((rows, blocks), (1, rows))), b)


def accumulated(a: Quantized, b: Quantized, *, promote_every: int, bits: int = 13, step: int = 32) -> Tensor:
    """Tensorwise, summed as tensor cores of SM 9.0 do: aligned to the largest, cut `bits` below it.

    Args:
        a: [m, k].
        b: [n, k].
        promote_every: Steps after which the sum moves to fp32; the fast mode never does.
        bits: What is kept below the leading bit of the largest.
        step: Products added at once.
    """
    x, y = a.values.float(), b.values.float()
    total = torch.zeros(x.shape[0], y.shape[0])
    inside = torch.zeros_like(total)
    for count, start in enumerate(range(0, x.shape[1], step), 1):
        products = x[:, None, start : start + step] * y[None, :, start : start + step]
        largest = torch.maximum(products.abs().amax(dim=2), inside.abs())
        quantum = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - bits)
        cut = (products / quantum[..., None]).trunc().sum(dim=2) + (inside / quantum).trunc()
        inside = cut * quantum
        if count % promote_every == 0:
            total, inside = total + inside, torch.zeros_like(inside)
    return (total + inside) * a.scale * b.scale


def fast_accumulation(a: Quantized, b: Quantized) -> Tensor:
    return accumulated(a, b, promote_every=10**9)


def exact_accumulation(a: Quantized, b: Quantized) -> Tensor:
    return accumulated(a, b, promote_every=4)


def unwritten_tile(a: Quantized, b: Quantized) -> Tensor:
    out = torch.empty(a.values.shape[0], b.values.shape[0])
    done = right(a, b)
    out[:-16] = done[:-16]
    out[-16:, :-16] = done[-16:, :-16]
    return out


def swapped_scales(a: Quantized, b: Quantized) -> Tensor:
    return right(a._replace(scale=b.scale), b._replace(scale=a.scale))


def shifted_scales(a: Quantized, b: Quantized) -> Tensor:
    return right(a._replace(scale=a.scale.roll(1, 0)), b)


def one_scale_for_all(a: Quantized, b: Quantized) -> Tensor:
    return right(a._replace(scale=a.scale[:1].expand_as(a.scale)), b)


def a_block_late(a: Quantized, b: Quantized) -> Tensor:
    """The scale of the block of k before."""
    return right(a, b._replace(scale=b.scale.roll(1, 1)))


def without_the_last_of_k(a: Quantized, b: Quantized) -> Tensor:
    values = a.values.clone()
    last = int((values.view(torch.uint8) & 0x7F).amax(0).nonzero().max())
    values[:, last] = 0.0
    return right(a._replace(values=values), b)


def sixteen_past_k(a: Quantized, b: Quantized) -> Tensor:
    """Rows are read 16 too far, into the next row's numbers; behind the last row lies something else."""
    (m, k), n = a.values.shape, b.values.shape[0]
    longer = [q._replace(values=q.values.as_strided((rows, k + 16), (k, 1))) for q, rows in ((a, m), (b, n))]
    return product_of_operands(longer[0], longer[1])


def a_row_past_the_end(a: Quantized, b: Quantized) -> Tensor:
    """What a tile reads behind the last row is multiplied by zero, as if that made it harmless."""
    m, k = a.values.shape
    behind = a.values.as_strided((m + 1, k), (k, 1))[m:].float()
    return right(a, b) + 0.0 * behind.sum()
