"""Moments of a tensor's columns, errors of products and casts: Triton on a GPU, plain torch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.numerics import Marginals, Moments, cast_counts, row_sums
from loka.vocab import Format

__all__ = ["cast_counts_of", "marginals_of", "merge_moments", "moments_of", "row_errors_of"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_kernels: Any = None
_sought = False


def moments_of(x: Tensor) -> Moments:
    """Statistics of the rows of x [rows, F]; no host synchronisation.

    On a GPU with Triton: one read of x up to 1,024 features, two above, and no copy of it. Counts are equal
    to those of `Moments.of`, sums in fp64 are so up to the order of addition.

    Args:
        x: Any float or integer dtype; bf16, fp16 and fp32 go through Triton.

    Raises:
        UsageError: if x is not 2-D.
    """
    if x.dim() != 2:
        raise UsageError(f"moments_of takes [rows, features], got shape {tuple(x.shape)}")
    kernels = _loaded() if x.is_cuda and x.dtype in _DTYPES and x.numel() else None
    found: Moments = Moments.of(x) if kernels is None else kernels.column_moments(x)
    return found


def marginals_of(x: Tensor) -> Marginals:
    """`Marginals.of(x)` of rows x [rows, F]; no host synchronisation.

    On a GPU with Triton: three reads and a handful of launches.

    Raises:
        UsageError: if x is not 2-D.
    """
    fits = x.dim() == 2 and x.is_cuda and x.dtype in _DTYPES and x.numel()
    kernels = _loaded() if fits else None
    found: Marginals = Marginals.of(x) if kernels is None else kernels.column_marginals(x)
    return found


def merge_moments(a: Moments, b: Moments) -> Moments:
    """`a.merge(b)`, in one launch on a GPU with Triton.

    Raises:
        UsageError: if they are of different numbers of features.
    """
    on_gpu = a.mean.is_cuda and a.mean.device == b.mean.device and a.mean.shape == b.mean.shape
    kernels = _loaded() if on_gpu and a.mean.numel() else None
    found: Moments = a.merge(b) if kernels is None else kernels.merged_moments(a, b)
    return found


def row_errors_of(out: Tensor, ref: Tensor) -> Tensor:
    """`loka.numerics.row_sums` of a product and its reference [m, n], fp64 [m, 6].

    On a GPU with Triton: one launch and one read; sums are equal up to the order of addition.
    """
    rows_lie = ref.numel() > 0 and out.stride(-1) == 1 and ref.stride(-1) == 1
    kernels = _loaded() if out.is_cuda and rows_lie else None
    found: Tensor = row_sums(out, ref) if kernels is None else kernels.error_row_sums(out, ref)
    return found


def cast_counts_of(values: Tensor, codes: Tensor, format_: Format, scale: Tensor | None) -> Tensor:
    """`loka.numerics.cast_counts` of a cast, int64 [4]; the same numbers.

    On a GPU with Triton: one read, two launches; codes that lie the other way round than the values are
    turned first.
    """
    lies = values.is_cuda and values.numel() and 1 in values.stride()
    kernels = _loaded() if lies else None
    if kernels is None:
        return cast_counts(values, codes, format_, scale)
    found: Tensor = kernels.counts_of_cast(values, codes_beside(values, codes), format_, scale)
    return found


def codes_beside(values: Tensor, codes: Tensor) -> Tensor:
    """Codes [R, C] contiguous along the dimension along which the values are."""
    if any(values.stride(d) == codes.stride(d) == 1 for d in (0, 1)):
        return codes
    return codes.contiguous() if values.stride(1) == 1 else codes.t().contiguous().t()


def _loaded() -> Any:
    """The Triton kernels, or None where Triton does not load: plain torch does the same, only slower."""
    global _kernels, _sought
    if not _sought:
        _sought = True
        try:
            import loka.kernels.triton.statistics as kernels
        except ImportError:
            return None
        _kernels = kernels
    return _kernels
