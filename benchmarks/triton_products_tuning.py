"""Tiles of LoKA's Triton products on the GPU in hand: the alternatives of a class, beside torch. Prints only.

python benchmarks/triton_products_tuning.py [--quick] [--only fp8|bf16|features]

A line a product: what torch takes, then each alternative, first the one that runs; `*` marks the fastest.
Operands are ready; casts are timed elsewhere. Most of the run is compilation, about a second a line. Where
another alternative wins over a whole class, it belongs first in `loka/kernels/triton/products/tiles.py` (or
`feature_tiles.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from loka.kernels.triton.products.bf16 import launch_plain
from loka.kernels.triton.products.blockwise import launch_blockwise
from loka.kernels.triton.products.feature_tiles import FeatureTiles, sum_alternatives, transform_alternatives
from loka.kernels.triton.products.features import launch_sum, launch_transform
from loka.kernels.triton.products.scaled import launch_scaled
from loka.kernels.triton.products.tiles import Family, Tiles, alternatives, tile_class
from loka.timing import measure_or_reason
from loka.vocab import Format, GemmProblem

Call = Callable[[], object]
Job = tuple[str, dict[str, Call]]

# (m, n, k): of each class some that libraries serve badly, and some that they serve well, to know the gap.
FP8_SHAPES = (
    (8192, 2048, 2048),
    (8192, 4096, 1000),
    (1024, 256, 256),
    (1024, 1000, 512),
    (65536, 250, 479),
    (65536, 512, 512),
    (8192, 13, 512),
    (65536, 24, 128),
    (512, 512, 65536),
    (256, 250, 65536),
    (64, 4096, 1024),
    (1024, 1024, 8192),
)
# Rows, N and K of skinny sites: 8192 samples of d = 128.
SKINNY = ((1 << 20, 24, 128), (1 << 20, 120, 128), (1 << 20, 64, 200), (1 << 18, 392, 400))
# B, n, d and the siblings of a layer: the towers M and L, and a small one.
FEATURES = (
    (8192, 128, 128, (24, 32, 64)),
    (6144, 192, 256, (32, 64, 128)),
    (8192, 64, 64, (16, 16, 32)),
)


def fp8_jobs(shapes: tuple[tuple[int, int, int], ...]) -> Iterator[Job]:
    for m, n, k in shapes:
        problem = GemmProblem(m, n, k)
        padded = k + -k % 16
        a, b = codes(m, padded), codes(n, padded)
        one = torch.ones((), device="cuda")
        row_a, row_b = torch.ones(m, device="cuda"), torch.ones(n, device="cuda")
        blocks = -(-padded // 128)
        block_a = torch.ones(m, blocks, device="cuda")
        block_b = torch.ones(-(-n // 128), blocks, device="cuda")
        x, w = a.bfloat16(), b.bfloat16()
        torch_calls: dict[str, Call] = {"torch bf16": partial(torch.nn.functional.linear, x, w)}
        if n % 16 == 0:
            for name, fast in (("torch fp8", False), ("torch fp8 fast", True)):
                torch_calls[name] = partial(
                    torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
                )
        families: tuple[Family, ...] = ("exact", "fast", "blockwise")
        for family in families:
            calls = dict(torch_calls)
            for tiles in alternatives(problem, family):
                if family == "blockwise":
                    product = partial(launch_blockwise, a, b, block_a, block_b, None, square_b=True)
                else:
                    product = partial(launch_scaled, a, b, row_a, row_b, None, fast=family == "fast")
                calls[shown(tiles)] = partial(product, out_dtype=torch.bfloat16, tiles=tiles)
            yield f"{family} {tile_class(problem)} {problem.key}", calls


def bf16_jobs(shapes: tuple[tuple[int, int, int], ...]) -> Iterator[Job]:
    for rows, out_features, in_features in shapes:
        x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
        g = torch.randn(rows, out_features, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
        for name, a, b, out in (
            ("fwd", x, w, torch.bfloat16),
            ("dgrad", g, w.t(), torch.bfloat16),
            ("wgrad", g.t(), x.t(), torch.float32),
        ):
            problem = GemmProblem(
                a.shape[0], b.shape[0], a.shape[1], a_format=Format.BF16, b_format=Format.BF16
            )
            calls: dict[str, Call] = {"torch bf16": partial(torch_product, a, b, out)}
            for tiles in alternatives(problem, "bf16"):
                calls[shown(tiles)] = partial(
                    launch_plain, a, b, None, out_dtype=out, compute_dtype=torch.bfloat16, tiles=tiles
                )
            yield f"bf16 {name} {tile_class(problem)} {problem.key}", calls


def feature_jobs(cases: tuple[tuple[int, int, int, tuple[int, ...]], ...]) -> Iterator[Job]:
    for B, n, d, counts in cases:
        rows = sum(counts)
        x = torch.randn(B, n, d, device="cuda", dtype=torch.bfloat16)
        dx = torch.empty_like(x)
        grads = [torch.randn(B, c, d, device="cuda", dtype=torch.bfloat16) for c in counts]
        weights = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
        parts = list(weights.split(counts))
        size = f"B{B} n{n} d{d} {'+'.join(map(str, counts))}"

        calls: dict[str, Call] = {
            "torch W @ x": partial(each_product, parts, x),
            "torch x.T @ W.T": partial(transposed_products, parts, x),
        }
        for tiles in transform_alternatives(B, rows, n, d, element_bytes=2):
            calls[shown(tiles)] = partial(
                launch_transform, weights, [x], grads, tiles=tiles, compute_dtype=torch.bfloat16
            )
        yield f"features fwd {size}", calls

        calls = {"torch W.T @ g": partial(summed_products, parts, grads)}
        for tiles in transform_alternatives(B, n, rows, d, element_bytes=2):
            calls[shown(tiles)] = partial(
                launch_transform, weights.t(), grads, [dx], tiles=tiles, compute_dtype=torch.bfloat16
            )
        yield f"features dx {size}", calls

        calls = {"torch einsum": partial(weight_gradients, grads, x)}
        for tiles in sum_alternatives(B, rows, n, d, element_bytes=2):
            calls[shown(tiles)] = partial(launch_sum, grads, x, tiles=tiles, compute_dtype=torch.bfloat16)
        yield f"features dw {size}", calls


def codes(rows: int, k: int) -> Tensor:
    return torch.randn(rows, k, device="cuda").clamp(-4, 4).to(torch.float8_e4m3fn)


def torch_product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (a @ b.t()).to(out_dtype)


def each_product(parts: list[Tensor], x: Tensor) -> list[Tensor]:
    return [w @ x for w in parts]


def transposed_products(parts: list[Tensor], x: Tensor) -> list[Tensor]:
    """As linear layers over the transposed input, which is copied."""
    transposed = x.transpose(1, 2).contiguous()
    return [torch.nn.functional.linear(transposed, w) for w in parts]


def summed_products(parts: list[Tensor], grads: list[Tensor]) -> Tensor:
    total = parts[0].t() @ grads[0]
    for w, g in zip(parts[1:], grads[1:], strict=True):
        total = total + w.t() @ g
    return total


def weight_gradients(grads: list[Tensor], x: Tensor) -> list[Tensor]:
    return [torch.einsum("bid,bjd->ij", g, x) for g in grads]


def shown(tiles: Tiles | FeatureTiles) -> str:
    if isinstance(tiles, FeatureTiles):
        sizes = f"{tiles.rows}x{tiles.inner}x{tiles.columns}"
        return f"{sizes} w{tiles.warps} s{tiles.stages} samples {tiles.samples} splits {tiles.splits}"
    sizes = f"{tiles.block_m}x{tiles.block_n}x{tiles.block_k}"
    return f"{sizes} w{tiles.warps} s{tiles.stages}" + (f" /{tiles.splits}" if tiles.splits > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a quarter of the shapes, fewer rounds")
    parser.add_argument("--only", choices=("fp8", "bf16", "features"))
    options = parser.parse_args()
    step, rounds = (4, 6) if options.quick else (1, 10)
    kinds: dict[str, Iterator[Job]] = {
        "fp8": fp8_jobs(FP8_SHAPES[::step]),
        "bf16": bf16_jobs(SKINNY[::step]),
        "features": feature_jobs(FEATURES[::step]),
    }
    for kind, jobs in kinds.items():
        if options.only in (None, kind):
            for name, calls in jobs:
                report(name, calls, rounds)


def report(name: str, calls: dict[str, Call], rounds: int) -> None:
    measured = measure_or_reason(calls, device="cuda", rounds=rounds)
    times = {candidate: timing.p50_us for candidate, timing in measured.timings.items()}
    ours = [t for candidate, t in times.items() if not candidate.startswith("torch")]
    print(name)
    for candidate, time_us in times.items():
        mark = "*" if ours and time_us == min(ours) else " "
        print(f"  {mark} {time_us:9.1f} us  {candidate}")
    for candidate, reason in measured.reasons.items():
        print(f"    failed: {candidate}: {reason}")


if __name__ == "__main__":
    main()
