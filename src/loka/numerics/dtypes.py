"""Formats as torch dtypes."""

from __future__ import annotations

import torch

from loka.errors import UsageError
from loka.vocab import Format

__all__ = ["format_of", "torch_dtype"]

_DTYPES: dict[Format, torch.dtype] = {
    Format.E4M3: torch.float8_e4m3fn,
    Format.E5M2: torch.float8_e5m2,
    Format.E4M3FNUZ: torch.float8_e4m3fnuz,
    Format.E5M2FNUZ: torch.float8_e5m2fnuz,
    Format.BF16: torch.bfloat16,
    Format.FP16: torch.float16,
    Format.FP32: torch.float32,
}
_FORMATS = {dtype: format_ for format_, dtype in _DTYPES.items()}


def torch_dtype(format_: Format) -> torch.dtype:
    """The torch dtype of a format."""
    return _DTYPES[format_]


def format_of(dtype: torch.dtype) -> Format:
    """The format of a torch dtype.

    Raises:
        UsageError: for a dtype that is no format of a product, such as float64 or int8.
    """
    try:
        return _FORMATS[dtype]
    except KeyError:
        raise UsageError(
            f"{dtype} is no format of a product", hint=f"one of {', '.join(str(d) for d in _FORMATS)}"
        ) from None
