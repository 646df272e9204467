"""How a tensor is cut for the norm kernels: rows of one block of features a program."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from loka.vocab import BlockNormSpec

__all__ = ["MOST_FEATURES", "Cut", "cut_of", "lying_tile", "turning_tile"]

MOST_FEATURES = 16384  # of a block: a program holds rows of it whole


class Cut(NamedTuple):
    """The blocks of x [M, N].

    Attributes:
        M: Rows.
        N: Features, contiguous.
        stride: From row to row, in elements.
        blocks: Their number.
        width: Features of the narrower blocks.
        wider: How many blocks, the first ones, have one feature more.
        columns: The power of two that holds a block.
    """

    M: int
    N: int
    stride: int
    blocks: int
    width: int
    wider: int
    columns: int

    @property
    def exact(self) -> bool:
        """Whether every block fills its columns, so that no lane is masked."""
        return not self.wider and self.width == self.columns


def cut_of(x: Tensor, norm: BlockNormSpec) -> Cut:
    """The cut of x [M, N] with contiguous features.

    A single row has no stride to speak of; a stride of 1 would tell the compiler that rows are contiguous.
    Features are a number even where a compiler traces with symbols: how they are cut depends on it.
    """
    M, N = x.shape[0], int(x.shape[1])
    widths = norm.widths(N)
    wider = sum(width > widths[-1] for width in widths)
    columns = 1 << max(0, widths[0] - 1).bit_length()
    return Cut(M, N, x.stride(0) if M > 1 else N, len(widths), widths[-1], wider, max(columns, 16))


def lying_tile(columns: int) -> tuple[int, int]:
    """Rows and warps of a program that writes what lies as x does: 16 rows of 256 features."""
    rows = max(1, 4096 // columns)
    return rows, max(4, min(16, rows * columns // 512))


def turning_tile(columns: int) -> tuple[int, int]:
    """Pairs of rows and warps of a program that writes the transpose: 64 rows of 256 features."""
    pairs = max(1, min(64, 8192 // columns))
    return pairs, max(4, min(16, pairs * columns // 1024))
