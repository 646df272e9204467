"""A product to be computed, and the machine that computes it."""

from __future__ import annotations

from dataclasses import dataclass

from loka.vocab.formats import Format, Pass

__all__ = ["Device", "GemmProblem", "Support"]


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """One product D_mn = A_mk @ B_nk.T (both operands K-major).

    Attributes:
        m: Rows of A and D.
        n: Rows of B, columns of D.
        k: The contracted length, before padding.
        pass_: Which product of a linear layer it is. It tells a kernel which operand is the weight.
        a_format: 8-bit format asked for A; a kernel for bf16 ignores it.
        b_format: The same for B.
        out_dtype: Format of D.
        bias: Whether a bias of length n is added.
    """

    m: int
    n: int
    k: int
    pass_: Pass = Pass.FWD
    a_format: Format = Format.E4M3
    b_format: Format = Format.E4M3
    out_dtype: Format = Format.BF16
    bias: bool = False

    @classmethod
    def of_linear(
        cls,
        pass_: Pass,
        *,
        rows: int,
        out_features: int,
        in_features: int,
        grad_format: Format = Format.E4M3,
        out_dtype: Format = Format.BF16,
        bias: bool = False,
    ) -> GemmProblem:
        """The problem of one pass of a linear layer x_MK -> y_MN with M = rows (decision 1's table)."""
        M, N, K = rows, out_features, in_features
        if pass_ is Pass.FWD:
            return cls(M, N, K, pass_, Format.E4M3, Format.E4M3, out_dtype, bias)
        if pass_ is Pass.DGRAD:
            return cls(M, K, N, pass_, grad_format, Format.E4M3, out_dtype)
        return cls(N, K, M, pass_, grad_format, Format.E4M3, out_dtype)

    @property
    def key(self) -> str:
        """`MxNxK`, the key used in every record."""
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        """Floating-point operations: 2 m n k."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Device:
    """The machine as kernels' rules see it.

    Attributes:
        type: `cpu`, `cuda` or `hip`.
        name: The marketing name, such as `NVIDIA H200`.
        arch: (major, minor) compute capability; (0, 0) on a CPU.
        torch: (major, minor) of the torch release.
    """

    type: str
    name: str
    arch: tuple[int, int] = (0, 0)
    torch: tuple[int, int] = (2, 11)

    @property
    def sm(self) -> str:
        """`SM 9.0`, or the device type where there is no compute capability."""
        return f"SM {self.arch[0]}.{self.arch[1]}" if self.type == "cuda" else self.type


@dataclass(frozen=True, slots=True)
class Support:
    """Yes, or no with the reason. Truthy when yes."""

    ok: bool
    reason: str = ""

    @classmethod
    def yes(cls) -> Support:
        """The kernel can run the problem."""
        return cls(True)

    @classmethod
    def no(cls, reason: str) -> Support:
        """The kernel cannot; `reason` says what it needs and what it found."""
        return cls(False, reason)

    def __bool__(self) -> bool:
        return self.ok
