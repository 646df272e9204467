"""The reference product: what every kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.numerics.quantized import Quantized, decode

__all__ = ["exact_product", "product_of_operands"]

_CHUNK_K = 4096


def exact_product(a_mk: Tensor, b_nk: Tensor) -> Tensor:
    """D_mn = A_mk @ B_nk.T of plain tensors in FP64: the truth that errors are measured against."""
    return a_mk.double() @ b_nk.double().t()


def product_of_operands(
    a: Quantized, b: Quantized, *, dtype: torch.dtype = torch.float32, bias: Tensor | None = None
) -> Tensor:
    """D_mn of two cast operands, decoded and accumulated in `dtype` (fp32 or fp64), bias added there.

    With fp64 this is the exact product of what the operands hold, so it separates a kernel's own error
    from the casts'. With fp32 it is the emulated kernel.

    Raises:
        UsageError: if the operands disagree in k.
    """
    if a.values.shape[1] != b.values.shape[1]:
        raise UsageError(
            f"the operands disagree in k: A holds {a.values.shape[1]}, B holds {b.values.shape[1]}"
        )
    a_mk, b_nk = decode(a, dtype=dtype), decode(b, dtype=dtype)
    out = _long_sum(a_mk, b_nk) if a_mk.shape[1] > _CHUNK_K else a_mk @ b_nk.t()
    return out if bias is None else out + bias.to(dtype)


def _long_sum(a_mk: Tensor, b_nk: Tensor) -> Tensor:
    """Chunks of k summed in FP64: one FP32 sum over k = 65,536 is off by 3e-6, more than "exact" may be."""
    total = sum(
        (x @ y.t()).double() for x, y in zip(a_mk.split(_CHUNK_K, 1), b_nk.split(_CHUNK_K, 1), strict=True)
    )
    return torch.as_tensor(total).to(a_mk.dtype)
