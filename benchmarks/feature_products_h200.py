"""Wukong's skinny products of one input: LoKA's merged product, and the two ways that torch has.

    python benchmarks/feature_products_h200.py --out feature_products_h200.json [--commit HASH]

x [B, n, d] and the weights of the FM projection, LCB and residual, W_i [N_i, n]: out_i[b] = W_i @ x[b]. In
one interleaved run, forward and backward, bf16, caches cold:

    linear    transpose x to [B, d, n], contiguous, and a Linear for each weight, as models are written
    matmul    W_i @ x for each weight, with x as it lies
    merged    loka.kernels.triton.products.features.feature_products
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from loka.artifacts import describe_environment, write_benchmark
from loka.kernels.triton.products.features import feature_products
from loka.timing import measure_or_reason, paired_ratio

# B, n, d and the outputs of the FM projection, LCB and residual: the towers M and L.
SHAPES = {"8192x128x128": (24, 32, 64), "6144x192x256": (32, 64, 128)}


def linear(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    turned = x.transpose(1, 2).contiguous()
    return [torch.nn.functional.linear(turned, w) for w in weights]


def matmul(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [w @ x for w in weights]


def merged(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return list(feature_products(x, weights))


def trained(
    way: Callable[[Tensor, Sequence[Tensor]], list[Tensor]], x: Tensor, weights: list[Tensor]
) -> Callable[[], object]:
    """Forward and backward, gradients made anew."""
    leaves = [x, *weights]
    with torch.no_grad():
        gradients = [torch.randn_like(out) for out in way(x, weights)]

    def step() -> object:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(way(x, weights), gradients)
        return [leaf.grad for leaf in leaves]

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of the code, where the checkout does not say")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    metrics: dict[str, float] = {}
    details: dict[str, object] = {"notes": [" ".join((__doc__ or "").split("\n\n")[2].split())]}
    for key, outputs in SHAPES.items():
        B, n, d = map(int, key.split("x"))
        x = torch.randn(B, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weights = [
            (torch.randn(N, n, device="cuda", dtype=torch.bfloat16) * n**-0.5).requires_grad_()
            for N in outputs
        ]
        ways = {"linear": linear, "matmul": matmul, "merged": merged}
        calls: dict[str, Callable[[], object]] = {}
        for name, way in ways.items():
            calls[f"fwd_{name}"] = lambda way=way, x=x, weights=weights: way(x.detach(), weights)
            calls[f"train_{name}"] = trained(way, x, weights)
        found = measure_or_reason(calls, device="cuda", rounds=args.rounds)
        for what in ("fwd", "train"):
            for name in ways:
                if f"{what}_{name}" in found.timings:
                    metrics[f"{what}_{name}_us@{key}"] = found.timings[f"{what}_{name}"].p50_us
            for base in ("linear", "matmul"):
                pair = f"{what}_{base}", f"{what}_merged"
                if all(name in found.timings for name in pair):
                    ratio = paired_ratio(found.timings[pair[0]], found.timings[pair[1]])
                    metrics[f"{what}_speedup_over_{base}@{key}"] = ratio.median
        details[key] = {"outputs": outputs, "failed": found.reasons}
    for name, value in metrics.items():
        print(f"{name:48} {value:10.3f}", flush=True)
    environment = describe_environment()
    if args.commit:
        environment = msgspec.structs.replace(environment, commit=args.commit)
    write_benchmark(args.out, metrics, details, environment=environment)


if __name__ == "__main__":
    main()
