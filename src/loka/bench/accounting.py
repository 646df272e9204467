"""What one pass of one linear layer costs: which work is counted, and as which calls.

A pair of shape and pass is accounted for by itself. Activations and gradients arrive in bf16, the weight is
the fp32 master, y and dx leave in bf16, dw in fp32 as `.grad` keeps it:

    pass    bf16 as autocast runs it                  an FP8 kernel
    fwd     w to bf16, product, bias                  cast x, cast w, product, bias
    dgrad   product; the copy of w is fwd's           cast g, cast w.T, product
    wgrad   product, dw to fp32                       cast g.T, cast x.T, product into fp32

So FP8 pays for every cast of both operands, in the orientation and layout that the pass needs, and nothing
is shared between passes. A plan that runs fwd and dgrad in FP8 tensorwise shares the cast of w and pays less
than these pairs say. What a compiler would fuse into either side is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.bench.shapes import Shape
from loka.kernels import Kernel, cast
from loka.numerics import Quantized, torch_dtype
from loka.vocab import PASS_OPERANDS, Format, GemmProblem, Operand, OperandSpec, Pass

__all__ = ["Pair", "Tensors", "Work"]


@dataclass(frozen=True, slots=True)
class Pair:
    """One pass of one linear layer."""

    shape: Shape
    pass_: Pass

    @property
    def key(self) -> str:
        """`MxNxK.fwd`, where M, N and K are those of the linear layer."""
        return f"{self.shape.key}.{self.pass_}"

    @property
    def problem(self) -> GemmProblem:
        """The product."""
        return GemmProblem.of_linear(
            self.pass_,
            rows=self.shape.m,
            out_features=self.shape.n,
            in_features=self.shape.k,
            out_dtype=Format.FP32 if self.pass_ is Pass.WGRAD else Format.BF16,
            bias=self.shape.bias and self.pass_ is Pass.FWD,
        )


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a pass finds in memory: its operands as autograd holds them, and the bias.

    Attributes:
        a: Operand A before any cast or transpose: x or g, in bf16.
        b: Operand B: the fp32 weight [N, K], or x in bf16.
        bias: fp32 [N], where one is added.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None

    @classmethod
    def random(cls, pair: Pair, where: torch.device) -> Tensors:
        """Normal numbers, the same for the same pair: activations of size 1, a weight of size K^-1/2."""
        generator = torch.Generator(device=where).manual_seed(0)
        M, N, K = pair.shape.m, pair.shape.n, pair.shape.k

        def normal(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            return torch.randn((rows, columns), generator=generator, device=where, dtype=dtype)

        def operand(which: Operand) -> Tensor:
            if which is Operand.WEIGHT:
                return normal(N, K, torch.float32).mul_(K**-0.5)
            return normal(M, N if which is Operand.GRAD_OUTPUT else K, torch.bfloat16)

        (of_a, _), (of_b, _) = PASS_OPERANDS[pair.pass_]
        bias = normal(1, N, torch.float32)[0] if pair.problem.bias else None
        return cls(operand(of_a), operand(of_b), bias)


class Work:
    """The calls of one pair; operands that several kernels take are cast once.

    Args:
        pair: Which product.
        tensors: What it multiplies.
    """

    def __init__(self, pair: Pair, tensors: Tensors) -> None:
        self._problem = pair.problem
        self._tensors = tensors
        self._out_dtype = torch_dtype(self._problem.out_dtype)
        self._weight_is_ready = pair.pass_ is Pass.DGRAD
        self._operands: dict[tuple[str, OperandSpec], Quantized] = {}
        self._copy: Tensor | None = None

    def total(self, kernel: Kernel) -> Callable[[], Tensor]:
        """All that the pass costs with this kernel."""
        spec_a, spec_b = kernel.operands(self._problem)
        tensors, out_dtype = self._tensors, self._out_dtype
        b = tensors.b
        if not spec_b.is_quantized and self._weight_is_ready:
            b = self._in_bf16()

        def call() -> Tensor:
            # Of a bf16 tensor this is the tensor itself.
            wanted = b if spec_b.is_quantized else b.to(torch.bfloat16)
            cast_a, cast_b = cast(tensors.a, (spec_a,))[0], cast(wanted, (spec_b,))[0]
            return kernel.matmul(cast_a, cast_b, out_dtype=out_dtype, bias=tensors.bias)

        return call

    def product(self, kernel: Kernel) -> Callable[[], Tensor]:
        """The product alone, its operands ready."""
        spec_a, spec_b = kernel.operands(self._problem)
        a, b = self._operand("a", spec_a), self._operand("b", spec_b)
        bias, out_dtype = self._tensors.bias, self._out_dtype
        return lambda: kernel.matmul(a, b, out_dtype=out_dtype, bias=bias)

    def casts(self, kernel: Kernel) -> Callable[[], object]:
        """The casts of both operands alone."""
        spec_a, spec_b = kernel.operands(self._problem)
        tensors = self._tensors
        return lambda: (cast(tensors.a, (spec_a,)), cast(tensors.b, (spec_b,)))

    def _operand(self, which: str, spec: OperandSpec) -> Quantized:
        key = (which, spec)
        if key not in self._operands:
            source = self._tensors.a if which == "a" else self._tensors.b
            if which == "b" and not spec.is_quantized:
                source = self._in_bf16()
            self._operands[key] = cast(source, (spec,))[0]
        return self._operands[key]

    def _in_bf16(self) -> Tensor:
        """B in bf16, which is B itself where it arrives so."""
        if self._copy is None:
            self._copy = self._tensors.b.to(torch.bfloat16)
        return self._copy
