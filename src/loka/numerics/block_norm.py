"""RMS normalization over blocks of the feature axis, and hard swish: formulas, in plain torch on any device.

    r   = 1 / sqrt(mean(x^2 over the block) + eps)      one a row and block
    z   = x * r * weight                                 weight only where affine
    y   = hardswish(z) = z * clamp(z + 3, 0, 6) / 6      only where asked

A block of w features has |x * r| <= sqrt(w): the largest is reached where one feature holds the whole row.
Hard swish enlarges nothing, so without a weight sqrt(w) bounds y too, and a static scale needs no amax.
As in torch's RMSNorm, squares overflow from 1.8e19 in fp32; such a block becomes 0.

Source: Zhang and Sennrich 2019 (arXiv 1910.07467) for RMS normalization; blocks from "LoKA" (arXiv
2605.10886); hard swish from Howard et al. 2019 (arXiv 1905.02244). Shapes: x [..., N].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loka.vocab import BlockNormSpec, OperandSpec, ScaleRounding

__all__ = ["block_rms_norm", "block_rms_norm_gradients", "bound_scale"]


def bound_scale(norm: BlockNormSpec, features: int, spec: OperandSpec) -> float:
    """The static decode scale of a tensorwise operand: the norm's bound / max, perhaps up to a power of two.

    A Python number, so that no tensor waits for another: rounded to fp32 it is what `decode_scale` makes of
    an amax that reaches the bound, but for a unit in the last place where the bound is no fp32 number.
    """
    scale = norm.bound(features) / spec.format.max
    if spec.scale_rounding is ScaleRounding.POWER_OF_TWO:
        mantissa, exponent = math.frexp(scale)
        scale = math.ldexp(1.0, exponent - (mantissa == 0.5))
    return scale


def block_rms_norm(x: Tensor, norm: BlockNormSpec, weight: Tensor | None = None) -> Tensor:
    """Normalize x [..., N] over blocks; computed in fp32 (fp64 for fp64 input), differentiable by autograd.

    Args:
        x: Any float dtype.
        norm: Block, eps, and whether hard swish follows.
        weight: [N], multiplied after the normalization; or None.

    Returns:
        fp32 (fp64) [..., N], not rounded to x's dtype.
    """
    wide = x if x.dtype is torch.float64 else x.float()
    z = _joined([part * _inverse_rms(part, norm.eps) for part in _blocks(wide, norm)])
    if weight is not None:
        z = z * weight.to(z.dtype)
    return torch.nn.functional.hardswish(z) if norm.swish else z


def block_rms_norm_gradients(
    g: Tensor, x: Tensor, norm: BlockNormSpec, weight: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `block_rms_norm`, written out: what a kernel has to compute.

    With h the normalized x and p = g * hardswish'(z) (p = g without swish), q = p * weight:

        dx = r * (q - h * mean(q * h over the block)),    dweight = sum over rows of p * h

    Args:
        g: Gradient of the output, x's shape.
        x: The input of the forward.
        norm: As there.
        weight: As there.

    Returns:
        dx in fp32 (fp64), and dweight [N] or None.
    """
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    g, wide = g.to(dtype), x.to(dtype)
    parts = _blocks(wide, norm)
    r = [_inverse_rms(part, norm.eps) for part in parts]
    h = _joined([part * s for part, s in zip(parts, r, strict=True)])
    z = h if weight is None else h * weight.to(dtype)
    p = g * _hardswish_slope(z) if norm.swish else g
    q = p if weight is None else p * weight.to(dtype)
    pieces = zip(_blocks(q, norm), _blocks(h, norm), r, strict=True)
    dx = _joined([s * (b - c * (b * c).mean(-1, keepdim=True)) for b, c, s in pieces])
    return dx, None if weight is None else (p * h).reshape(-1, x.shape[-1]).sum(0)


def _hardswish_slope(z: Tensor) -> Tensor:
    """Its derivative; at -3 and 3, where there is none, torch's choice: 0 and 1."""
    return torch.where(z <= -3, 0.0, torch.where(z >= 3, 1.0, z / 3 + 0.5)).to(z.dtype)


def _inverse_rms(part: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(part.square().mean(-1, keepdim=True) + eps)


def _blocks(x: Tensor, norm: BlockNormSpec) -> list[Tensor]:
    """Pieces [..., blocks, width] of one width each: one piece, or two where the widths differ."""
    widths = norm.widths(x.shape[-1])
    wider = sum(width > widths[-1] for width in widths)
    cut = wider * widths[0]
    pieces = [x[..., :cut].unflatten(-1, (wider, widths[0]))] if wider else []
    pieces.append(x[..., cut:].unflatten(-1, (len(widths) - wider, widths[-1])))
    return pieces


def _joined(pieces: list[Tensor]) -> Tensor:
    return torch.cat([piece.flatten(-2) for piece in pieces], dim=-1)
