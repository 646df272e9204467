"""Number formats and the words for how an operand is scaled. No torch here: a plan is readable without it."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Accumulation", "Format", "Granularity", "Operand", "Pass", "ScaleLayout", "ScaleRounding"]


class Format(StrEnum):
    """The number format of an operand or of a result.

    `BF16` as an operand format means "not quantized": the operand enters in the model's compute dtype
    (the autocast dtype, or the input's own dtype without autocast).
    """

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E4M3FNUZ = "e4m3fnuz"
    E5M2FNUZ = "e5m2fnuz"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def is_float8(self) -> bool:
        """True for the four 8-bit formats."""
        return self in _FLOAT8_MAX

    @property
    def max(self) -> float:
        """Largest finite value of an 8-bit format (OCP FP8 1.0 for E4M3 and E5M2; AMD CDNA3 for FNUZ).

        Raises:
            KeyError: for formats that are not 8-bit.
        """
        return _FLOAT8_MAX[self]

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value of an 8-bit format."""
        return _FLOAT8_TINY[self]

    @property
    def zero_bits(self) -> int:
        """The bits of a code that are all 0 in a zero; 0x80 is -0, but NaN in the FNUZ formats."""
        return 0xFF if self in (Format.E4M3FNUZ, Format.E5M2FNUZ) else 0x7F

    @property
    def mantissa_bits(self) -> int:
        """Stored mantissa bits of an 8-bit format."""
        return 3 if self in (Format.E4M3, Format.E4M3FNUZ) else 2


_FLOAT8_MAX = {Format.E4M3: 448.0, Format.E5M2: 57344.0, Format.E4M3FNUZ: 240.0, Format.E5M2FNUZ: 57344.0}
_FLOAT8_TINY = {
    Format.E4M3: 2.0**-9,
    Format.E5M2: 2.0**-16,
    Format.E4M3FNUZ: 2.0**-10,
    Format.E5M2FNUZ: 2.0**-17,
}


class Granularity(StrEnum):
    """How many elements share one scale. Blocks run along k, the contracted axis."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    BLOCKWISE_1X128 = "blockwise_1x128"
    BLOCKWISE_128X128 = "blockwise_128x128"
    MX_1X32 = "mx_1x32"

    @property
    def block_k(self) -> int | None:
        """Elements along k that share a scale; None where all of k does."""
        return {"blockwise_1x128": 128, "blockwise_128x128": 128, "mx_1x32": 32}.get(self.value)

    @property
    def block_rows(self) -> int | None:
        """Rows that share a scale; None where all rows do."""
        return {"tensorwise": None, "blockwise_128x128": 128}.get(self.value, 1)


class ScaleRounding(StrEnum):
    """Scales in fp32, or rounded up to a power of two."""

    FP32 = "fp32"
    POWER_OF_TWO = "power_of_two"


class ScaleLayout(StrEnum):
    """How scales lie in memory."""

    SCALAR = "scalar"
    VECTOR = "vector"
    K_MAJOR = "k_major"
    MN_MAJOR = "mn_major"
    MN_MAJOR_PAD4 = "mn_major_pad4"


class Pass(StrEnum):
    """The three products of a linear layer."""

    FWD = "fwd"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Operand(StrEnum):
    """What a product multiplies."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class Accumulation(StrEnum):
    """How partial sums are kept. `FAST` is the less precise one: biased on one-signed data and long k."""

    EXACT = "exact"
    FAST = "fast"
