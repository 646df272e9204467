"""One tensor, every operand that is wanted of it, each cast once.

On a GPU LoKA's Triton kernels cast; what they do not know (MX blocks, FNUZ formats, fp64, empty tensors, an
odd transpose) and every CPU tensor takes the plain torch of `loka.numerics`, to which they are equal bit by
bit. Two uses with an equal spec share one cast, and two orientations of one recipe share one read where the
scales allow it.
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
    on_gpu = x.is_cuda and x.dtype in _GPU_DTYPES and x.numel() > 0
    made: dict[OperandSpec, Quantized] = {}
    for spec in specs:
        if spec in made:
            continue
        twin = _twin(spec, specs, made)
        if on_gpu and can_cast(x, spec, scale):
            twin = twin if twin is not None and can_cast(x, twin, scale) else None
            first, second = cast_pair(x, spec, twin, scale=scale)
            made[spec] = first
            if twin is not None and second is not None:
                made[twin] = second
        else:
            made[spec] = _from_orientation(x, spec, made) or cast_operand(x, spec, scale=scale)
    return tuple(made[spec] for spec in specs)


def _twin(
    spec: OperandSpec, specs: tuple[OperandSpec, ...], made: dict[OperandSpec, Quantized]
) -> OperandSpec | None:
    """A spec still to be made that is the same recipe in the other orientation."""
    for other in specs:
        if (
            other not in made
            and other.transposed is not spec.transposed
            and other.format is spec.format
            and other.granularity is spec.granularity
            and other.scale_rounding is spec.scale_rounding
        ):
            return other
    return None


def _from_orientation(x: Tensor, spec: OperandSpec, made: dict[OperandSpec, Quantized]) -> Quantized | None:
    """The operand as a transposed copy of one already cast, where both orientations share the scale."""
    if not spec.is_quantized or spec.granularity is not Granularity.TENSORWISE:
        return None
    twin = made.get(spec.with_transposed(not spec.transposed))
    if twin is None or twin.scale.dim():
        return None
    rows = x.shape[1] if spec.transposed else x.shape[0]
    k = x.shape[0] if spec.transposed else x.shape[1]
    codes = twin.values[:k, :rows].t()
    return Quantized(_padded(codes, -k % spec.pad), twin.scale, spec)


def _padded(codes: Tensor, pad: int) -> Tensor:
    if not pad:
        return codes.contiguous()
    out = codes.new_zeros((codes.shape[0], codes.shape[1] + pad))
    out[:, : codes.shape[1]] = codes
    return out
