"""What an honest kernel may be off by, reasoned from number formats."""

from __future__ import annotations

from dataclasses import dataclass

from loka.vocab import Accumulation, Format

__all__ = ["HIDDEN_ROUNDING", "Limits", "limits_of", "one_sign_limit"]

# Rounding to nearest with p significant bits moves an element by at most 2^-p of itself.
_ROUNDING = {Format.BF16: 2.0**-8, Format.FP16: 2.0**-11, Format.FP32: 2.0**-24}

# Tensor cores of SM 9.0 align the products of a step to the largest and cut about 13 bits below it. With
# sums promoted to fp32 every 128 of k that makes 1.3e-4 of the norm on Gaussian data at any k; a row of a
# few elements whose data is uneven can be several times worse. Kept in the tensor core instead, sums of
# both signs are off by 3.8e-3 at k = 65,536 and 5.6e-3 at 131,072, growing with the root of k; worst rows
# by three times as much. A wrong scale is off by a factor.
_EXACT_NORM, _EXACT_ROW = 1e-3, 4e-3
_FAST_NORM, _FAST_ROW = 1e-2, 2e-2

# A sum of one sign is off by what is cut in every step: 5.6e-4 exact, and in the fast mode 7.5e-2 at
# k = 4,096, 9.1e-2 at 16,384, 0.31 at 65,536. The root mean square of bf16's rounding is 1.7e-3.
_ONE_SIGN_EXACT, _ONE_SIGN_FAST = 5e-3, 0.1

# Above this an fp32 result was rounded to 16 bits on its way: bf16 leaves 1.7e-3, exact sums 1.3e-4.
HIDDEN_ROUNDING = _EXACT_NORM


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest relative L2 error of the whole result, and of its worst row or column."""

    norm: float
    row: float


def limits_of(out_dtype: Format, accumulation: Accumulation) -> Limits:
    """The limits on two-signed data; an exact fp32 result must keep 1e-3, which no bf16 inside can."""
    rounding = _ROUNDING[out_dtype]
    if accumulation is Accumulation.FAST:
        return Limits(_FAST_NORM + rounding, _FAST_ROW + rounding)
    return Limits(_EXACT_NORM + rounding, _EXACT_ROW + rounding)


def one_sign_limit(accumulation: Accumulation) -> float:
    """The limit of the relative L2 error on data of one sign."""
    return _ONE_SIGN_FAST if accumulation is Accumulation.FAST else _ONE_SIGN_EXACT
