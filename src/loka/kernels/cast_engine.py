"""One tensor, every operand that is wanted of it, each cast once.

On a GPU LoKA's Triton kernels cast; what they do not know (FNUZ formats, fp64, empty tensors, an odd
transpose, a cut MX block) and every CPU tensor takes the plain torch of `loka.numerics`, to which they are
equal bit by bit. Two uses with an equal spec share one cast, and two orientations of one recipe share one
read where the scales allow it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.kernels.gpu_casts import can_cast, cast_pair
from loka.numerics import Quantized, cast_operand
from loka.vocab import Granularity, OperandSpec

__all__ = ["cast"]

_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cast(x: Tensor, specs: tuple[OperandSpec, ...], *, scale: Tensor | None = None) -> tuple[Quantized, ...]:
    """Cast x [R, C] to every spec, in order.

    Args:
        x: 2-D, any float dtype and stride.
        specs: What is wanted; duplicates cost nothing.
        scale: A static decode scale for all of them: fp32 of shape (). Then no amax is taken.

    Returns:
        One Quantized per spec.

    Raises:
        UsageError: for a tensor that is not 2-D, a scale of another shape, or a GPU without Triton.
    """
    if x.dim() != 2:
        raise UsageError(f"cast takes a 2-D tensor, got shape {tuple(x.shape)}")
    on_gpu = _on_gpu(x)
    # Places in lists, not keys: torch 2.11 compiles code that takes two specs with other fields for one key.
    made: list[Quantized | None] = [None] * len(specs)
    for i, spec in enumerate(specs):
        if made[i] is not None:
            continue
        twin = _twin(spec, specs, made)
        if on_gpu and can_cast(x, spec, scale):
            paired = twin is not None and can_cast(x, twin, scale)
            first, second = cast_pair(x, spec, twin if paired else None, scale=scale)
        else:
            first, second = _other_orientation(x, spec, made) or cast_operand(x, spec, scale=scale), None
        for j, other in enumerate(specs):
            if made[j] is None and _same(other, spec):
                made[j] = first
            elif made[j] is None and second is not None and twin is not None and _same(other, twin):
                made[j] = second
    return tuple(q for q in made if q is not None)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _GPU_DTYPES and x.numel() > 0


def _same(a: OperandSpec, b: OperandSpec) -> bool:
    return (
        a.format is b.format
        and a.granularity is b.granularity
        and a.transposed is b.transposed
        and a.scale_rounding is b.scale_rounding
        and a.scale_layout is b.scale_layout
        and a.pad == b.pad
    )


def _twin(
    spec: OperandSpec, specs: tuple[OperandSpec, ...], made: list[Quantized | None]
) -> OperandSpec | None:
    """A spec still to be made that is the same recipe in the other orientation."""
    for i, other in enumerate(specs):
        if (
            made[i] is None
            and other.transposed is not spec.transposed
            and other.format is spec.format
            and other.granularity is spec.granularity
            and other.scale_rounding is spec.scale_rounding
        ):
            return other
    return None


def _other_orientation(x: Tensor, spec: OperandSpec, made: list[Quantized | None]) -> Quantized | None:
    """The operand as a transposed copy of one already cast, where both orientations share the scale."""
    if not spec.is_quantized or spec.granularity is not Granularity.TENSORWISE:
        return None
    wanted = spec.with_transposed(not spec.transposed)
    for twin in made:
        if twin is not None and _same(twin.spec, wanted) and not twin.scale.dim():
            rows = x.shape[1] if spec.transposed else x.shape[0]
            k = x.shape[0] if spec.transposed else x.shape[1]
            codes = twin.values[:k, :rows].t()
            return Quantized(_padded(codes, -k % spec.pad), twin.scale, spec)
    return None


def _padded(codes: Tensor, pad: int) -> Tensor:
    if not pad:
        return codes.contiguous()
    out = codes.new_zeros((codes.shape[0], codes.shape[1] + pad))
    out[:, : codes.shape[1]] = codes
    return out
