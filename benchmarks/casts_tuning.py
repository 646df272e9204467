"""Tile sizes of the casts on the GPU in hand: every alternative, timed. Prints; changes nothing.

python benchmarks/casts_tuning.py [blocks]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from loka.kernels.triton.casts import (
    blockwise,
    cast_blockwise,
    cast_rowwise,
    cast_tensorwise,
    rowwise,
    tensorwise,
    turned,
)
from loka.kernels.triton.casts.tiles import Tile
from loka.timing import measure, measure_or_reason

SHAPES = ((65536, 2048), (65536, 512), (8192, 2048))
ROUNDS = 12


def flat(C: int, elements: int) -> tuple[int, int]:
    columns = min(1024, C)
    return elements // columns, columns


def amax_tiles(C: int) -> Iterator[Tile]:
    for elements, warps, programs in itertools.product((4096, 8192), (8,), (1056, 2112)):
        yield Tile(*flat(1024, elements), warps, programs)


def elementwise_tiles(C: int) -> Iterator[Tile]:
    for elements, warps in itertools.product((2048, 4096, 8192), (4, 8)):
        yield Tile(*flat(1024, elements), warps)


def rowwise_tiles(C: int) -> Iterator[Tile]:
    for elements, warps in itertools.product((C, 2 * C, 4 * C), (1, 2, 4)):
        yield Tile(elements // C, C, warps)


def transposing_tiles(C: int) -> Iterator[Tile]:
    for (rows, columns), warps in itertools.product(((128, 128), (128, 64), (64, 128), (256, 64)), (4, 8)):
        yield Tile(rows, columns, warps)


def straight_block_tiles(C: int) -> Iterator[Tile]:
    for rows, warps in itertools.product((8, 16, 32), (1, 2, 4)):
        yield Tile(rows, 128, warps)


def pairs_tiles(C: int) -> Iterator[Tile]:
    for columns, piece, warps in itertools.product((32, 64, 128), (32, 64), (2, 4)):
        yield Tile(piece, columns, warps)


def whole_pairs_tiles(C: int) -> Iterator[Tile]:
    for piece, warps in itertools.product((16, 32, 64), (2, 4, 8)):
        yield Tile(piece, 128, warps)


def main() -> None:
    jobs: list[tuple[str, object, str, Callable[[int], Iterator[Tile]], Callable[[Tensor], object]]] = [
        ("amax", tensorwise, "amax_tile", amax_tiles, tensorwise._partial_amax),
        (
            "tensorwise cast, static scale",
            tensorwise,
            "elementwise_tile",
            elementwise_tiles,
            lambda x: cast_tensorwise(x, x.new_ones((), dtype=torch.float32), 0, False, 16, 0),
        ),
        (
            "tensorwise both, static scale",
            turned,
            "transposing_tile",
            transposing_tiles,
            lambda x: cast_tensorwise(x, x.new_ones((), dtype=torch.float32), 0, False, 16, 16),
        ),
        ("rowwise", rowwise, "rowwise_tile", rowwise_tiles, lambda x: cast_rowwise(x, 0, False, 16)),
        (
            "1x128",
            blockwise,
            "blockwise_tile",
            straight_block_tiles,
            lambda x: cast_blockwise(x, 0, False, False, 16, 1, 0, 0),
        ),
        (
            "1x128 both",
            blockwise,
            "both_tile",
            whole_pairs_tiles,
            lambda x: cast_blockwise(x, 0, False, False, 16, 1, 16, 1),
        ),
        (
            "1x128 transposed",
            blockwise,
            "both_tile",
            pairs_tiles,
            lambda x: cast_blockwise(x, 0, False, False, 0, 0, 16, 1),
        ),
        (
            "128x128 both",
            blockwise,
            "both_tile",
            whole_pairs_tiles,
            lambda x: cast_blockwise(x, 0, False, True, 16, 2, 16, 2),
        ),
    ]
    if sys.argv[1:] == ["blocks"]:
        jobs = [job for job in jobs if "128" in job[0]]
    for rows, columns in SHAPES:
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        copy = measure({"copy": lambda y=y, x=x: y.copy_(x)}, device="cuda", rounds=ROUNDS)["copy"].p50_us
        print(f"{rows}x{columns} copy {copy:.1f} us, {4 * x.numel() / copy / 1e6:.2f} TB/s", flush=True)
        for name, module, attribute, tiles, call in jobs:
            kept = getattr(module, attribute)
            found = []
            for tile in tiles(columns):
                setattr(module, attribute, lambda *_, tile=tile, **__: tile)
                job = {"cast": lambda x=x, call=call: call(x)}
                measured = measure_or_reason(job, device="cuda", rounds=ROUNDS)
                if measured.reasons:  # a tile that does not compile is an answer
                    print(name, tile, measured.reasons["cast"][:80])
                    continue
                found.append((measured.timings["cast"].p50_us, tile))
            setattr(module, attribute, kept)
            if not found:
                continue
            best = sorted(found)[:4]
            print(
                f"  {name}: "
                + "; ".join(f"{t:.1f} {tuple(tile)}" for t, tile in best)
                + f"; worst {max(found)[0]:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
