"""MXFP8 on Blackwell through torch's second scaled product. Written by contract, not run: no such device yet.

y = sum over blocks of 32 along k of (q(x) @ q(w).T) * 2^(e_x + e_w), scales in E8M0, in all three passes.
Sources: aten::_scaled_mm_v2 of torch 2.11 and its shape function; the swizzle in `loka.numerics.mx_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.kernels.backends.torch_scaled_mm import added_after, bias_inside
from loka.kernels.base import BaseKernel
from loka.kernels.operands import linear_operands
from loka.kernels.rules import mx_scaled_mm_rules
from loka.numerics import Quantized
from loka.numerics.mx_layout import swizzled_mx_scales
from loka.vocab import Device, GemmProblem, Granularity, OperandSpec, Pass, Support

__all__ = ["KERNELS", "MXScaledMM"]

_BLOCK_1X32, _SWIZZLE_32_4_4 = 3, 1  # torch.nn.functional.ScalingType and SwizzleType as numbers
_BLOCK = 32

_REPRO = """\
import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm


def swizzled(scale):  # fp32 powers of two [rows, K / 32] -> E8M0 in tiles of 128 x 4
    rows, blocks = scale.shape
    codes = ((scale.contiguous().view(torch.int32) >> 23) & 0xFF).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -blocks % 4, 0, -rows % 128))
    tiles = codes.view(codes.shape[0] // 128, 4, 32, codes.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


def product(a, b, scale_a, scale_b, out_dtype):
    recipe, swizzle = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    return scaled_mm(
        a, b.t(), swizzled(scale_a), recipe, swizzled(scale_b), recipe, swizzle, swizzle,
        output_dtype=out_dtype,
    )
"""


@dataclass(frozen=True, slots=True)
class MXScaledMM(BaseKernel):
    """`torch.mx_1x32`; not verified."""

    passes: tuple[Pass, ...] = tuple(Pass)

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """See `loka.kernels.rules.mx_scaled_mm_rules`."""
        return mx_scaled_mm_rules(problem, device)

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """Blocks of 32 along k with power-of-two scales; k padded to whole blocks."""
        return linear_operands(problem, Granularity.MX_1X32, Granularity.MX_1X32, pad=_BLOCK)

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]; the scales are turned into swizzled E8M0 here."""
        m, n = a.values.shape[0], b.values.shape[0]
        if m == 0:
            return a.values.new_empty((m, n), dtype=out_dtype)
        inside = bias_inside(bias, out_dtype)
        out: Tensor = torch.ops.aten._scaled_mm_v2.default(
            a.values,
            b.values.t(),
            [swizzled_mx_scales(a.scale)],
            [_BLOCK_1X32],
            [_SWIZZLE_32_4_4],
            [swizzled_mx_scales(b.scale)],
            [_BLOCK_1X32],
            [_SWIZZLE_32_4_4],
            inside,
            out_dtype,
        )
        return added_after(out, bias, inside)

    def repro(self) -> str:
        """The same call without LoKA, through the public function."""
        return _REPRO


KERNELS = (MXScaledMM("torch.mx_1x32", verified=False),)
