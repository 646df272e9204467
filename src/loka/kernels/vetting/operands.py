"""Operands that show a fault: scales that differ strongly, edges that count, NaN all around.

Few rows are distinct. A tall operand repeats them in random order, so that its reference is a small FP64
product and yet every element of a large result is checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.kernels.cast_engine import cast
from loka.kernels.vetting.poison import guarded_copy, guarded_empty
from loka.kernels.vetting.verdict import Data
from loka.numerics import Quantized, lay_out
from loka.vocab import OperandSpec

__all__ = ["PlacedOperand", "distinct_rows", "make_operand"]

_DISTINCT_ELEMENTS = 2**24
_MOST_ROWS = 1024
_LEAST_ROWS = 48
_LEAST_BLOCKS = 3
_EDGE = 16


@dataclass(frozen=True, slots=True)
class PlacedOperand:
    """An operand as the kernel gets it, and as the reference reads it.

    Attributes:
        full: [rows, k], in guarded memory.
        base: [distinct rows, k], the same numbers.
        order: int64 [rows]: which distinct row each row is; None where `base` has all rows in order.
    """

    full: Quantized
    base: Quantized
    order: Tensor | None


def distinct_rows(rows: int, k: int, block_rows: int) -> int:
    """How many rows of an operand are drawn: all of a small one, at least three blocks of scales."""
    limit = min(_MOST_ROWS, max(_LEAST_ROWS, _DISTINCT_ELEMENTS // max(1, k)))
    if block_rows > 1:
        limit = max(_LEAST_BLOCKS, limit // block_rows) * block_rows
    return min(rows, limit)


def make_operand(
    rows: int, k: int, spec: OperandSpec, data: Data, generator: torch.Generator
) -> PlacedOperand:
    """Draw, cast by the cast engine and place one operand.

    Args:
        rows: m for A, n for B.
        k: The contracted length, before padding.
        spec: As the kernel asks; the cast gets the tensor that autograd would hold, [k, rows] where the spec
            is transposed.
        data: What to draw.
        generator: Decides the numbers, and the device.
    """
    block_rows = spec.granularity.block_rows or 1 if spec.is_quantized else 1
    distinct = distinct_rows(rows, k, block_rows)
    draw = _uneven if data is Data.TWO_SIGNED else _positive
    x = draw(distinct, k, generator)
    x = x if spec.is_quantized else x.bfloat16()
    held = x.t().contiguous() if spec.transposed else x
    base = cast(held, (spec,))[0]
    if distinct == rows:
        full = base._replace(values=guarded_copy(base.values), scale=guarded_copy(base.scale))
        return PlacedOperand(full, base, None)
    blocks = torch.randint(
        0,
        distinct // block_rows,
        (-(-rows // block_rows),),
        generator=generator,
        device=generator.device,
    )
    inside = torch.arange(block_rows, device=generator.device)
    order = (blocks[:, None] * block_rows + inside).flatten()[:rows]
    scale = base.scale if base.scale.dim() == 0 else lay_out(base.scale[blocks], spec.scale_layout, rows)
    full = Quantized(_repeated(base.values, order, spec), guarded_copy(scale), spec)
    return PlacedOperand(full, base, order)


def _repeated(values: Tensor, order: Tensor, spec: OperandSpec) -> Tensor:
    """values[order] in guarded memory; a view that is not K-major stays one."""
    rows, k = order.numel(), values.shape[1]
    upright = values.stride(1) == 1 or k == 1
    stride = (k, 1) if upright else (1, rows)
    out = guarded_empty((rows, k), stride, values.dtype, values.device)
    # Indexing of 8-bit floats does not exist everywhere; that of their bytes does.
    source, target = (t.view(torch.uint8) if spec.is_quantized else t for t in (values, out))
    if upright:
        torch.index_select(source, 0, order, out=target)
    else:
        torch.index_select(source.t(), 1, order, out=target.t())
    return out


def _uneven(rows: int, k: int, generator: torch.Generator) -> Tensor:
    """[rows, k]: normal numbers whose size differs 2^6-fold over rows, 2^6-fold over blocks of 128 x 128.

    And 4-fold over 1 x 128 and over 1 x 32, so that scales of every granularity differ from their
    neighbours. The last columns of k are enlarged until they weigh as much as all others: what a kernel
    leaves out or reads too much at the edge shows at any k.
    """
    place = generator.device

    def powers(most: int, *shape: int) -> Tensor:
        drawn = torch.randint(-most, most + 1, shape, generator=generator, device=place)
        return torch.exp2(drawn.float())

    x = torch.randn(rows, k, generator=generator, device=place)
    x *= powers(3, rows, 1)
    x *= _spread(powers(3, -(-rows // 128), -(-k // 128)), 128, k).repeat_interleave(128, dim=0)[:rows]
    x *= _spread(powers(1, rows, -(-k // 128)), 128, k)
    x *= _spread(powers(1, 1, -(-k // 32)), 32, k)
    edge = k % _EDGE or min(_EDGE, k)
    if edge < k:
        x[:, k - edge :] *= _weight_of_edge(x, edge)
    # Keeps results within the range of fp16, whatever k is.
    return x * 2.0 ** -(5 + round(math.log2(max(1, k)) / 4))


def _weight_of_edge(x: Tensor, edge: int) -> Tensor:
    """[rows, 1]: what makes the last `edge` columns weigh as much in a dot product as all others.

    A sum of n products of independent numbers of sizes a and b is about a b sqrt(n), so edge^(1/2) beta^2
    must be k^(1/2).
    """
    k = x.shape[1]
    rest, last = (part.square().mean(dim=1, keepdim=True).sqrt() for part in x.split([k - edge, edge], dim=1))
    wanted = rest / last.clamp(min=2.0**-60) * (k / edge) ** 0.25
    return torch.exp2(wanted.clamp(min=2.0**-60).log2().round())


def _spread(blocks: Tensor, size: int, k: int) -> Tensor:
    return blocks.repeat_interleave(size, dim=1)[:, :k]


def _positive(rows: int, k: int, generator: torch.Generator) -> Tensor:
    """[rows, k]: uniform in (0, 1) / sqrt(k), as after a ReLU: every partial sum grows."""
    x = torch.rand(rows, k, generator=generator, device=generator.device)
    return x * 2.0 ** -round(math.log2(max(1, k)) / 2)
