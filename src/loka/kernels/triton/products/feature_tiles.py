"""Tile sizes of the products over the features of a batch [B, n, d]. Pure; needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loka.kernels.triton.products.tiles import SHARED_BYTES

__all__ = ["FeatureTiles", "sum_alternatives", "sum_tiles", "tiles_for_features", "transform_alternatives"]

_MULTIPROCESSORS = 132
_PROGRAMS = 8 * _MULTIPROCESSORS  # few enough that a weight tile is read for many samples
_WHOLE = 512  # inner features up to which one tile holds all of them


@dataclass(frozen=True, slots=True)
class FeatureTiles:
    """How a product over samples is cut.

    Attributes:
        rows: Output features of a tile.
        inner: Input features of a tile (of one step where there are more than 512).
        columns: Elements of d of a tile.
        warps: Warps of a program.
        stages: Loads in flight.
        samples: Samples (or, for a sum over samples, steps) of one program.
    """

    rows: int
    inner: int
    columns: int
    warps: int
    stages: int
    samples: int = 1


def transform_alternatives(
    samples: int, rows: int, inner: int, d: int, *, element_bytes: int, shared_bytes: int = SHARED_BYTES
) -> tuple[FeatureTiles, ...]:
    """Tiles worth timing for out[b] = A [rows, inner] @ in[b] [inner, d]; the first is what runs.

    A tile holds all inner features of some columns, and all rows where they are few: the input is then
    read once. `element_bytes` is that of the input in memory.
    """
    block_inner = _power(inner, 16, _WHOLE) if inner <= _WHOLE else 128
    found: dict[FeatureTiles, None] = {}
    for wide_rows, wide_columns, stages in ((128, 128, 3), (64, 128, 3), (128, 64, 3), (64, 64, 4)):
        block_rows = _power(rows, 64, wide_rows)
        block_columns = _power(d, 16, wide_columns)
        warps = 8 if block_rows * block_columns >= 128 * 128 else 4
        tiles = FeatureTiles(block_rows, block_inner, block_columns, warps, stages)
        tiles = _fitted(tiles, element_bytes, shared_bytes)
        cells = _ceil_div(rows, tiles.rows) * _ceil_div(d, tiles.columns)
        found[replace(tiles, samples=max(1, min(32, samples * cells // _PROGRAMS)))] = None
    return tuple(found)


def tiles_for_features(
    samples: int, rows: int, inner: int, d: int, *, element_bytes: int, shared_bytes: int = SHARED_BYTES
) -> FeatureTiles:
    """The tiles that out[b] = A @ in[b] runs with; see `transform_alternatives`."""
    return transform_alternatives(
        samples, rows, inner, d, element_bytes=element_bytes, shared_bytes=shared_bytes
    )[0]


def sum_alternatives(
    samples: int, rows: int, inner: int, d: int, *, element_bytes: int, shared_bytes: int = SHARED_BYTES
) -> tuple[FeatureTiles, ...]:
    """Tiles worth timing for dA [rows, inner] = sum over b of g[b] [rows, d] @ x[b].T; the first runs."""
    block_columns = _power(d, 16, 64)
    steps = samples * _ceil_div(d, block_columns)
    found: dict[FeatureTiles, None] = {}
    for wide_rows, wide_inner, warps in ((128, 128, 8), (128, 256, 8), (64, 128, 4), (128, 64, 4)):
        tiles = FeatureTiles(
            _power(rows, 64, wide_rows), _power(inner, 16, wide_inner), block_columns, warps, 4
        )
        while _sum_bytes(tiles, element_bytes) > shared_bytes and tiles.stages > 2:
            tiles = replace(tiles, stages=tiles.stages - 1)
        cells = _ceil_div(rows, tiles.rows) * _ceil_div(inner, tiles.inner)
        splits = max(1, min(_ceil_div(2 * _MULTIPROCESSORS, cells), steps // 8))
        found[replace(tiles, samples=max(1, _ceil_div(steps, splits)))] = None
    return tuple(found)


def sum_tiles(
    samples: int, rows: int, inner: int, d: int, *, element_bytes: int, shared_bytes: int = SHARED_BYTES
) -> FeatureTiles:
    """The tiles that the sum over samples runs with; see `sum_alternatives`."""
    return sum_alternatives(samples, rows, inner, d, element_bytes=element_bytes, shared_bytes=shared_bytes)[
        0
    ]


def _transform_bytes(tiles: FeatureTiles, element_bytes: int) -> int:
    """The streamed input's buffers and the weight tile, which may be fp32 when it is computed in fp32."""
    return tiles.inner * (tiles.stages * tiles.columns + tiles.rows) * element_bytes


def _sum_bytes(tiles: FeatureTiles, element_bytes: int) -> int:
    return tiles.stages * (tiles.rows + tiles.inner) * tiles.columns * element_bytes


def _fitted(tiles: FeatureTiles, element_bytes: int, shared_bytes: int) -> FeatureTiles:
    while _transform_bytes(tiles, element_bytes) > shared_bytes and tiles.stages > 2:
        tiles = replace(tiles, stages=tiles.stages - 1)
    while _transform_bytes(tiles, element_bytes) > shared_bytes and tiles.columns > 32:
        tiles = replace(tiles, columns=tiles.columns // 2, warps=4)
    while _transform_bytes(tiles, element_bytes) > shared_bytes and tiles.rows > 16:
        tiles = replace(tiles, rows=tiles.rows // 2)
    while _transform_bytes(tiles, element_bytes) > shared_bytes and tiles.columns > 16:
        tiles = replace(tiles, columns=tiles.columns // 2)
    return tiles


def _power(size: int, least: int, most: int) -> int:
    return max(least, min(most, 1 << max(0, size - 1).bit_length()))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
