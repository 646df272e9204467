"""Transformer Engine's MXFP8 product on Blackwell. Written by the contract of release 2.20, not run.

D = A @ B.T is `general_gemm(B, A, layout="TN")`: it names operands as cuBLAS does, column-major, so B
comes first. Operands are its own tensors; `make_empty` of its quantizer gives one with buffers for codes and
E8M0 scales, which are filled with ours. Scales lie [rows padded to 128, k blocks padded to 4], not swizzled.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.kernels.base import BaseKernel
from loka.kernels.libraries import library
from loka.kernels.operands import linear_operands
from loka.kernels.rules import transformer_engine_mx_rules
from loka.numerics import Quantized
from loka.numerics.mx_layout import e8m0_bytes
from loka.vocab import Device, GemmProblem, Granularity, OperandSpec, Pass, Support

__all__ = ["KERNELS", "TransformerEngineMX"]

_BLOCK = 32

_REPRO = """\
import torch
import transformer_engine.pytorch  # loads the library
import transformer_engine_torch as tex
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer


def operand(values, scale):
    quantizer = MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    made = quantizer.make_empty(tuple(values.shape), dtype=torch.bfloat16, device=values.device)
    made._rowwise_data.copy_(values.view(torch.uint8))
    codes = ((scale.contiguous().view(torch.int32) >> 23) & 0xFF).to(torch.uint8)
    made._rowwise_scale_inv.zero_()
    made._rowwise_scale_inv[: codes.shape[0], : codes.shape[1]].copy_(codes)
    return made


def product(a, b, scale_a, scale_b, out_dtype):
    return general_gemm(operand(b, scale_b), operand(a, scale_a), out_dtype=out_dtype, layout="TN")[0]
"""


def _product(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    made = extensions.general_gemm(_operand(b), _operand(a), out_dtype=out_dtype, layout="TN")
    out: Tensor = made[0]
    return out


def _operand(q: Quantized) -> Any:
    """One of the library's own MXFP8 tensors, holding our codes and scales."""
    tex = importlib.import_module("transformer_engine_torch")
    module = importlib.import_module("transformer_engine.pytorch.tensor.mxfp8_tensor")
    quantizer = module.MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    made = quantizer.make_empty(tuple(q.values.shape), dtype=torch.bfloat16, device=q.values.device)
    made._rowwise_data.copy_(q.values.view(torch.uint8))
    codes = e8m0_bytes(q.scale)
    made._rowwise_scale_inv.zero_()
    made._rowwise_scale_inv[: codes.shape[0], : codes.shape[1]].copy_(codes)
    return made


@dataclass(frozen=True, slots=True)
class TransformerEngineMX(BaseKernel):
    """`transformer_engine.mx_1x32`; not verified. Its tensors do not trace: eager only."""

    passes: tuple[Pass, ...] = tuple(Pass)

    def available(self) -> Support:
        """Whether Transformer Engine is installed in a release whose contract is known, and loads."""
        return library("transformer_engine").support

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """See `loka.kernels.rules.transformer_engine_mx_rules`."""
        return transformer_engine_mx_rules(problem, device)

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """Blocks of 32 along k with power-of-two scales; k padded to whole blocks."""
        return linear_operands(problem, Granularity.MX_1X32, Granularity.MX_1X32, pad=_BLOCK)

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]; the bias is added after, in fp32."""
        out = _product(a, b, out_dtype)
        return out if bias is None else (out.float() + bias.float()).to(out_dtype)

    def repro(self) -> str:
        """The same call without LoKA."""
        return _REPRO


KERNELS = (TransformerEngineMX("transformer_engine.mx_1x32", exportable=False, verified=False),)
