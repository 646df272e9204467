"""How many significant binary digits numbers need: 8 for bf16, 11 for fp16, few for counts and flags.

Of numbers that need few, many lie exactly half way between two of FP8, where rounding goes to the even one.
Numbers drawn beside them would go either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka.numerics.fine_bins import power_of_two

__all__ = ["FP32_DIGITS", "digits_of", "rounded"]

FP32_DIGITS = 24


def digits_of(x: Tensor) -> Tensor:
    """The most that any of fp32 x [rows, F], rows > 0, needs; int32 [F], 0 for zeros alone."""
    mantissa, _ = torch.frexp(x)
    whole = (mantissa.abs() * 2**FP32_DIGITS).to(torch.int32)
    last = torch.where(x == 0, 2**FP32_DIGITS, whole & -whole)  # the last digit that is not 0
    return FP32_DIGITS + 1 - torch.frexp(last.amin(dim=0).float())[1].to(torch.int32)


def rounded(x: Tensor, digits: Tensor) -> Tensor:
    """Fp32 x [rows, F] to so many digits, int32 [F], to the nearest, ties to even."""
    mantissa, exponent = torch.frexp(x.double())
    scale = power_of_two(digits)
    return ((mantissa * scale).round() / scale * power_of_two(exponent)).float()
