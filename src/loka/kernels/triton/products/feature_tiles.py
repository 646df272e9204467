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
        samples: Samples of one program.
        splits: Programs that share a sum over samples, each with a part of them.
    """

    rows: int
    inner: int
    columns: int
    warps: int
    stages: int
    samples: int = 1
    splits: int = 1


# The most that tiles hold; the first of each is what runs.
_TRANSFORM = ((128, 128, 3), (64, 128, 3), (128, 64, 3), (64, 64, 4))  # rows, columns, stages
_SUM = ((128, 128, 8), (128, 256, 8), (64, 128, 4), (128, 64, 4))  # rows, inner, warps


def tiles_for_features(
    samples: int, rows: int, inner: int, d: int, *, element_bytes: int, shared_bytes: int = SHARED_BYTES
) -> FeatureTiles:
    """The tiles that out[b] = A [rows, inner] @ in[b] [inner, d] runs with.

    A tile holds all inner features of some columns, and all rows where they are few: the input is then
    read once. `element_bytes` is that of the input in memory.
    """
    return _transform(_TRANSFORM[0], samples, rows, inner, d, element_bytes, shared_bytes)


def transform_alternatives(
    samples: int, rows: int, inner: int, d: int, *, element_bytes: int, shared_bytes: int = SHARED_BYTES
) -> tuple[FeatureTiles, ...]:
    """Tiles worth timing for out[b] = A @ in[b]; the first is what runs."""
    made = (_transform(most, samples, rows, inner, d, element_bytes, shared_bytes) for most in _TRANSFORM)
    return tuple(dict.fromkeys(made))


def _transform(
    most: tuple[int, int, int],
    samples: int,
    rows: int,
    inner: int,
    d: int,
    element_bytes: int,
    shared_bytes: int,
) -> FeatureTiles:
    block_inner = _power(inner, 16, _WHOLE) if inner <= _WHOLE else 128
    block_rows, block_columns = _power(rows, 64, most[0]), _power(d, 16, most[1])
    warps = 8 if block_rows * block_columns >= 128 * 128 else 4
    tiles = FeatureTiles(block_rows, block_inner, block_columns, warps, most[2])
    tiles = _fitted(tiles, element_bytes, shared_bytes)
    cells = _ceil_div(rows, tiles.rows) * _ceil_div(d, tiles.columns)
    return replace(tiles, samples=int(max(1, min(32, samples * cells // _PROGRAMS))))


def sum_tiles(
    samples: int, rows: int, inner: int, d: int, *, element_bytes: int, shared_bytes: int = SHARED_BYTES
) -> FeatureTiles:
    """The tiles that dA [rows, inner] = sum over b of g[b] [rows, d] @ x[b].T runs with."""
    return _sum(_SUM[0], samples, rows, inner, d, element_bytes, shared_bytes)


def sum_alternatives(
    samples: int, rows: int, inner: int, d: int, *, element_bytes: int, shared_bytes: int = SHARED_BYTES
) -> tuple[FeatureTiles, ...]:
    """Tiles worth timing for the sum over samples; the first is what runs."""
    made = (_sum(most, samples, rows, inner, d, element_bytes, shared_bytes) for most in _SUM)
    return tuple(dict.fromkeys(made))


def _sum(
    most: tuple[int, int, int],
    samples: int,
    rows: int,
    inner: int,
    d: int,
    element_bytes: int,
    shared_bytes: int,
) -> FeatureTiles:
    block_columns = _power(d, 16, 64)
    tiles = FeatureTiles(_power(rows, 64, most[0]), _power(inner, 16, most[1]), block_columns, most[2], 4)
    while _sum_bytes(tiles, element_bytes) > shared_bytes and tiles.stages > 2:
        tiles = replace(tiles, stages=tiles.stages - 1)
    cells = _ceil_div(rows, tiles.rows) * _ceil_div(inner, tiles.inner)
    steps = samples * _ceil_div(d, block_columns)
    splits = int(max(1, min(_ceil_div(2 * _MULTIPROCESSORS, cells), steps // 8)))
    return replace(tiles, splits=splits)


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
    """The power of two at or above size within bounds: by comparisons, which torch.compile can guard."""
    power = least
    while power < most and power < size:
        power *= 2
    return power


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
