"""How near the norm kernels come to a device copy of the same bytes, and what the compiler makes of them.

    python benchmarks/norms_h200.py --out norms_h200.json [--commit HASH] [--rounds 40]

`<kernel>_fraction_of_copy@RxC` is the bandwidth of a kernel over that of a device copy of x: bytes that must
move, a copy's reads plus its writes, against time. `<kernel>_speedup_over_compiled@RxC` is against
torch.compile of the same formulas in plain torch (for `to_float8*`: normalization, hard swish and LoKA's cast
with the same static scale). BlockNorm-256 with hard swish, bf16 in; one interleaved run, caches cold.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from loka.artifacts import describe_environment, write_benchmark
from loka.kernels import cast
from loka.kernels.block_norm import block_norm, block_norm_gradients, block_norm_operands
from loka.numerics import block_rms_norm, block_rms_norm_gradients, bound_scale
from loka.timing import clock_overhead_us, measure, paired_ratio
from loka.vocab import BlockNormSpec, Format, Granularity, OperandSpec

SHAPES = ((8192, 2048), (6144, 4096), (65536, 512), (65536, 2048))
NORM = BlockNormSpec(256, 1e-6, True)
LYING = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE, pad=16)
BOTH = (LYING, LYING.with_transposed(True))
ROWS = (OperandSpec.of(Format.E4M3, Granularity.ROWWISE, pad=16),)

# Bytes an element that must move, and the kernel's name in the metrics.
BYTES = {"forward": 4, "gradients": 6, "to_float8": 3, "to_float8_both": 4, "to_float8_rows": 3}


def _ours(x: Tensor, g: Tensor) -> dict[str, Callable[[], object]]:
    return {
        "forward": lambda: block_norm(x, NORM),
        "gradients": lambda: block_norm_gradients(g, x, NORM),
        "to_float8": lambda: block_norm_operands(x, NORM, BOTH[:1]),
        "to_float8_both": lambda: block_norm_operands(x, NORM, BOTH),
        "to_float8_rows": lambda: block_norm_operands(x, NORM, ROWS),
    }


def _compiled(x: Tensor, g: Tensor) -> dict[str, Callable[[], object]]:
    """The same by torch.compile; casts are LoKA's, of what the compiler normalized."""
    scale = torch.full((), bound_scale(NORM, x.shape[1], LYING), device=x.device)
    forward = torch.compile(lambda t: block_rms_norm(t, NORM).to(t.dtype))
    gradients = torch.compile(lambda a, t: block_rms_norm_gradients(a, t, NORM)[0].to(t.dtype))
    return {
        "forward": lambda: forward(x),
        "gradients": lambda: gradients(g, x),
        "to_float8": lambda: cast(forward(x), BOTH[:1], scale=scale),
        "to_float8_both": lambda: cast(forward(x), BOTH, scale=scale),
        "to_float8_rows": lambda: cast(forward(x), ROWS),
    }


def measured(rows: int, columns: int, rounds: int, *, device: str = "cuda") -> dict[str, float]:
    """The metrics of one shape."""
    key = f"{rows}x{columns}"
    x, g = (torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(2))
    target = torch.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(x)}
    calls |= _ours(x, g)
    calls |= {f"{name} compiled": call for name, call in _compiled(x, g).items()}
    timings = measure(calls, device=device, rounds=rounds)
    metrics = {f"copy_us@{key}": timings["copy"].p50_us}
    for name, size in BYTES.items():
        of_copy = paired_ratio(timings["copy"], timings[name])
        faster = paired_ratio(timings[f"{name} compiled"], timings[name])
        metrics |= {
            f"{name}_us@{key}": timings[name].p50_us,
            f"{name}_fraction_of_copy@{key}": size / 4 * of_copy.median,
            f"{name}_fraction_of_copy_low@{key}": size / 4 * of_copy.low,
            f"{name}_speedup_over_compiled@{key}": faster.median,
            f"{name}_speedup_over_compiled_low@{key}": faster.low,
        }
    return metrics | _errors(x, g, key)


def _errors(x: Tensor, g: Tensor, key: str) -> dict[str, float]:
    """Relative error against FP64, in units of that of the formula in plain torch, rounded alike."""
    exact, exact_dx = (
        block_rms_norm(x.double(), NORM),
        block_rms_norm_gradients(g.double(), x.double(), NORM)[0],
    )
    theirs = block_rms_norm(x, NORM).to(x.dtype)
    theirs_dx = block_rms_norm_gradients(g, x, NORM)[0].to(x.dtype)
    ours, ours_dx = block_norm(x, NORM), block_norm_gradients(g, x, NORM)[0]
    return {
        f"forward_error_over_torch@{key}": _off(ours, exact) / _off(theirs, exact),
        f"gradients_error_over_torch@{key}": _off(ours_dx, exact_dx) / _off(theirs_dx, exact_dx),
    }


def _off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of the code, where the checkout does not say")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    metrics: dict[str, float] = {"clock_overhead_us": clock_overhead_us(device="cuda")}
    for rows, columns in SHAPES:
        metrics |= measured(rows, columns, args.rounds)
    for name, value in metrics.items():
        print(f"{name:56} {value:9.3f}", flush=True)
    environment = describe_environment()
    if args.commit is not None:
        environment = msgspec.structs.replace(environment, commit=args.commit)
    write_benchmark(args.out, metrics, {"norm": str(NORM)}, environment=environment)


if __name__ == "__main__":
    main()
