"""One tensor, every operand that is wanted of it, each cast once.

Two uses with an equal spec share one cast. A tensorwise scale is the same in both orientations, so there the
second orientation is a transposed copy of the codes, not a second cast.
"""

from __future__ import annotations

from torch import Tensor

from loka.numerics import Quantized, cast_operand
from loka.vocab import Granularity, OperandSpec

__all__ = ["cast"]


def cast(x: Tensor, specs: tuple[OperandSpec, ...], *, scale: Tensor | None = None) -> tuple[Quantized, ...]:
    """Cast x [R, C] to every spec, in order.

    Args:
        x: 2-D, any float dtype and stride.
        specs: What is wanted; duplicates cost nothing.
        scale: A static decode scale for all of them: fp32 of shape ().

    Returns:
        One Quantized per spec.

    Raises:
        UsageError: for a tensor that is not 2-D or a scale of another shape.
    """
    made: dict[OperandSpec, Quantized] = {}
    for spec in specs:
        if spec not in made:
            made[spec] = _other_orientation(x, spec, made) or cast_operand(x, spec, scale=scale)
    return tuple(made[spec] for spec in specs)


def _other_orientation(x: Tensor, spec: OperandSpec, made: dict[OperandSpec, Quantized]) -> Quantized | None:
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
