"""What each row of a product adds to its error, in one read of the product and of its reference."""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.numerics import ROW_SUMS

__all__ = ["error_row_sums"]

_BLOCK = 2048


@triton.jit
def row_errors_kernel(out, ref, sums, n, out_stride, ref_stride, SUMS: tl.constexpr, BC: tl.constexpr):
    """One row a program; sums fp64 [m, 6] as `loka.numerics.row_sums`."""
    row = tl.program_id(0).to(tl.int64)
    noise = tl.zeros([BC], dtype=tl.float64)
    signal = tl.zeros([BC], dtype=tl.float64)
    signed = tl.zeros([BC], dtype=tl.float64)
    magnitudes = tl.zeros([BC], dtype=tl.float64)
    relative = tl.zeros([BC], dtype=tl.float64)
    nonzero = tl.zeros([BC], dtype=tl.int32)
    for left in range(0, n, BC):
        columns = left + tl.arange(0, BC)
        inside = columns < n
        value = tl.load(out + row * out_stride + columns, mask=inside, other=0.0).to(tl.float64)
        truth = tl.load(ref + row * ref_stride + columns, mask=inside, other=0.0).to(tl.float64)
        difference = value - truth
        magnitude = tl.abs(truth)
        counts = magnitude != 0.0
        noise += difference * difference
        signal += truth * truth
        signed += difference
        magnitudes += magnitude
        relative += tl.where(counts, tl.abs(difference) / tl.where(counts, magnitude, 1.0), 0.0)
        nonzero += counts.to(tl.int32)
    at = sums + row * SUMS
    tl.store(at, tl.sum(noise))
    tl.store(at + 1, tl.sum(signal))
    tl.store(at + 2, tl.sum(signed))
    tl.store(at + 3, tl.sum(magnitudes))
    tl.store(at + 4, tl.sum(relative))
    tl.store(at + 5, tl.sum(nonzero).to(tl.float64))


def error_row_sums(out: Tensor, ref: Tensor) -> Tensor:
    """`row_sums` of out and ref [m, n], contiguous along n and not empty, in one launch."""
    m, n = ref.shape
    sums = torch.empty((m, ROW_SUMS), dtype=torch.float64, device=ref.device)
    block = max(16, min(_BLOCK, triton.next_power_of_2(n)))
    with torch.cuda.device_of(ref):
        row_errors_kernel[(m,)](
            out,
            ref,
            sums,
            n,
            out.stride(0),
            ref.stride(0),
            SUMS=ROW_SUMS,
            BC=block,
            num_warps=8 if block >= 1024 else 4,
        )
    return sums
