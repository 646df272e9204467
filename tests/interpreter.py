"""Triton's interpreter, made ready for the tests: our kernels on CPU memory, one program after the other.

Four faults of Triton 3.6's interpreter are mended here, for the tests alone:

- It turns a loop bound into a Python number by `int()` of an array with one element, which NumPy refuses
  since 2.4.
- Its conversions to 8-bit and 16-bit floats lose the carry of a mantissa that rounds up to a power of two
  (1.97 becomes 1.0) and turn NaN into numbers. torch converts instead, after the saturation of finite and
  infinite values that NVIDIA's `cvt.rn.satfinite` does for 8-bit results.
- Its `max` and `min` let NaN through where the hardware's ignore it, and NumPy warns where NaN is made.
- Its fused multiply-add rounds twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

__all__ = ["make_ready"]

_TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_UNSIGNED = {8: (torch.uint8, np.uint8), 16: (torch.uint16, np.uint16), 32: (torch.uint32, np.uint32)}

_patch_tensor = interpreter._patch_lang_tensor
_convert_float = interpreter._convert_float
_binary_op = interpreter.InterpreterBuilder.binary_op
_plain_min_max = interpreter.ReduceOps.min_max


def _with_scalar_bounds(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _converted(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    if source not in _TORCH or target not in _TORCH:
        return _convert_float(data, source, target, rounding_mode)
    _, unsigned = _UNSIGNED[source.primitive_bitwidth]
    bits = torch.from_numpy(np.ascontiguousarray(data).view(unsigned).copy())
    wide = bits.view(_TORCH[source]).float()
    if target.primitive_bitwidth == 8:
        wide = _saturated(wide, torch.finfo(_TORCH[target]).max)
    torch_unsigned, _ = _UNSIGNED[target.primitive_bitwidth]
    return wide.to(_TORCH[target]).view(torch_unsigned).numpy()


def _saturated(x: Tensor, limit: float) -> Tensor:
    return torch.where(x.isnan(), x, x.clamp(-limit, limit))


def _quiet_binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    with np.errstate(invalid="ignore", over="ignore"):
        return _binary_op(self, lhs, rhs, op)


def _min_max(self: Any, data: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    ignoring_nan = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}.get(val_reduce_op, val_reduce_op)
    return _plain_min_max(self, data, ignoring_nan, idx_reduce_op)


def _fused(self: Any, x: Any, y: Any, z: Any) -> Any:
    """One rounding where the interpreter has two: the product of two fp32 numbers is exact in fp64."""
    wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return interpreter.TensorHandle(wide.astype(x.data.dtype), z.dtype.scalar)


def make_ready() -> None:
    """Let kernels run under the interpreter as they do on a GPU."""
    interpreter._patch_lang_tensor = _with_scalar_bounds
    interpreter._convert_float = _converted
    builder = interpreter.InterpreterBuilder
    builder.binary_op = _quiet_binary_op
    builder.create_fma = _fused
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    interpreter.ReduceOps.min_max = _min_max
