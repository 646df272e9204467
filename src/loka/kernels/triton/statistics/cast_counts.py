"""What a cast made 0 and what its scale cut off, in one read of the values and of their codes."""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.numerics import CAST_COUNTS, OVER_LIMIT
from loka.vocab import Format

__all__ = ["counts_of_cast"]

_ROWS, _COLUMNS = 8, 256  # of a tile


@triton.jit
def cast_counts_kernel(
    values,
    codes,
    scale,
    found,
    R,
    C,
    values_stride,
    codes_stride,
    ZERO_BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Add to found int64 [4] what `loka.numerics.cast_counts` counts; a zero has none of the ZERO_BITS."""
    rows = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    columns = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    inside = (rows < R) & (columns < C)
    value = tl.load(values + rows * values_stride + columns, mask=inside, other=0.0)
    code = tl.load(codes + rows * codes_stride + columns, mask=inside, other=0)
    nonzero = value != 0.0
    zeroed = nonzero & ((code & ZERO_BITS) == 0)
    _add(found, zeroed)
    _add(found + 1, nonzero)
    if LIMIT is not None:
        limit = LIMIT * tl.load(scale)
        _add(found + 2, (value > limit) | (value < -limit))
    _add(found + 3, inside)


@triton.jit
def _add(place, what):
    tl.atomic_add(place, tl.sum(tl.sum(what.to(tl.int32), axis=1), axis=0).to(tl.int64), sem="relaxed")


def counts_of_cast(values: Tensor, codes: Tensor, format_: Format, scale: Tensor | None) -> Tensor:
    """`cast_counts` of fp32 values and uint8 codes [R, C], contiguous along the same dimension, not empty."""
    if values.stride(1) != 1 or codes.stride(1) != 1:
        values, codes = values.t(), codes.t()
    R, C = values.shape
    found = torch.zeros(CAST_COUNTS, dtype=torch.int64, device=values.device)
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(C)))
    rows = _ROWS * _COLUMNS // columns
    with torch.cuda.device_of(values):
        cast_counts_kernel[(triton.cdiv(R, rows), triton.cdiv(C, columns))](
            values,
            codes,
            values if scale is None else scale,
            found,
            R,
            C,
            values.stride(0),
            codes.stride(0),
            ZERO_BITS=format_.zero_bits,
            LIMIT=None if scale is None else format_.max * OVER_LIMIT,
            BR=rows,
            BC=columns,
            num_warps=4,
        )
    return found
