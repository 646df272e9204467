"""Shape classes: shapes that a kernel treats alike, tuned and vetted once for all of them."""

from __future__ import annotations

from loka.vocab.problem import GemmProblem

__all__ = ["shape_class"]

_ALIGNMENTS = (128, 16)


def shape_class(problem: GemmProblem) -> str:
    """The class of a problem: its pass, and of m, n and k the power of two above and the alignment.

    `wgrad.m2048a128.n512a16.k8192a1.q1`: m in (1024, 2048] and a multiple of 128, n in (256, 512] and a
    multiple of 16, k unaligned; `q` is the number of 128-blocks of k modulo 4, on which layouts of block
    scales depend. Vetting one member says something about all of them; it never spans two alignments.
    """
    sizes = (("m", problem.m), ("n", problem.n), ("k", problem.k))
    shown = ".".join(f"{name}{_power_above(size)}a{_alignment(size)}" for name, size in sizes)
    return f"{problem.pass_}.{shown}.q{-(-problem.k // 128) % 4}"


def _power_above(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _alignment(size: int) -> int:
    return next((a for a in _ALIGNMENTS if size % a == 0), 1)
