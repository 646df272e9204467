"""What the cast operators have in common on the host: formats by number, padding, outputs not asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from loka.vocab import Format

__all__ = ["FLOAT8", "FORMAT_MAX", "FORMAT_NUMBER", "empty_like_output", "padded"]

# Operators take numbers: an enumeration is no type of an operator's schema.
FORMAT_NUMBER = {Format.E4M3: 0, Format.E5M2: 1}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FORMAT_MAX = (Format.E4M3.max, Format.E5M2.max)


def padded(size: int, multiple: int) -> int:
    """`size` rounded up to the multiple; 0 stands for "no such output" and leaves it."""
    return -(-size // multiple) * multiple if multiple else size


def empty_like_output(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, wanted: bool) -> Tensor:
    """Memory for an output beside x, or an empty tensor: an operator returns all its outputs always."""
    return x.new_empty(shape if wanted else (0,), dtype=dtype)
