"""DeepGEMM: block scales on Hopper, compiled for each shape when first met.

fwd, dgrad   recipe (1, 128, 128): A 1x128, B 128x128, D bf16
wgrad        recipe (1, 1, 128): A and B 1x128, D fp32, and D = C + A @ B.T with C required

E4M3 only; partial sums are promoted to fp32 after every 128 of k. Another output dtype is converted from the
one that is written. Its compiler takes 1 to 5 s a kernel: `warm_up` runs it outside the training step.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.kernels.base import BaseKernel
from loka.kernels.libraries import FOREIGN_ERRORS, library
from loka.kernels.operands import blank_operands, linear_operands
from loka.kernels.rules import deep_gemm_rules
from loka.numerics import Quantized
from loka.vocab import Device, GemmProblem, Granularity, OperandSpec, Pass, ScaleLayout, Support

__all__ = ["KERNELS", "DeepGemm", "deep_gemm_1d1d", "deep_gemm_1d2d"]

_BLOCK = 128
_TRIAL = 128  # rows, columns and k of the product that shows whether the compiler works

_REPRO = """\
import deep_gemm
import torch


def product(a, b, scale_a, scale_b, out_dtype):
    m, n = a.shape[0], b.shape[0]
    if scale_b.shape[0] == n:  # 1x128 scales on both sides: D = C + A @ B.T in fp32
        d = torch.zeros((m, n), dtype=torch.float32, device=a.device)
        deep_gemm.fp8_gemm_nt((a, scale_a), (b, scale_b), d, c=d, recipe=(1, 1, 128))
    else:
        d = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
        deep_gemm.fp8_gemm_nt((a, scale_a), (b, scale_b), d, recipe=(1, 128, 128))
    return d.to(out_dtype)
"""


def _gemm_nt(*args: Any, **options: Any) -> None:
    importlib.import_module("deep_gemm").fp8_gemm_nt(*args, **options)


@torch.library.custom_op(
    "loka::deep_gemm_1d2d",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b) -> Tensor",
)
def deep_gemm_1d2d(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """D = A @ B.T with 1x128 scales of A and 128x128 scales of B.

    Args:
        a: E4M3 [m, k].
        b: E4M3 [n, k].
        scale_a: fp32 [m, k / 128]; with stride (1, m) and m % 4 == 0 it is read as it lies, else copied.
        scale_b: fp32 [n / 128, k / 128], contiguous.

    Returns:
        bf16 [m, n].
    """
    d = a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)
    if d.numel():
        _gemm_nt((a, scale_a), (b, scale_b), d, recipe=(1, _BLOCK, _BLOCK))
    return d


@deep_gemm_1d2d.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


@torch.library.custom_op(
    "loka::deep_gemm_1d1d",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b) -> Tensor",
)
def deep_gemm_1d1d(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """D = A @ B.T with 1x128 scales of both.

    Args:
        a: E4M3 [m, k].
        b: E4M3 [n, k].
        scale_a: fp32 [m, k / 128], as for `deep_gemm_1d2d`.
        scale_b: fp32 [n, k / 128], likewise.

    Returns:
        fp32 [m, n].
    """
    # The kernel only adds to what is there; handing it D as C spares the copy of C into D.
    d = a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.float32)
    if d.numel():
        _gemm_nt((a, scale_a), (b, scale_b), d, c=d, recipe=(1, 1, _BLOCK))
    return d


@deep_gemm_1d1d.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class DeepGemm(BaseKernel):
    """`deep_gemm.blockwise_1x128`."""

    passes: tuple[Pass, ...] = tuple(Pass)

    def available(self) -> Support:
        """Whether the library loads and its compiler works: both forms are tried on one small product, once.

        The trial needs the GPU; a compiler without nvcc or headers is found here and not in a training step.
        """
        loaded = library("deep_gemm").support
        return loaded and _trial()

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        """See `loka.kernels.rules.deep_gemm_rules`."""
        return deep_gemm_rules(problem, device)

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        """1x128 scales with rows contiguous, as its loads want them; the weight's k-major."""
        wgrad = problem.pass_ is Pass.WGRAD
        return linear_operands(
            problem,
            Granularity.BLOCKWISE_1X128,
            Granularity.BLOCKWISE_128X128,
            pad=_BLOCK,
            a_layout=ScaleLayout.MN_MAJOR,
            b_layout=ScaleLayout.MN_MAJOR if wgrad else ScaleLayout.K_MAJOR,
        )

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """D [m, n]; written in bf16 with a 128x128 B, in fp32 with a 1x128 one; the bias is added after."""
        two_d = b.spec.granularity is Granularity.BLOCKWISE_128X128
        call = deep_gemm_1d2d if two_d else deep_gemm_1d1d
        out: Tensor = call(a.values, b.values, a.scale, b.scale)
        return out.to(out_dtype) if bias is None else (out.float() + bias.float()).to(out_dtype)

    def warm_up(self, problem: GemmProblem, where: torch.device) -> None:
        """Compile what the problem needs, by running it once on zeros of its very shape and layouts."""
        a, b = blank_operands(self, problem, where)
        self.matmul(a, b, out_dtype=torch.bfloat16)
        torch.cuda.synchronize(where)

    def repro(self) -> str:
        """The same call without LoKA."""
        return _REPRO


@functools.cache
def _trial() -> Support:
    """Compile and run both forms on the current GPU; whatever stops them is the reason."""
    if not torch.cuda.is_available():
        return Support.no("DeepGEMM compiles on the GPU it runs on, and torch sees none")
    where = torch.device("cuda", torch.cuda.current_device())
    kernel = KERNELS[0]
    try:
        for pass_ in (Pass.FWD, Pass.WGRAD):
            kernel.warm_up(GemmProblem(_TRIAL, _TRIAL, _TRIAL, pass_), where)
    except FOREIGN_ERRORS as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        return Support.no(f"DeepGEMM cannot compile here: {text[0]}")
    return Support.yes()


KERNELS = (DeepGemm("deep_gemm.blockwise_1x128", exportable=False),)
