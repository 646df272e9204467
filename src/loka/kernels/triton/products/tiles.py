"""Tile sizes by shape class: the one table that a product's speed depends on. Pure; needs no Triton.

A class says what limits a product:

    long     few tiles and a long k (a weight gradient): k is split over programs, fixed-order sum after
    flat     m <= 64 (small batches)
    narrow   n <= 64: the tile is as narrow as n
    skinny   n <= 512 and many rows: one tile spans n where it can, so that A is read once
    small    fewer tiles of 128 x 128 than the GPU has multiprocessors
    large    the rest

Sizes may be symbolic (torch.compile with dynamic shapes): what comes out are numbers, so that a graph holds
for the sizes of one class.

Times are for the benchmark `benchmarks/triton_products_tuning.py`, which compares each class's
alternatives; the first of them is what runs. Nothing is timed inside a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from loka.vocab import GemmProblem

__all__ = [
    "SHARED_BYTES",
    "Family",
    "Tiles",
    "alternatives",
    "tile_class",
    "tiles_for",
]

Family = Literal["exact", "fast", "blockwise", "bf16"]

SHARED_BYTES = 227 * 1024  # what one program may use on SM 9.0
_MULTIPROCESSORS = 132  # of an H200
_LEAST_ROWS = 64  # rows of Hopper's warp-group instruction
_LONG_K = 2048
_LEAST_STEPS = 8  # of k in one split: below, filling the pipeline costs more than the split brings


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut.

    Attributes:
        block_m: Rows of a tile.
        block_n: Columns of a tile.
        block_k: Elements of k in one step of the main loop.
        warps: Warps of a program.
        stages: Steps whose loads are in flight.
        splits: Programs that share one tile, each with a part of k.
        group_m: Row tiles that run side by side, so that their columns of B are found in the L2 cache.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1
    group_m: int = 8

    def shared_bytes(self, element_bytes: int) -> int:
        """Shared memory of the pipeline: one buffer of both operands a stage."""
        return self.stages * (self.block_m + self.block_n) * self.block_k * element_bytes

    def tiles(self, m: int, n: int) -> int:
        """Tiles of an m x n result."""
        return _ceil_div(m, self.block_m) * _ceil_div(n, self.block_n)

    def chunk_k(self, k: int) -> int:
        """Elements of k in one split: whole steps."""
        return _ceil_div(_ceil_div(max(k, 1), self.block_k), self.splits) * self.block_k

    def for_norm(self, norm_block: int) -> Tiles:
        """The same for a result whose blocks of columns are normalized: whole blocks, nothing split."""
        if norm_block == 0:
            return self
        if self.block_n >= norm_block:
            return replace(self, splits=1)
        # A wider tile holds fewer rows, so that its sums stay in registers.
        return replace(self, block_m=_LEAST_ROWS, block_n=norm_block, warps=8, stages=3, splits=1)


# Exact sums keep two accumulators (a step's and the total), so their tiles hold half of what fast ones do.
# Block scales are those of 128 elements of k, and one scale of B serves a tile of at most 128 columns.
_TABLE: dict[tuple[Family, str], tuple[Tiles, ...]] = {
    ("exact", "large"): (
        Tiles(128, 128, 128, 8, 4),
        Tiles(128, 128, 128, 8, 3),
        Tiles(64, 256, 128, 8, 3),
        Tiles(64, 128, 128, 4, 3),
    ),
    ("exact", "small"): (
        Tiles(64, 64, 128, 4, 4),
        Tiles(64, 128, 128, 4, 4),
        Tiles(64, 32, 128, 4, 4),
        Tiles(128, 64, 128, 4, 4),
    ),
    ("exact", "skinny"): (
        Tiles(128, 128, 128, 8, 3),
        Tiles(64, 256, 128, 8, 3),
        Tiles(64, 128, 128, 4, 3),
    ),
    ("exact", "narrow"): (Tiles(128, 64, 128, 4, 4), Tiles(64, 64, 128, 4, 4), Tiles(256, 64, 128, 8, 3)),
    ("exact", "flat"): (Tiles(64, 64, 128, 4, 5), Tiles(64, 32, 256, 4, 4), Tiles(64, 128, 128, 4, 4)),
    ("exact", "long"): (
        Tiles(128, 128, 128, 8, 4),
        Tiles(64, 128, 128, 4, 4),
        Tiles(128, 64, 128, 4, 4),
        Tiles(64, 64, 128, 4, 5),
    ),
    ("fast", "large"): (
        Tiles(128, 256, 128, 8, 3),
        Tiles(128, 128, 128, 4, 4),
        Tiles(256, 128, 128, 8, 3),
        Tiles(128, 128, 128, 8, 4),
    ),
    ("fast", "small"): (
        Tiles(64, 64, 128, 4, 4),
        Tiles(64, 128, 128, 4, 4),
        Tiles(64, 32, 128, 4, 4),
        Tiles(128, 64, 128, 4, 4),
    ),
    ("fast", "skinny"): (
        Tiles(128, 256, 128, 8, 3),
        Tiles(128, 128, 128, 4, 3),
        Tiles(128, 128, 128, 8, 3),
        Tiles(64, 256, 128, 4, 3),
    ),
    ("fast", "narrow"): (Tiles(128, 64, 128, 4, 4), Tiles(64, 64, 128, 4, 4), Tiles(256, 64, 128, 8, 3)),
    ("fast", "flat"): (Tiles(64, 64, 128, 4, 5), Tiles(64, 32, 256, 4, 4), Tiles(64, 128, 128, 4, 4)),
    ("fast", "long"): (
        Tiles(128, 128, 128, 4, 4),
        Tiles(128, 256, 128, 8, 3),
        Tiles(64, 128, 128, 4, 4),
        Tiles(64, 64, 128, 4, 5),
    ),
    ("blockwise", "large"): (
        Tiles(128, 128, 128, 8, 4),
        Tiles(128, 128, 128, 8, 3),
        Tiles(64, 128, 128, 4, 3),
    ),
    ("blockwise", "small"): (Tiles(64, 64, 128, 4, 4), Tiles(64, 128, 128, 4, 4), Tiles(64, 32, 128, 4, 4)),
    ("blockwise", "skinny"): (Tiles(128, 128, 128, 8, 3), Tiles(64, 128, 128, 4, 3)),
    ("blockwise", "narrow"): (Tiles(128, 64, 128, 4, 4), Tiles(64, 64, 128, 4, 4)),
    ("blockwise", "flat"): (Tiles(64, 64, 128, 4, 5), Tiles(64, 32, 128, 4, 5)),
    ("blockwise", "long"): (
        Tiles(128, 128, 128, 8, 4),
        Tiles(64, 128, 128, 4, 4),
        Tiles(64, 64, 128, 4, 5),
    ),
    ("bf16", "large"): (Tiles(128, 256, 64, 8, 3), Tiles(128, 128, 64, 4, 4), Tiles(128, 128, 64, 8, 4)),
    ("bf16", "small"): (Tiles(64, 64, 64, 4, 4), Tiles(64, 128, 64, 4, 4), Tiles(64, 32, 64, 4, 4)),
    ("bf16", "skinny"): (
        Tiles(128, 256, 64, 8, 3),
        Tiles(128, 128, 64, 4, 3),
        Tiles(64, 256, 64, 4, 3),
        Tiles(64, 128, 64, 4, 3),
    ),
    ("bf16", "narrow"): (Tiles(128, 64, 64, 4, 4), Tiles(256, 64, 64, 8, 3), Tiles(64, 64, 64, 4, 4)),
    ("bf16", "flat"): (Tiles(64, 64, 128, 4, 4), Tiles(64, 32, 128, 4, 4), Tiles(64, 128, 64, 4, 4)),
    ("bf16", "long"): (
        Tiles(128, 128, 64, 8, 4),
        Tiles(128, 128, 64, 4, 4),
        Tiles(64, 128, 64, 4, 4),
        Tiles(64, 64, 64, 4, 5),
    ),
}


def tile_class(problem: GemmProblem) -> str:
    """The class of a problem: `long`, `flat`, `narrow`, `skinny`, `small` or `large`."""
    m, n = problem.m, problem.n
    tiles = _ceil_div(m, 128) * _ceil_div(n, 128)
    if 2 * tiles <= _MULTIPROCESSORS and problem.k >= _LONG_K:
        return "long"
    if m <= 64:
        return "flat"
    if n <= 64:
        return "narrow"
    if n <= 512 and m >= 16384:
        return "skinny"
    return "small" if tiles < _MULTIPROCESSORS else "large"


def tiles_for(
    problem: GemmProblem, family: Family, *, element_bytes: int = 0, shared_bytes: int = SHARED_BYTES
) -> Tiles:
    """The tiles that a product runs with.

    Args:
        problem: m, n and k; its pass does not matter.
        family: How it accumulates, or `bf16`.
        element_bytes: Size of an operand's element; 0 for 1 in FP8 and 2 in bf16.
        shared_bytes: Shared memory of a program; stages, then columns, rows, length are given up to fit it.
    """
    first = _TABLE[family, tile_class(problem)][0]
    return _adapted(first, problem, family, element_bytes, shared_bytes)


def alternatives(
    problem: GemmProblem, family: Family, *, element_bytes: int = 0, shared_bytes: int = SHARED_BYTES
) -> tuple[Tiles, ...]:
    """The tiles that are worth timing for a product, without repetition; the first is what runs.

    Args: as for `tiles_for`.
    """
    found: dict[Tiles, None] = {}
    for tiles in _TABLE[family, tile_class(problem)]:
        found[_adapted(tiles, problem, family, element_bytes, shared_bytes)] = None
    return tuple(found)


def _adapted(
    tiles: Tiles, problem: GemmProblem, family: Family, element_bytes: int, shared_bytes: int
) -> Tiles:
    """Tiles of the table for this very problem and device."""
    element = element_bytes or (2 if family == "bf16" else 1)
    cut = _cut_to(tiles, problem, family, element)
    return _with_splits(_fitted(cut, element, shared_bytes), problem)


def _cut_to(tiles: Tiles, problem: GemmProblem, family: Family, element: int) -> Tiles:
    """No tile longer than the problem, save for the least that the instructions take."""
    block_k = tiles.block_k
    if family != "blockwise":
        block_k = max(32 // element, 16, _power_above(problem.k, block_k))
    block_m = max(_LEAST_ROWS, _power_above(problem.m, tiles.block_m))
    block_n = max(16, _power_above(problem.n, tiles.block_n))
    warps = tiles.warps
    if block_m * block_n * 2 <= tiles.block_m * tiles.block_n and block_m < 128:
        warps = min(warps, 4)
    steps = _ceil_div(max(problem.k, 1), block_k)
    stages = int(min(tiles.stages, max(2, steps)))
    return replace(tiles, block_m=block_m, block_n=block_n, block_k=block_k, warps=warps, stages=stages)


def _fitted(tiles: Tiles, element: int, shared_bytes: int) -> Tiles:
    while tiles.shared_bytes(element) > shared_bytes and tiles.stages > 2:
        tiles = replace(tiles, stages=tiles.stages - 1)
    while tiles.shared_bytes(element) > shared_bytes and tiles.block_n > 64:
        tiles = replace(tiles, block_n=tiles.block_n // 2)
    while tiles.shared_bytes(element) > shared_bytes and tiles.block_m > _LEAST_ROWS:
        tiles = replace(tiles, block_m=tiles.block_m // 2)
    while tiles.shared_bytes(element) > shared_bytes and element > 1 and tiles.block_k > 32:
        tiles = replace(tiles, block_k=tiles.block_k // 2)
    return tiles


def _with_splits(tiles: Tiles, problem: GemmProblem) -> Tiles:
    """As many splits as fill the multiprocessors, each with at least eight steps of k."""
    if tile_class(problem) != "long":
        return tiles
    steps = _ceil_div(problem.k, tiles.block_k)
    wanted = max(1, 2 * _MULTIPROCESSORS // tiles.tiles(problem.m, problem.n) // max(1, tiles.warps // 4))
    splits = max(1, min(wanted, steps // _LEAST_STEPS))
    # Whole steps: the last split must not be empty.
    per_split = _ceil_div(steps, splits)
    return replace(tiles, splits=int(_ceil_div(steps, per_split)))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_above(size: int, most: int) -> int:
    """The power of two at or above size, at most `most`: by comparisons, which torch.compile can guard."""
    power = 1
    while power < most and power < size:
        power *= 2
    return power
