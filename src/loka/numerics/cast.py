"""The cast to FP8. Its formula stands here and nowhere else (decision 2); every kernel is held to it.

    amax = max |x| over the finite elements that share a scale, in fp32
    s    = RN(amax / max)       the decode scale, at least 2^-100; 1 where amax is 0
    s    = 2^ceil(log2(RN(amax / max)))   where scales are powers of two
    r    = RN(1 / s)
    code = RNE(clamp(x * r, -max, max))

Why x * r and not x / s: hardware multiplies, and the two differ in one code of a thousand. Why the clamp:
an unclamped cast above 464 gives NaN on torch 2.11 and 448 on 2.13. Non-finite elements stay non-finite
(NaN; in E5M2 infinities stay infinities) and never enter an amax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.numerics.dtypes import torch_dtype
from loka.numerics.quantized import Quantized, lay_out, not_quantized, scale_shape
from loka.vocab import Format, Granularity, OperandSpec, ScaleRounding

__all__ = ["amax_of", "cast_operand", "decode_scale", "round_to_format"]

_SCALE_FLOOR = 2.0**-100


def decode_scale(amax: Tensor, format_: Format, rounding: ScaleRounding = ScaleRounding.FP32) -> Tensor:
    """The decode scale of an amax, fp32, same shape."""
    ratio = _divided(amax.float(), torch.full((), format_.max, device=amax.device))
    if rounding is ScaleRounding.POWER_OF_TWO:
        ratio = _ceil_power_of_two(ratio)
    return torch.where(amax > 0, ratio.clamp(min=_SCALE_FLOOR), torch.ones_like(ratio))


def _divided(a: Tensor, b: Tensor) -> Tensor:
    """RN(a / b) in fp32, the same on every device, eager or compiled.

    CUDA divides by a Python number through a product with its reciprocal, and compiled kernels use an
    approximate fp32 division; both are a unit in the last place off. The fp64 quotient of two fp32 numbers
    rounds to the correctly rounded fp32 one (53 >= 2 * 24 + 2 bits).
    """
    return (a.double() / b.double()).float()


def _ceil_power_of_two(x: Tensor) -> Tensor:
    """2^ceil(log2 x) of positive fp32 values, on the exponent bits; subnormals become 2^-126."""
    bits = x.contiguous().view(torch.int32)
    has_mantissa = (bits & 0x007FFFFF) != 0
    exponent = (bits >> 23) + has_mantissa.to(torch.int32)
    return (exponent << 23).view(torch.float32)


def amax_of(x: Tensor, granularity: Granularity) -> Tensor:
    """Largest finite magnitude of each group of an operand [rows, k] that shares a scale; fp32.

    Shapes: () tensorwise, [rows] rowwise, [row blocks, k blocks] blockwise. An empty group gives 0.
    """
    rows, k = x.shape
    magnitude = x.float().abs()
    # `< inf` is false for NaN too, and several times faster on a CPU than isfinite.
    magnitude = torch.where(magnitude < torch.inf, magnitude, 0.0)
    if x.numel() == 0:
        spec = OperandSpec.of(Format.E4M3, granularity)
        return magnitude.new_zeros(scale_shape(spec, rows, k))
    if granularity is Granularity.TENSORWISE:
        return magnitude.amax()
    if granularity is Granularity.ROWWISE:
        return magnitude.amax(dim=1)
    block_rows, block_k = granularity.block_rows or 1, granularity.block_k or 1
    padded = torch.nn.functional.pad(magnitude, (0, -k % block_k, 0, -rows % block_rows))
    R, C = padded.shape[0] // block_rows, padded.shape[1] // block_k
    return padded.view(R, block_rows, C, block_k).amax(dim=(1, 3))


def round_to_format(x: Tensor, format_: Format) -> Tensor:
    """Clamp to the format's range and round to nearest even; non-finite elements stay non-finite."""
    x = x.float()
    clamped = x.clamp(-format_.max, format_.max)  # NaN passes through a clamp, infinity does not
    finite = x.abs() < torch.inf
    if format_ is Format.E5M2:
        return torch.where(finite, clamped, x).to(torch_dtype(format_))
    return torch.where(finite, clamped, torch.nan).to(torch_dtype(format_))


def cast_operand(x: Tensor, spec: OperandSpec, *, scale: Tensor | None = None) -> Quantized:
    """Cast one 2-D tensor to one operand, in plain torch on any device.

    Args:
        x: [R, C], any float dtype and stride. The operand is x, or x.T for a transposed spec.
        spec: What to make.
        scale: A given decode scale instead of the one from the amax: fp32 of shape (), or of the logical
            scale shape of the spec.

    Returns:
        values [rows, k padded to spec.pad] contiguous, scales in the spec's layout.

    Raises:
        UsageError: for a tensor that is not 2-D, or a scale of another shape or dtype.
    """
    if x.dim() != 2:
        raise UsageError(f"cast takes a 2-D tensor, got shape {tuple(x.shape)}")
    operand = x.t() if spec.transposed else x
    if not spec.is_quantized:
        return not_quantized(operand, spec)
    rows, k = operand.shape
    pad = -k % spec.pad
    if pad:
        operand = torch.nn.functional.pad(operand, (0, pad))
    if scale is None:
        scale = decode_scale(amax_of(operand, spec.granularity), spec.format, spec.scale_rounding)
    else:
        _check_scale(scale, spec, rows, k + pad)
    wide = Quantized(operand, scale, spec)
    values = round_to_format(operand.float() * _reciprocal(wide), spec.format).contiguous()
    return Quantized(values, lay_out(scale, spec.scale_layout, rows), spec)


def _reciprocal(q: Quantized) -> Tensor:
    from loka.numerics.quantized import scale_per_element

    # One reciprocal a scale, then spread over the elements: r = RN(1 / s) is part of the formula.
    one = torch.ones((), device=q.scale.device)
    return scale_per_element(Quantized(q.values, _divided(one, q.scale), q.spec))


def _check_scale(scale: Tensor, spec: OperandSpec, rows: int, k: int) -> None:
    expected = scale_shape(spec, rows, k)
    if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), expected):
        raise UsageError(
            f"the given scale is {scale.dtype} of shape {tuple(scale.shape)}, {spec.granularity} of a "
            f"[{rows}, {k}] operand needs float32 of shape () or {expected}"
        )
