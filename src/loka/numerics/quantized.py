"""A cast operand and how to read it back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from loka.vocab import Granularity, OperandSpec, ScaleLayout

__all__ = ["Quantized", "decode", "lay_out", "not_quantized", "scale_per_element", "scale_shape"]


class Quantized(NamedTuple):
    """An operand as a kernel takes it: x ~= values * scale.

    Attributes:
        values: [rows, k padded to spec.pad], contiguous along k. 8-bit, or the compute dtype for bf16 specs.
        scale: fp32 decode scales, laid out by spec.scale_layout; of shape () and without a value for bf16
            specs, whose scale nobody reads.
        spec: What it is.
    """

    values: Tensor
    scale: Tensor
    spec: OperandSpec


def not_quantized(values: Tensor, spec: OperandSpec) -> Quantized:
    """An operand as it is, [rows, k] in the compute dtype.

    Its scale is memory that is never filled: writing a one there would be a kernel for every operand of every
    step. `decode` and `scale_per_element` go by the spec.
    """
    return Quantized(values, torch.empty((), dtype=torch.float32, device=values.device), spec)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def scale_shape(spec: OperandSpec, rows: int, k: int) -> tuple[int, ...]:
    """Logical shape of the scales of an operand [rows, k], before `lay_out`."""
    if not spec.is_quantized or spec.granularity is Granularity.TENSORWISE:
        return ()
    if spec.granularity is Granularity.ROWWISE:
        return (rows,)
    block_rows, block_k = spec.granularity.block_rows or 1, spec.granularity.block_k or 1
    return (_ceil_div(rows, block_rows), _ceil_div(k, block_k))


def lay_out(scale: Tensor, layout: ScaleLayout, rows: int) -> Tensor:
    """Put scales into a kernel's memory layout; the values do not change.

    `vector` repeats a single scale over all rows, `mn_major` stores block scales with the row blocks
    contiguous, `mn_major_pad4` stores the k blocks contiguous in columns padded by zeros to a multiple of 4
    (what cuBLASLt reads for 128x128 blocks).
    """
    if layout is ScaleLayout.VECTOR and scale.dim() == 0:
        # A single row too must be a vector of stride 1, which `expand` would leave at 0.
        return scale.reshape(1).repeat(rows)
    if layout is ScaleLayout.MN_MAJOR:
        return scale.t().contiguous().t()
    if layout is ScaleLayout.MN_MAJOR_PAD4:
        pad = -scale.shape[1] % 4
        return torch.nn.functional.pad(scale, (0, pad)).contiguous()
    return scale


def scale_per_element(q: Quantized) -> Tensor:
    """The decode scale of each element, broadcastable to `q.values`: fp32 (), [rows, 1] or [rows, k]."""
    if not q.spec.is_quantized:
        return torch.ones((), device=q.values.device)
    rows, k = q.values.shape
    if q.scale.dim() == 0:
        return q.scale
    if q.scale.dim() == 1:
        return q.scale[:, None]
    block_rows, block_k = q.spec.granularity.block_rows or 1, q.spec.granularity.block_k or 1
    scale = q.scale[:, : _ceil_div(k, block_k)]
    full = scale.repeat_interleave(block_k, dim=1)[:, :k]
    return full.repeat_interleave(block_rows, dim=0)[:rows] if block_rows > 1 else full


def decode(q: Quantized, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values times scale in `dtype`, shape of `q.values` (zero padding included)."""
    if not q.spec.is_quantized:
        return q.values.to(dtype)
    return q.values.to(dtype) * scale_per_element(q).to(dtype)
