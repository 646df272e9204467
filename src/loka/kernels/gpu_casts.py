"""From specs to LoKA's Triton casts. Triton is loaded when the first tensor on a GPU is cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.numerics import Quantized, lay_out
from loka.vocab import Format, Granularity, OperandSpec, ScaleLayout, ScaleRounding

__all__ = ["KNOWN_FORMATS", "KNOWN_GRANULARITIES", "can_cast", "cast_pair", "load_casts"]

KNOWN_FORMATS = (Format.E4M3, Format.E5M2)
KNOWN_GRANULARITIES = (
    Granularity.TENSORWISE,
    Granularity.ROWWISE,
    Granularity.BLOCKWISE_1X128,
    Granularity.BLOCKWISE_128X128,
)
_MX_BLOCK = 32


def can_cast(x: Tensor, spec: OperandSpec, scale: Tensor | None) -> bool:
    """Whether the Triton kernels know the cast.

    A given scale they take for whole tensors only. They write the transpose of x two rows at a time, so its
    padded rows must be even; one number has no orientation. Blocks of MX must be whole.
    """
    if not spec.is_quantized or spec.format not in KNOWN_FORMATS:
        return False
    k = x.shape[0] if spec.transposed else x.shape[1]
    if spec.granularity is Granularity.MX_1X32:
        return scale is None and x.numel() > 0 and (k + -k % spec.pad) % _MX_BLOCK == 0
    if spec.granularity not in KNOWN_GRANULARITIES:
        return False
    if scale is not None and (spec.granularity is not Granularity.TENSORWISE or scale.dim()):
        return False
    return x.numel() > 1 and (spec.pad % 2 == 0 or k % 2 == 0)


def cast_pair(
    x: Tensor, spec: OperandSpec, twin: OperandSpec | None, *, scale: Tensor | None = None
) -> tuple[Quantized, Quantized | None]:
    """Cast x [R, C] to `spec` and, where given, to `twin`, the same recipe in the other orientation.

    Args:
        x: bf16, fp16 or fp32, any stride; `can_cast` says yes to it with `spec` and with `twin`.
        spec: What to make.
        twin: Differs in orientation, padding and scale layout alone; or None.
        scale: A static decode scale of shape (), for tensorwise specs.

    Raises:
        UsageError: where Triton is not installed.
    """
    casts = _casts if _casts is not None else load_casts()
    if spec.granularity is Granularity.MX_1X32:
        return _mx(casts, x, spec), None if twin is None else _mx(casts, x, twin)
    x, flipped = _with_contiguous_columns(x)
    turned = spec.transposed is not flipped
    straight, transposed = (twin, spec) if turned else (spec, twin)
    if spec.granularity is Granularity.TENSORWISE:
        lying, other = _tensorwise(casts, x, straight, transposed, scale)
    elif spec.granularity is Granularity.ROWWISE:
        lying, other = _rowwise(casts, x, straight, transposed)
    else:
        lying, other = _blockwise(casts, x, straight, transposed)
    first, second = (other, lying) if turned else (lying, other)
    if first is None:
        raise UsageError(f"nothing was cast for {spec}")
    return first, second


def _with_contiguous_columns(x: Tensor) -> tuple[Tensor, bool]:
    """x, or its transpose and True, so that columns are contiguous.

    The kernels want it so. A tensor that lies the other way round is the transpose of one that does not, and
    both orientations are at hand. A single column is taken for a single row: with one column the compiler
    would think that rows are contiguous.
    """
    if x.shape[1] == 1 and x.shape[0] > 1:
        return x.t().contiguous(), True
    if x.stride(1) == 1:
        return x, False
    return (x.t(), True) if x.stride(0) == 1 else (x.contiguous(), False)


# What lies as x does, and its transpose; None for what was not asked. No mapping by spec: torch 2.11 compiles
# code that takes two specs with different fields for one key.
_Made = tuple[Quantized | None, Quantized | None]

_casts: Any = None


def load_casts() -> Any:
    """The module of the Triton casts, loaded once; call it before a compiler traces a cast.

    Raises:
        UsageError: where Triton is not installed.
    """
    global _casts
    if _casts is None:
        try:
            import loka.kernels.triton.casts as casts
        except ImportError as error:
            raise UsageError(
                f"casting to FP8 on a GPU needs Triton, which does not load: {error}",
                hint="install the triton that your torch names, or keep the model on the CPU",
            ) from error
        _casts = casts
    return _casts


def _pad(spec: OperandSpec | None) -> int:
    return 0 if spec is None else spec.pad


def _words(straight: OperandSpec | None, transposed: OperandSpec | None) -> tuple[Format, bool, bool]:
    """Format, whether scales are powers of two, whether blocks are square: equal in both by construction."""
    spec = straight or transposed
    if spec is None:
        raise UsageError("a cast needs at least one spec")
    power_of_two = spec.scale_rounding is ScaleRounding.POWER_OF_TWO
    return spec.format, power_of_two, spec.granularity is Granularity.BLOCKWISE_128X128


def _tensorwise(
    casts: Any, x: Tensor, straight: OperandSpec | None, transposed: OperandSpec | None, scale: Tensor | None
) -> _Made:
    format_, power_of_two, _ = _words(straight, transposed)
    lying, turned, found = casts.cast_tensorwise(
        x, scale, casts.FORMAT_NUMBER[format_], power_of_two, _pad(straight), _pad(transposed)
    )
    one = found if scale is None else scale

    def quantized(values: Tensor, spec: OperandSpec | None) -> Quantized | None:
        if spec is None:
            return None
        return Quantized(values, lay_out(one, spec.scale_layout, values.shape[0]), spec)

    return quantized(lying, straight), quantized(turned, transposed)


def _rowwise(casts: Any, x: Tensor, straight: OperandSpec | None, transposed: OperandSpec | None) -> _Made:
    format_, power_of_two, _ = _words(straight, transposed)
    number = casts.FORMAT_NUMBER[format_]
    lying = turned = None
    if straight is not None:
        values, scales = casts.cast_rowwise(x, number, power_of_two, straight.pad)
        lying = Quantized(values, scales, straight)
    if transposed is not None:
        values, scales = casts.cast_columnwise(x, number, power_of_two, transposed.pad)
        turned = Quantized(values, scales, transposed)
    return lying, turned


def _mx(casts: Any, x: Tensor, spec: OperandSpec) -> Quantized:
    """A block of 32 elements along k is a row of its own."""
    operand = x.t() if spec.transposed else x
    rows, k = operand.shape
    if pad := -k % spec.pad:
        operand = torch.nn.functional.pad(operand, (0, pad))
    blocks = operand.contiguous().view(-1, _MX_BLOCK)
    format_, power_of_two, _ = _words(spec, None)
    values, scales = casts.cast_rowwise(blocks, casts.FORMAT_NUMBER[format_], power_of_two, _MX_BLOCK)
    scale = lay_out(scales.view(rows, -1), spec.scale_layout, rows)
    return Quantized(values.view(rows, k + pad), scale, spec)


def _blockwise(casts: Any, x: Tensor, straight: OperandSpec | None, transposed: OperandSpec | None) -> _Made:
    format_, power_of_two, square = _words(straight, transposed)
    layouts = {
        ScaleLayout.MN_MAJOR: casts.MN_MAJOR,
        ScaleLayout.MN_MAJOR_PAD4: casts.MN_MAJOR_PAD4,
    }

    def layout(spec: OperandSpec | None) -> int:
        number: int = casts.K_MAJOR if spec is None else layouts.get(spec.scale_layout, casts.K_MAJOR)
        return number

    lying, of_lying, turned, of_turned = casts.cast_blockwise(
        x,
        casts.FORMAT_NUMBER[format_],
        power_of_two,
        square,
        _pad(straight),
        layout(straight),
        _pad(transposed),
        layout(transposed),
    )
    return (
        None if straight is None else Quantized(lying, of_lying, straight),
        None if transposed is None else Quantized(turned, of_turned, transposed),
    )
