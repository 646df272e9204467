"""Block RMS normalization with hard swish, to bf16 or straight to FP8: Triton on a GPU, else plain torch.

The formulas stand in `loka.numerics.block_norm`; here they meet dtypes, devices and casts.
Shapes: M rows, N features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.kernels.cast_engine import cast
from loka.numerics import Quantized, block_rms_norm, block_rms_norm_gradients, bound_scale, cast_operand
from loka.vocab import BlockNormSpec, Granularity, OperandSpec

__all__ = ["block_norm", "block_norm_gradients", "block_norm_operands", "load_norms", "static_scale"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_kernels: Any = None
_sought = False


def block_norm(x: Tensor, norm: BlockNormSpec, weight: Tensor | None = None) -> Tensor:
    """Normalize x [..., N] over blocks of its features; on a GPU in one read and one write.

    Args:
        x: bf16, fp16, fp32 or fp64, any stride.
        norm: Block, eps, and whether hard swish follows, with no rounding in between.
        weight: [N] or None.

    Returns:
        x's shape and dtype, contiguous; differentiable once in x and weight on a GPU, at will on a CPU.

    Raises:
        UsageError: for an x of another dtype or without features, or a weight of another shape.
    """
    _check(x, weight)
    kernels = _kernels_for(x, norm)
    if kernels is None:
        return block_rms_norm(x, norm, weight).to(x.dtype)
    y: Tensor = kernels.block_norm(x.reshape(-1, x.shape[-1]), norm, weight)
    return y.view(x.shape)


def block_norm_operands(
    x: Tensor, norm: BlockNormSpec, specs: tuple[OperandSpec, ...], weight: Tensor | None = None
) -> tuple[Quantized, ...]:
    """The normalized x [M, N] as the operands that products want of it; not differentiable.

    FP8 is cast from the fp32 result, with no rounding to x's dtype in between. Tensorwise scales are static
    where there is no weight: the bound of the normalization stands for their amax.

    Args:
        x: bf16, fp16, fp32 or fp64.
        norm: As in `block_norm`.
        specs: What is wanted; duplicates cost nothing. What is not quantized comes in x's dtype.
        weight: [N] or None.

    Returns:
        One Quantized per spec.

    Raises:
        UsageError: as `block_norm`, or for an x that is not 2-D.
    """
    _check(x, weight)
    if x.dim() != 2:
        raise UsageError(f"block_norm_operands takes [rows, features], got shape {tuple(x.shape)}")
    kernels = _kernels_for(x, norm)
    if kernels is not None:
        made: tuple[Quantized, ...] = kernels.normed_operands(x, norm, specs, weight)
        return made
    y = block_rms_norm(x, norm, weight)
    rounded = y.to(x.dtype)
    return tuple(
        cast_operand(y, spec, scale=static_scale(x, norm, spec, weight))
        if spec.is_quantized
        else cast(rounded, (spec,))[0]
        for spec in specs
    )


def block_norm_gradients(
    g: Tensor, x: Tensor, norm: BlockNormSpec, weight: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of `block_norm` at x [M, N], and the amax of the input's, in one read of g and x on a GPU.

    Args:
        g: Gradient of the output, x's shape.
        x: The forward's input: what it computed is computed again, which is cheaper than to keep it.
        norm: As in `block_norm`.
        weight: [N] or None.

    Returns:
        dx in x's dtype; dweight fp32 (fp64) [N] or None; the largest finite magnitude of dx as rounded, fp32
        (), so that the cast that follows need not look for it.
    """
    _check(x, weight)
    kernels = _kernels_for(x, norm)
    if kernels is not None:
        found: tuple[Tensor, Tensor | None, Tensor] = kernels.block_norm_gradients(g, x, norm, weight)
        return found
    wide, dweight = block_rms_norm_gradients(g, x, norm, weight)
    dx = wide.to(x.dtype)
    magnitude = dx.float().abs()
    amax = torch.where(magnitude < torch.inf, magnitude, 0.0).amax() if dx.numel() else magnitude.sum()
    return dx, dweight, amax


def static_scale(x: Tensor, norm: BlockNormSpec, spec: OperandSpec, weight: Tensor | None) -> Tensor | None:
    """The decode scale that the bound gives a tensorwise operand; None where one must be found."""
    if weight is not None or not spec.is_quantized or spec.granularity is not Granularity.TENSORWISE:
        return None
    return torch.full((), bound_scale(norm, x.shape[-1], spec), dtype=torch.float32, device=x.device)


def _check(x: Tensor, weight: Tensor | None) -> None:
    if x.dtype not in _DTYPES:
        raise UsageError(f"BlockNorm takes bf16, fp16, fp32 or fp64, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise UsageError(f"BlockNorm takes [..., features], got shape {tuple(x.shape)}")
    if weight is not None and tuple(weight.shape) != (x.shape[-1],):
        raise UsageError(f"BlockNorm has a weight of {list(weight.shape)} for {x.shape[-1]} features")


def _kernels_for(x: Tensor, norm: BlockNormSpec) -> Any:
    """The Triton kernels for this tensor; None where plain torch does the same, only slower.

    A program holds rows of a block whole, so a block of more than 16,384 features goes the slow way.
    """
    if not x.is_cuda or x.dtype is torch.float64 or not x.numel():
        return None
    kernels = load_norms()
    fits = kernels is not None and norm.widths(x.shape[-1])[0] <= kernels.MOST_FEATURES
    return kernels if fits else None


def load_norms() -> Any:
    """The module of the Triton kernels, loaded once, or None; call it before a compiler traces a norm."""
    global _kernels, _sought
    if not _sought:
        _sought = True
        try:
            import loka.kernels.triton.norms as kernels
        except ImportError:
            return None
        _kernels = kernels
    return _kernels
