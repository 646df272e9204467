"""Operands and references for the tests of LoKA's Triton products."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from loka.numerics import Quantized, cast_operand
from loka.vocab import Format, Granularity, OperandSpec

__all__ = ["mend_bf16_dot", "operand", "uneven", "worst_row"]

_dot = interpreter.InterpreterBuilder.create_dot


def _dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _dot(self, _as_numbers(a), _as_numbers(b), *rest)


def _as_numbers(handle: Any) -> Any:
    if handle.dtype != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def mend_bf16_dot() -> None:
    """Triton 3.6's interpreter multiplies the bits of bf16 operands as integers; let it take their values."""
    interpreter.InterpreterBuilder.create_dot = _dot_of_numbers


def uneven(rows: int, k: int, seed: int) -> Tensor:
    """Normal numbers whose size differs from row to row and from 32-column block to block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator).float())
    blocks = torch.randint(-3, 4, (1, -(-k // 32)), generator=generator).float()
    return x * torch.exp2(blocks).repeat_interleave(32, dim=1)[:, :k]


def operand(rows: int, k: int, granularity: Granularity, *, format_: Format = Format.E4M3) -> Quantized:
    """An uneven operand, cast by the oracle and padded along k as the kernels ask."""
    spec = OperandSpec.of(format_, granularity, pad=16)
    return cast_operand(uneven(rows, k, seed=rows * 7 + k), spec)


def worst_row(out: Tensor, ref: Tensor) -> float:
    """Largest relative L2 error of a row."""
    difference, size = (out.double() - ref).norm(dim=-1), ref.norm(dim=-1)
    return float((difference / size.clamp(min=1e-30)).max())
