"""cuBLASLt's block scales on Hopper, through torch's second scaled product.

fwd, dgrad   A 1x128, B 128x128        wgrad   A 1x128, B 1x128

Where the scales lie decides whether the result is right, and the first scaled product (torch._scaled_mm)
reads past unpadded ones without an error. As the second one reads them, K' being k padded to 128:

    1x128     mn_major: [rows, K' / 128], stride (1, rows)
    128x128   mn_major_pad4, transposed: [L, rows / 128], stride (1, L), L = K' / 128 up to a multiple of 4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.kernels.backends.torch_scaled_mm import added_after, bias_inside
from loka.kernels.base import BaseKernel
from loka.kernels.operands import linear_operands
from loka.kernels.rules import block_scaled_mm_rules
from loka.numerics import Quantized
from loka.vocab import Device, GemmProblem, Granularity, OperandSpec, Pass, ScaleLayout, Support

__all__ = ["KERNELS", "BlockScaledMM", "block_scaled_mm"]

# torch.nn.functional.ScalingType as numbers. The operator is called below F.scaled_mm, which takes Python
# enums, turns them into these and is one more thing to trace through.
_BLOCK_1X128, _BLOCK_128X128 = 4, 5
_BLOCK = 128  # so the cast pads k: torch's shape function counts k // 128 blocks, its kernel counts them up
_SCALES_AT_ONCE = 4

_REPRO = """\
import torch
from torch.nn.functional import ScalingType, scaled_mm


def product(a, b, scale_a, scale_b, out_dtype):
    # 1x128 scales lie with rows contiguous; 128x128 scales of b are [N / 128, L], L contiguous
    m, n, blocks = a.shape[0], b.shape[0], a.shape[1] // 128
    scale_a = scale_a.t().reshape(-1).view(blocks, m).t()
    if scale_b.shape[0] == n:
        recipe_b, scale_b = ScalingType.BlockWise1x128, scale_b.t().reshape(-1).view(blocks, n).t()
    else:
        recipe_b, scale_b = ScalingType.BlockWise128x128, scale_b.t()
    return scaled_mm(
        a, b.t(), scale_a, ScalingType.BlockWise1x128, scale_b, recipe_b, output_dtype=out_dtype
    )
"""


@torch.library.custom_op(
    "loka::block_scaled_mm",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, int recipe_b, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor",
)
def block_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    recipe_b: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """aten::_scaled_mm_v2 with a shape function of our own.

    torch's own one counts n // 128 blocks of B where the kernel counts them up, and so refuses to trace
    what runs where n is not a multiple of 128.
    """
    return _scaled_mm_v2(a, b, scale_a, scale_b, recipe_b, bias, out_dtype)


@block_scaled_mm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    recipe_b: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _scaled_mm_v2(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    recipe_b: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_mm_v2.default(
        a, b.t(), [scale_a], [_BLOCK_1X128], [], [scale_b], [recipe_b], [], bias, out_dtype
    )
    return out


@dataclass(frozen=True, slots=True)
class BlockScaledMM(BaseKernel):
    """`torch.blockwise_1x128`. Sums are exact: cuBLASLt has no fast mode for blocks.

    Attributes:
        passes: All three.
        exportable: No: where n is not a multiple of 128 it is an operator that lives in Python.
    """

    passes: tuple[Pass, ...] = tuple(Pass)

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """See `loka.kernels.rules.block_scaled_mm_rules`."""
        return block_scaled_mm_rules(problem, device)

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """1x128 for activations and gradients, 128x128 for the weight; k padded to 128."""
        wgrad = problem.pass_ is Pass.WGRAD
        return linear_operands(
            problem,
            Granularity.BLOCKWISE_1X128,
            Granularity.BLOCKWISE_128X128,
            pad=_BLOCK,
            a_layout=ScaleLayout.MN_MAJOR,
            b_layout=ScaleLayout.MN_MAJOR if wgrad else ScaleLayout.MN_MAJOR_PAD4,
        )

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]; bf16 and fp32 are written as they are, fp16 is made of fp32."""
        m, n = a.values.shape[0], b.values.shape[0]
        if m == 0:  # no stride of an empty scale passes torch's check
            return a.values.new_empty((m, n), dtype=out_dtype)
        written = torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float32
        inside = bias_inside(bias, written)
        blockwise_b = b.spec.granularity is Granularity.BLOCKWISE_128X128
        # Only 128x128 scales make the two shape functions differ.
        call = block_scaled_mm if blockwise_b and n % _BLOCK else _scaled_mm_v2
        values, scale = _whole_columns(a.values, a.scale)
        out = call(
            values,
            b.values,
            _rows_contiguous(scale),
            b.scale.t() if blockwise_b else _rows_contiguous(b.scale),
            _BLOCK_128X128 if blockwise_b else _BLOCK_1X128,
            inside,
            written,
        )
        return added_after(out[:m], bias, inside).to(out_dtype)

    def repro(self) -> str:
        """The same call without LoKA, through the public function."""
        return _REPRO


def _whole_columns(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of zeros up to a multiple of 4, which costs a copy where m is none.

    cuBLASLt reads the columns of A's scales 16 bytes at a time; on an H200 it refused m = 1 and 17.
    """
    more = -values.shape[0] % _SCALES_AT_ONCE
    if not more:
        return values, scale
    # torch pads no 8-bit floats, but their bytes.
    padded = torch.nn.functional.pad(values.view(torch.uint8), (0, 0, 0, more)).view(values.dtype)
    return padded, torch.nn.functional.pad(scale.t(), (0, more)).t()


def _rows_contiguous(scale: Tensor) -> Tensor:
    """[rows, blocks] with stride (1, rows), literally so where a dimension is 1; a view of mn_major."""
    rows, blocks = scale.shape
    return scale.t().reshape(-1).view(blocks, rows).t()


KERNELS = (BlockScaledMM("torch.blockwise_1x128", exportable=False),)
