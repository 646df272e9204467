"""What the cast operators have in common on the host: formats by number, padding, outputs not asked for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from loka.vocab import Format

__all__ = ["FLOAT8", "FORMAT_MAX", "FORMAT_NUMBER", "Rows", "empty_like_output", "padded", "rows_of"]

# Operators take numbers: an enumeration is no type of an operator's schema.
FORMAT_NUMBER = {Format.E4M3: 0, Format.E5M2: 1}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FORMAT_MAX = (Format.E4M3.max, Format.E5M2.max)


class Rows(NamedTuple):
    """How x [R, C] lies, and the padded sizes of what is made of it.

    Attributes:
        R: Rows.
        C: Columns, contiguous.
        stride: From row to row, in elements.
        columns_out: Columns of the output that lies as x does: C padded.
        rows_out: Columns of the transposed output: R padded.
    """

    R: int
    C: int
    stride: int
    columns_out: int
    rows_out: int


def rows_of(x: Tensor, straight_pad: int, transposed_pad: int) -> Rows:
    """The sizes of one cast; a pad of 0 stands for "no such output" and leaves the size.

    A single row has no stride to speak of. A stride of 1 would tell the compiler that rows are contiguous.
    """
    R, C = x.shape
    stride = x.stride(0) if R > 1 else C
    return Rows(R, C, stride, padded(C, straight_pad), padded(R, transposed_pad))


def padded(size: int, multiple: int) -> int:
    """`size` rounded up to the multiple; 0 stands for "no such output" and leaves it."""
    return -(-size // multiple) * multiple if multiple else size


def empty_like_output(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, wanted: bool) -> Tensor:
    """Memory for an output beside x, or an empty tensor: an operator returns all its outputs always."""
    return x.new_empty(shape if wanted else (0,), dtype=dtype)
