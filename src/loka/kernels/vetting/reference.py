"""The FP64 product of the distinct rows, and the error of a result against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.kernels.vetting.operands import PlacedOperand
from loka.numerics import Quantized, decode, product_of_operands

__all__ = ["Errors", "Reference", "errors_of", "reference_of"]

_CHUNK_ELEMENTS = 2**23  # 64 MiB in FP64
_BLOCK = 128  # a multiple of every granularity's block along k


@dataclass(frozen=True, slots=True)
class Reference:
    """What a result should be.

    Attributes:
        product: fp64 [distinct rows of A, distinct rows of B].
        size: What an element of that place usually is: |a_i| |b_j| times the root mean square over all
            places of product / (|a_i| |b_j|). Divided by it, no row and no column outweighs another.
        rows: Order of the rows of A; see `PlacedOperand.order`.
        columns: Order of the rows of B.
    """

    product: Tensor
    size: Tensor
    rows: Tensor | None
    columns: Tensor | None


@dataclass(frozen=True, slots=True)
class Errors:
    """Error of a result, each element relative to the larger of its own and the usual size of its place.

    Attributes:
        norm: Relative L2 error of the whole.
        row: Root mean square over the worst row.
        row_index: Which row that is.
        column: Root mean square over the worst column.
        column_index: Which column that is.
    """

    norm: float
    row: float
    row_index: int
    column: float
    column_index: int


def reference_of(a: PlacedOperand, b: PlacedOperand) -> Reference:
    """The exact product of the operands' distinct rows, in chunks of k that fit in bounded memory."""
    rows, columns, k = a.base.values.shape[0], b.base.values.shape[0], a.base.values.shape[1]
    place = a.base.values.device
    product = torch.zeros(rows, columns, dtype=torch.float64, device=place)
    squares = [torch.zeros(size, dtype=torch.float64, device=place) for size in (rows, columns)]
    step = max(1, _CHUNK_ELEMENTS // max(1, rows, columns) // _BLOCK) * _BLOCK
    for start in range(0, k, step):
        parts = [_slice(q, start, min(k, start + step)) for q in (a.base, b.base)]
        product += product_of_operands(*parts, dtype=torch.float64)
        for total, part in zip(squares, parts, strict=True):
            total += decode(part, dtype=torch.float64).square().sum(dim=1)
    size = squares[0].sqrt()[:, None] * squares[1].sqrt()[None, :]
    usual = torch.where(size > 0, product / size, 0.0).square().mean().sqrt()
    return Reference(product, size * usual, a.order, b.order)


def _slice(q: Quantized, start: int, stop: int) -> Quantized:
    scale = q.scale
    if scale.dim() == 2:
        block = q.spec.granularity.block_k or 1
        scale = scale[:, start // block : -(-stop // block)]
    return q._replace(values=q.values[:, start:stop], scale=scale)


def errors_of(out: Tensor, reference: Reference, *, bias: Tensor | None = None) -> Errors:
    """Compare every element of a result [m, n] with the reference.

    Args:
        out: Finite, any float dtype.
        reference: Of the same operands.
        bias: [n], added to the reference.
    """
    m, n = out.shape
    if out.numel() == 0:
        return Errors(0.0, 0.0, 0, 0.0, 0)
    # Below the smallest normal number of the result's format its rounding is no longer relative.
    least = torch.finfo(out.dtype).tiny
    added = out.new_zeros((), dtype=torch.float64) if bias is None else bias.double()
    rows = out.new_zeros(m, dtype=torch.float64)
    columns = out.new_zeros(n, dtype=torch.float64)
    signal, noise = (out.new_zeros((), dtype=torch.float64) for _ in range(2))
    step = max(1, _CHUNK_ELEMENTS // n)
    for start in range(0, m, step):
        want, size = (_placed(t, reference, start, min(m, start + step)) for t in _both(reference))
        want, size = want + added, size + added.abs()
        wrong = out[start : start + step].double() - want
        noise += _ratio(wrong, size).square().sum()
        signal += _ratio(want, size).square().sum()
        wrong = _ratio(wrong, torch.maximum(size, want.abs()).clamp(min=least)).square()
        rows[start : start + step] = wrong.sum(dim=1)
        columns += wrong.sum(dim=0)
    row, column = rows.max(dim=0), columns.max(dim=0)
    found = torch.stack([_ratio(noise, signal), row.values / n, column.values / m]).sqrt()
    where = torch.stack([row.indices, column.indices]).tolist()
    norm, worst_row, worst_column = found.tolist()
    return Errors(norm, worst_row, where[0], worst_column, where[1])


def _both(reference: Reference) -> tuple[Tensor, Tensor]:
    return reference.product, reference.size


def _placed(t: Tensor, reference: Reference, start: int, stop: int) -> Tensor:
    """Rows start..stop of the full result's reference."""
    t = t[start:stop] if reference.rows is None else t[reference.rows[start:stop]]
    return t if reference.columns is None else t[:, reference.columns]


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """A / b, 0 where a is 0: nothing is wrong with a zero where a zero should be."""
    return torch.where(a == 0, 0.0, a / b)
