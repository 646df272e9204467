"""What a cast operand is: everything two uses must agree on to share one cast."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loka.errors import UsageError
from loka.vocab.formats import Format, Granularity, Operand, Pass, ScaleLayout, ScaleRounding

__all__ = ["A_FORMATS", "PASS_OPERANDS", "OperandSpec"]

# Decision 1: every pass is D_mn = A_mk @ B_nk.T with both operands K-major. The flag says whether the
# operand in memory is the transpose of the tensor that autograd holds (x_MK, w_NK, g_MN).
PASS_OPERANDS: dict[Pass, tuple[tuple[Operand, bool], tuple[Operand, bool]]] = {
    Pass.FWD: ((Operand.INPUT, False), (Operand.WEIGHT, False)),
    Pass.DGRAD: ((Operand.GRAD_OUTPUT, False), (Operand.WEIGHT, True)),
    Pass.WGRAD: ((Operand.GRAD_OUTPUT, True), (Operand.INPUT, True)),
}

# The 8-bit formats tried for operand A; B is E4M3, since E5M2 x E5M2 does not exist in hardware. Where A is
# the gradient, E5M2's range may be worth its missing mantissa bit.
A_FORMATS: dict[Pass, tuple[Format, ...]] = {
    Pass.FWD: (Format.E4M3,),
    Pass.DGRAD: (Format.E4M3, Format.E5M2),
    Pass.WGRAD: (Format.E4M3, Format.E5M2),
}


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """One operand as a kernel wants it. Equal specs of one tensor share one cast.

    Attributes:
        format: E4M3, E5M2 or a FNUZ twin; BF16 for "not quantized".
        granularity: Elements that share a scale; blocks run along k.
        transposed: Memory holds the transpose of the tensor, so that k is contiguous.
        scale_rounding: fp32 scales, or powers of two.
        scale_layout: How the scales lie in memory.
        pad: The multiple to which the cast zero-pads k.

    Raises:
        UsageError: for MX without power-of-two scales (its scales are exponents), or pad < 1.
    """

    format: Format = Format.E4M3
    granularity: Granularity = Granularity.TENSORWISE
    transposed: bool = False
    scale_rounding: ScaleRounding = ScaleRounding.FP32
    scale_layout: ScaleLayout = ScaleLayout.SCALAR
    pad: int = 1

    def __post_init__(self) -> None:
        if self.granularity is Granularity.MX_1X32 and self.scale_rounding is ScaleRounding.FP32:
            raise UsageError("OperandSpec(granularity=mx_1x32) needs scale_rounding=power_of_two")
        if self.pad < 1:
            raise UsageError(f"OperandSpec(pad={self.pad}) must be at least 1")

    @classmethod
    def of(
        cls,
        format: Format,  # noqa: A002 - the field's own word
        granularity: Granularity,
        *,
        transposed: bool = False,
        pad: int = 1,
    ) -> OperandSpec:
        """The spec with the natural scale layout and rounding of its granularity."""
        layout = {
            Granularity.TENSORWISE: ScaleLayout.SCALAR,
            Granularity.ROWWISE: ScaleLayout.VECTOR,
        }.get(granularity, ScaleLayout.K_MAJOR)
        mx = granularity is Granularity.MX_1X32
        rounding = ScaleRounding.POWER_OF_TWO if mx else ScaleRounding.FP32
        return cls(format, granularity, transposed, rounding, layout, pad)

    @classmethod
    def high_precision(cls, *, transposed: bool = False) -> OperandSpec:
        """The spec of an operand that is not quantized."""
        return cls(format=Format.BF16, transposed=transposed)

    @property
    def is_quantized(self) -> bool:
        """True when the operand is cast to an 8-bit format."""
        return self.format.is_float8

    @property
    def recipe_key(self) -> str:
        """What decides the numerical error: format, granularity and scale rounding, as `e4m3.rowwise`.

        Layout, padding and orientation change where bytes lie, not what they are.
        """
        if not self.is_quantized:
            return str(self.format)
        tail = ".pow2" if self.scale_rounding is ScaleRounding.POWER_OF_TWO else ""
        return f"{self.format}.{self.granularity}{tail}"

    def __str__(self) -> str:
        """The recipe key, with `.T` where memory holds the transpose."""
        return self.recipe_key + (".T" if self.transposed else "")

    def with_transposed(self, transposed: bool) -> OperandSpec:
        """The same spec in the other orientation."""
        return replace(self, transposed=transposed)
