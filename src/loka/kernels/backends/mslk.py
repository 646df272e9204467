"""MSLK's CUTLASS kernels for Hopper (the successor of FBGEMM GenAI).

rowwise                y = (q(x) @ q(w).T) * s_x[:, None] * s_w[None, :]      torch.ops.mslk.f8f8bf16_rowwise
blockwise_1x128        x in 1x128, w in 128x128 blocks; fwd and dgrad         f8f8bf16_groupwise
rowwise.grouped.fast   G products at once, rows of x stacked                  f8f8bf16_rowwise_grouped_stacked

All take E4M3 and write bf16: another output dtype is converted from that, so fp32 here has bf16's error.
The groupwise product reads *both* scale matrices with rows (of blocks) contiguous; given the usual k-major
ones it runs without an error and is 20 % off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.kernels.base import BaseKernel
from loka.kernels.libraries import library
from loka.kernels.operands import linear_operands
from loka.kernels.rules import mslk_groupwise_rules, mslk_rules
from loka.numerics import Quantized
from loka.vocab import (
    Accumulation,
    Device,
    GemmProblem,
    Granularity,
    OperandSpec,
    Pass,
    ScaleLayout,
    Support,
)

__all__ = ["KERNELS", "MslkBlockwise", "MslkGrouped", "MslkRowwise", "mslk_groupwise"]

_PAD_K = 16  # 16 bytes, what TMA loads
_BLOCK = 128

_REPRO_ROWWISE = """\
import mslk.gemm
import torch


def product(a, b, scale_a, scale_b, out_dtype):
    out = torch.ops.mslk.f8f8bf16_rowwise(a, b, scale_a, scale_b, use_fast_accum={fast})
    return out.to(out_dtype)
"""

_REPRO_GROUPWISE = """\
import mslk.gemm
import torch


def product(a, b, scale_a, scale_b, out_dtype):
    # scales arrive as [M, K / 128] and [N / 128, K / 128]; the kernel wants them stored transposed
    out = torch.ops.mslk.f8f8bf16_groupwise(a, b, scale_a.t().contiguous(), scale_b.t().contiguous())
    return out.to(out_dtype)
"""

_REPRO_GROUPED = """\
import mslk.gemm
import torch


def product(a, b, scale_a, scale_b, out_dtype):
    sizes = torch.full((1,), a.shape[0], dtype=torch.int64, device=a.device)
    out = torch.ops.mslk.f8f8bf16_rowwise_grouped_stacked(a, b[None], scale_a, scale_b[None], sizes)
    return out.to(out_dtype)
"""


@torch.library.custom_op(
    "loka::mslk_groupwise",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b) -> Tensor",
)
def mslk_groupwise(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """mslk::f8f8bf16_groupwise, which has no shape function of its own.

    Args:
        a: E4M3 [m, k], k a multiple of 128.
        b: E4M3 [n, k].
        scale_a: fp32 [k / 128, m], contiguous.
        scale_b: fp32 [k / 128, n / 128], contiguous.

    Returns:
        bf16 [m, n].
    """
    out: Tensor = torch.ops.mslk.f8f8bf16_groupwise(a, b, scale_a, scale_b)
    return out


@mslk_groupwise.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


def _finished(out: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The bf16 product in the wanted dtype, the bias added in fp32."""
    return out.to(out_dtype) if bias is None else (out.float() + bias.float()).to(out_dtype)


@dataclass(frozen=True, slots=True)
class _Mslk(BaseKernel):
    """What the three have in common.

    Attributes:
        passes: Where the kernel is defined.
    """

    passes: tuple[Pass, ...] = tuple(Pass)

    def available(self) -> Support:
        """Whether mslk is installed in a release for this torch, and loads."""
        return library("mslk").support

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """See `loka.kernels.rules.mslk_rules`."""
        if problem.pass_ not in self.passes:
            return Support.no(f"not defined for {problem.pass_}")
        return mslk_rules(problem, device)


@dataclass(frozen=True, slots=True)
class MslkRowwise(_Mslk):
    """`mslk.rowwise` and, with fast accumulation, `mslk.rowwise.fast`."""

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """Rowwise both, k padded to 16 bytes: the same casts as torch.rowwise."""
        return linear_operands(problem, Granularity.ROWWISE, Granularity.ROWWISE, pad=_PAD_K)

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]; for bf16 the bias, bf16 or fp32, is added inside before the one rounding."""
        fast = self.accumulation is Accumulation.FAST
        inside = None
        if bias is not None and out_dtype is torch.bfloat16:
            inside = bias if bias.dtype is torch.bfloat16 else bias.float()
        out: Tensor = torch.ops.mslk.f8f8bf16_rowwise(
            a.values, b.values, a.scale, b.scale, bias=inside, use_fast_accum=fast
        )
        return _finished(out, out_dtype, None if inside is not None else bias)

    def repro(self) -> str:
        """The same call without LoKA."""
        return _REPRO_ROWWISE.format(fast=self.accumulation is Accumulation.FAST)


@dataclass(frozen=True, slots=True)
class MslkBlockwise(_Mslk):
    """`mslk.blockwise_1x128`: partial sums are promoted to fp32 after every block."""

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """See `loka.kernels.rules.mslk_groupwise_rules`."""
        if problem.pass_ not in self.passes:
            return Support.no(f"not defined for {problem.pass_}")
        return mslk_groupwise_rules(problem, device)

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """Both scales with rows contiguous, k padded to whole blocks."""
        return linear_operands(
            problem,
            Granularity.BLOCKWISE_1X128,
            Granularity.BLOCKWISE_128X128,
            pad=_BLOCK,
            a_layout=ScaleLayout.MN_MAJOR,
            b_layout=ScaleLayout.MN_MAJOR,
        )

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]; the bias is added after, in fp32."""
        # Stored mn-major, the transposes are contiguous already and nothing is copied.
        out = mslk_groupwise(a.values, b.values, a.scale.t().contiguous(), b.scale.t().contiguous())
        return _finished(out, out_dtype, bias)

    def repro(self) -> str:
        """The same call without LoKA."""
        return _REPRO_GROUPWISE


@dataclass(frozen=True, slots=True)
class MslkGrouped(_Mslk):
    """`mslk.rowwise.grouped.fast`: many products in one launch. As a kernel it is a group of one.

    The library builds this one with fast accumulation only.
    """

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """Rowwise both, k padded to 16 bytes."""
        return linear_operands(problem, Granularity.ROWWISE, Granularity.ROWWISE, pad=_PAD_K)

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]; the bias is added after, in fp32."""
        m = a.values.shape[0]
        if m == 0:
            return a.values.new_empty((0, b.values.shape[0]), dtype=out_dtype)
        sizes = torch.full((1,), m, dtype=torch.int64, device=a.values.device)
        stacked = Quantized(b.values[None], b.scale[None], b.spec)
        return _finished(self.matmul_groups(a, stacked, sizes, out_dtype=torch.bfloat16), out_dtype, bias)

    def matmul_groups(
        self, a: Quantized, b: Quantized, group_rows: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """G products, each of its own rows of A with its own B, as in a mixture of experts.

        Args:
            a: values [sum of m_g, k], scale [sum of m_g]: the groups' rows, one group after the other.
            b: values [G, n, k], scale [G, n].
            group_rows: int64 [G] on the same device: m_g, zeros allowed. Its sum is not checked, which
                would wait for the device.
            out_dtype: bf16, or a dtype to convert to.

        Returns:
            [sum of m_g, n].

        Raises:
            UsageError: for shapes that do not fit each other, or sizes that are not int64.
        """
        groups, n, k = b.values.shape if b.values.dim() == 3 else (0, 0, 0)
        fits = a.values.shape[1] == k and b.scale.shape == (groups, n) and group_rows.shape == (groups,)
        if b.values.dim() != 3 or not fits or group_rows.dtype is not torch.int64:
            raise UsageError(
                f"a grouped product of A {list(a.values.shape)} with B {list(b.values.shape)}, scales of B "
                f"{list(b.scale.shape)} and {group_rows.dtype} sizes {list(group_rows.shape)} does not fit",
                hint="A [sum m_g, k], B [G, n, k] with scales [G, n], int64 sizes [G]",
            )
        out: Tensor = torch.ops.mslk.f8f8bf16_rowwise_grouped_stacked(
            a.values, b.values, a.scale, b.scale, group_rows
        )
        return out.to(out_dtype)

    def repro(self) -> str:
        """The same call without LoKA."""
        return _REPRO_GROUPED


KERNELS = (
    MslkRowwise("mslk.rowwise"),
    MslkRowwise("mslk.rowwise.fast", accumulation=Accumulation.FAST),
    MslkBlockwise("mslk.blockwise_1x128", passes=(Pass.FWD, Pass.DGRAD), exportable=False),
    MslkGrouped("mslk.rowwise.grouped.fast", accumulation=Accumulation.FAST),
)
