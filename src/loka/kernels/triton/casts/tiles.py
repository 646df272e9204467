"""Tile sizes of the casts, by shape. Measured on an H200 by `benchmarks/casts_h200.py --tune`."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "Tile",
    "amax_tile",
    "blockwise_tile",
    "column_amax_tile",
    "elementwise_tile",
    "both_tile",
    "rowwise_tile",
    "transposing_tile",
]


class Tile(NamedTuple):
    """What one program handles at a time.

    Attributes:
        rows: Rows of a tile, a power of two.
        columns: Columns of a tile, a power of two.
        warps: Warps of a program.
        programs: Programs at most, where a program takes several tiles in turn.
    """

    rows: int
    columns: int
    warps: int
    programs: int = 0


def _power_above(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _flat(C: int, elements: int, warps: int, programs: int = 0) -> Tile:
    """As wide as the tensor, up to 1,024 columns; the rest of the elements in rows."""
    columns = min(1024, _power_above(C))
    if C % columns and C > 128:
        columns = 128  # wider tiles would waste up to half of their lanes
    return Tile(max(1, elements // columns), columns, warps, programs)


def amax_tile(R: int, C: int) -> Tile:
    """For reading a tensor once; 132 multiprocessors times 8 programs."""
    return _flat(C, 4096, 8, 1056)


def elementwise_tile(R: int, C: int) -> Tile:
    """For a cast that keeps the orientation."""
    return _flat(C, 4096, 8)


def transposing_tile(R: int, C: int, element_size: int) -> Tile:
    """For a cast that writes the transpose: both sides want runs of 128 bytes."""
    return Tile(128, 64, 4)


def rowwise_tile(R: int, C: int) -> Tile:
    """Whole rows at once up to 16,384 columns, then 8,192 columns in turn."""
    columns = _power_above(C) if C <= 16384 else 8192
    rows = max(1, 2048 // columns)
    return Tile(rows, columns, max(2, min(8, rows * columns // 1024)))


def column_amax_tile(R: int, C: int) -> Tile:
    """For maxima of columns: a program keeps its columns' maxima while it runs down the rows."""
    columns = min(1024, max(16, _power_above(C)))
    return Tile(max(1, 4096 // columns), columns, 4, 1024)


def blockwise_tile(R: int, C: int, *, square: bool) -> Tile:
    """128 columns, and 128 rows where a block has as many."""
    return Tile(128, 128, 8) if square else Tile(16, 128, 2)


def both_tile(R: int, C: int, *, square: bool, straight: bool) -> Tile:
    """Pieces of a tile of 128 rows; 128 columns where blocks span them."""
    if square:
        return Tile(64, 128, 8)
    return Tile(128, 128, 4) if straight else Tile(64, 64, 4)
