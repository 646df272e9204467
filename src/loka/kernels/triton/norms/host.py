"""From specs to the norm kernels. x [M, N]: bf16, fp16 or fp32, not empty."""

from __future__ import annotations

import torch
from torch import Tensor

from loka.kernels.cast_engine import cast
from loka.kernels.triton.casts.outputs import FORMAT_NUMBER
from loka.kernels.triton.norms.forward import normalize_blocks
from loka.kernels.triton.norms.gradients import gradients_of_block_norm
from loka.kernels.triton.norms.rowwise import normalize_to_float8_rows
from loka.kernels.triton.norms.static import normalize_to_float8
from loka.numerics import Quantized, bound_scale, lay_out
from loka.vocab import BlockNormSpec, Granularity, OperandSpec, ScaleRounding

__all__ = ["block_norm", "block_norm_gradients", "normed_operands"]


def block_norm(x: Tensor, norm: BlockNormSpec, weight: Tensor | None) -> Tensor:
    """`loka.kernels.block_norm.block_norm` of a matrix, differentiable once."""
    y: Tensor = normalize_blocks(_lying(x), weight, norm.block, norm.eps, norm.swish, False)
    return y


def block_norm_gradients(
    g: Tensor, x: Tensor, norm: BlockNormSpec, weight: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`loka.kernels.block_norm.block_norm_gradients`."""
    found = gradients_of_block_norm(_lying(g), _lying(x), weight, norm.block, norm.eps, norm.swish)
    dx, dweight, amax = found
    return dx, None if weight is None else dweight, amax


def normed_operands(
    x: Tensor, norm: BlockNormSpec, specs: tuple[OperandSpec, ...], weight: Tensor | None
) -> tuple[Quantized, ...]:
    """`loka.kernels.block_norm.block_norm_operands`.

    What a static scale allows comes from one read of x: a recipe in both orientations, and the plain output.
    A scale for each row takes one more. Whatever else is asked for is cast from the fp32 output, written out.
    """
    x = _lying(x)
    made: list[Quantized | None] = [None] * len(specs)
    plain: Tensor | None = None
    wants_plain = any(not spec.is_quantized for spec in specs)
    for i, spec in enumerate(specs):
        if made[i] is not None or not _is_static(spec, x, weight):
            continue
        twins = [j for j, other in enumerate(specs) if made[j] is None and _alike(other, spec, x, weight)]
        plain_now = wants_plain and plain is None
        some, found = _static(x, norm, [specs[j] for j in twins], plain=plain_now)
        plain = found if plain_now else plain
        for j, quantized in zip(twins, some, strict=True):
            made[j] = quantized
    wide: Tensor | None = None
    for i, spec in enumerate(specs):
        if made[i] is not None:
            continue
        if not spec.is_quantized:
            plain = block_norm(x, norm, weight) if plain is None else plain
            made[i] = cast(plain, (spec,))[0]
        elif _is_of_rows(spec):
            made[i] = _of_rows(x, norm, spec, weight)
        else:
            if wide is None:
                wide = normalize_blocks(x, weight, norm.block, norm.eps, norm.swish, True)
            made[i] = cast(wide, (spec,), scale=_scale(x, norm, spec, weight))[0]
    return tuple(q for q in made if q is not None)


def _lying(x: Tensor) -> Tensor:
    """With contiguous features; a single column counts as such only where rows follow each other."""
    return x if x.stride(1) == 1 and (x.shape[1] > 1 or x.is_contiguous()) else x.contiguous()


def _is_static(spec: OperandSpec, x: Tensor, weight: Tensor | None) -> bool:
    """Whether the norm's bound gives the scale, and the kernel can write it: two rows at a time."""
    static = weight is None and spec.is_quantized and spec.granularity is Granularity.TENSORWISE
    even = not spec.transposed or spec.pad % 2 == 0 or x.shape[0] % 2 == 0
    return static and spec.format in FORMAT_NUMBER and even


def _alike(other: OperandSpec, spec: OperandSpec, x: Tensor, weight: Tensor | None) -> bool:
    """Whether one launch makes both: one recipe, and no two paddings of one orientation."""
    same = other.recipe_key == spec.recipe_key and _is_static(other, x, weight)
    return same and (other.transposed is not spec.transposed or other.pad == spec.pad)


def _static(
    x: Tensor, norm: BlockNormSpec, specs: list[OperandSpec], *, plain: bool
) -> tuple[list[Quantized], Tensor]:
    """Operands of one recipe by its static scale, and the plain output where wanted."""
    scale = _full_scale(x, norm, specs[0])
    pads = {spec.transposed: spec.pad for spec in reversed(specs)}
    straight, transposed, y = normalize_to_float8(
        x,
        scale,
        norm.block,
        norm.eps,
        norm.swish,
        FORMAT_NUMBER[specs[0].format],
        pads.get(False, 0),
        pads.get(True, 0),
        plain,
    )
    made = []
    for spec in specs:
        values = transposed if spec.transposed else straight
        made.append(Quantized(values, lay_out(scale, spec.scale_layout, values.shape[0]), spec))
    return made, y


def _scale(x: Tensor, norm: BlockNormSpec, spec: OperandSpec, weight: Tensor | None) -> Tensor | None:
    if weight is not None or spec.granularity is not Granularity.TENSORWISE:
        return None
    return _full_scale(x, norm, spec)


def _full_scale(x: Tensor, norm: BlockNormSpec, spec: OperandSpec) -> Tensor:
    return torch.full((), bound_scale(norm, x.shape[1], spec), dtype=torch.float32, device=x.device)


def _is_of_rows(spec: OperandSpec) -> bool:
    rowwise = spec.granularity is Granularity.ROWWISE and not spec.transposed
    return rowwise and spec.format in FORMAT_NUMBER


def _of_rows(x: Tensor, norm: BlockNormSpec, spec: OperandSpec, weight: Tensor | None) -> Quantized:
    values, scales = normalize_to_float8_rows(
        x,
        weight,
        norm.block,
        norm.eps,
        norm.swish,
        FORMAT_NUMBER[spec.format],
        spec.scale_rounding is ScaleRounding.POWER_OF_TWO,
        spec.pad,
    )
    return Quantized(values, lay_out(scales, spec.scale_layout, values.shape[0]), spec)
