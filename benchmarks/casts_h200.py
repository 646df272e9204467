"""How near LoKA's casts come to a device copy of the same bytes, in one interleaved run.

    python benchmarks/casts_h200.py --out casts_h200.json [--commit HASH] [--rounds 40]

`<cast>_fraction_of_copy@RxC` is the time of a device copy over the time of the cast, both moving the same
bytes: what the cast must read and write, a copy's reads plus its writes. A tensorwise cast must read its
tensor twice (amax, then cast) unless the scale is given. Scales are counted. bf16 in, E4M3 out; caches cold.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from loka.artifacts import describe_environment, write_benchmark
from loka.kernels import cast
from loka.timing import clock_overhead_us, measure, paired_ratio
from loka.vocab import Format, Granularity, OperandSpec, ScaleLayout

SHAPES = ((65536, 2048), (65536, 512), (8192, 2048))


class Cast(NamedTuple):
    """One way to cast: what is wanted, from which dtype, and the bytes that must move."""

    specs: tuple[OperandSpec, ...]
    reads: int = 1
    dtype: torch.dtype = torch.bfloat16
    scale: bool = False

    def bytes(self, rows: int, columns: int) -> int:
        made = sum(_scale_bytes(spec, rows, columns) + rows * columns for spec in self.specs)
        return self.reads * rows * columns * self.dtype.itemsize + made


def _scale_bytes(spec: OperandSpec, rows: int, columns: int) -> int:
    down, across = (columns, rows) if spec.transposed else (rows, columns)
    return {
        Granularity.TENSORWISE: 4,
        Granularity.ROWWISE: 4 * down,
        Granularity.BLOCKWISE_1X128: 4 * down * -(-across // 128),
        Granularity.BLOCKWISE_128X128: 4 * -(-down // 128) * -(-across // 128),
    }[spec.granularity]


def _spec(granularity: Granularity, layout: ScaleLayout | None = None) -> OperandSpec:
    spec = OperandSpec.of(Format.E4M3, granularity, pad=16)
    return spec if layout is None else OperandSpec(spec.format, granularity, scale_layout=layout, pad=16)


def _both(spec: OperandSpec) -> tuple[OperandSpec, OperandSpec]:
    return spec, spec.with_transposed(True)


TENSOR, ROW = _spec(Granularity.TENSORWISE), _spec(Granularity.ROWWISE)
VECTOR = _spec(Granularity.BLOCKWISE_1X128, ScaleLayout.MN_MAJOR)
SQUARE = _spec(Granularity.BLOCKWISE_128X128, ScaleLayout.MN_MAJOR_PAD4)
CASTS = {
    "rowwise": Cast((ROW,)),
    "tensorwise": Cast((TENSOR,), reads=2),
    "tensorwise_static": Cast((TENSOR,), scale=True),
    "blockwise_1x128": Cast((VECTOR,)),
    "blockwise_128x128": Cast((SQUARE,)),
    "tensorwise_both": Cast(_both(TENSOR), reads=2),
    "tensorwise_static_both": Cast(_both(TENSOR), scale=True),
    "blockwise_both": Cast(_both(VECTOR)),
    "blockwise_128x128_both": Cast(_both(SQUARE)),
    "rowwise_transposed": Cast((ROW.with_transposed(True),), reads=2),
    "rowwise_fp32": Cast((ROW,), dtype=torch.float32),
    "tensorwise_both_fp32": Cast(_both(TENSOR), reads=2, dtype=torch.float32),
}


def _whole(size: int) -> int:
    """Up to whole runs of 8 KiB: a copy of an odd number of bytes takes half as long again."""
    return -(-size // 8192) * 8192


def _copy(size: int) -> Callable[[], object]:
    """A device copy that reads half of `size` bytes and writes the other half."""
    source = torch.randint(0, 255, (size // 16,), device="cuda", dtype=torch.int64)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _call(x: Tensor, wanted: Cast) -> Callable[[], object]:
    scale = torch.full((), 16 / 448, device="cuda") if wanted.scale else None
    return lambda: cast(x, wanted.specs, scale=scale)


def measured(rows: int, columns: int, rounds: int) -> dict[str, float]:
    """The metrics of one shape."""
    key = f"{rows}x{columns}"
    tensors = {
        dtype: torch.randn(rows, columns, device="cuda", dtype=dtype)
        for dtype in {wanted.dtype for wanted in CASTS.values()}
    }
    calls: dict[str, Callable[[], object]] = {
        name: _call(tensors[wanted.dtype], wanted) for name, wanted in CASTS.items()
    }
    sizes = {wanted.bytes(rows, columns) for wanted in CASTS.values()} | {4 * rows * columns}
    calls |= {f"copy {size}": _copy(size) for size in sorted(map(_whole, sizes))}
    timings = measure(calls, device="cuda", rounds=rounds)
    copy_us = timings[f"copy {_whole(4 * rows * columns)}"].p50_us
    metrics = {f"copy_us@{key}": copy_us, f"copy_tbps@{key}": 4 * rows * columns / copy_us / 1e6}
    for name, wanted in CASTS.items():
        size = wanted.bytes(rows, columns)
        # Bandwidths compared, pair by pair: that of the cast over that of copying x.
        ratio = paired_ratio(timings[f"copy {_whole(4 * rows * columns)}"], timings[name])
        share = size / (4 * rows * columns)
        same = paired_ratio(timings[name], timings[f"copy {_whole(size)}"])
        metrics |= {
            f"{name}_fraction_of_copy@{key}": share * ratio.median,
            f"{name}_fraction_of_copy_low@{key}": share * ratio.low,
            f"{name}_times_copy_of_same_bytes@{key}": same.median,
            f"{name}_us@{key}": timings[name].p50_us,
            f"{name}_bytes@{key}": size,
        }
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of the code, where the checkout does not say")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    metrics: dict[str, float] = {"clock_overhead_us": clock_overhead_us(device="cuda")}
    for rows, columns in SHAPES:
        found = measured(rows, columns, args.rounds)
        metrics |= found
        for name, value in found.items():
            if "fraction_of_copy@" in name or name.startswith("copy"):
                print(f"{name:50} {value:8.3f}", flush=True)
    environment = describe_environment()
    if args.commit:
        environment = msgspec.structs.replace(environment, commit=args.commit)
    notes = [
        "fraction_of_copy is a paired ratio: the time of a device copy of as many bytes as the cast must "
        "move, over the cast's time; _low is the lower end of its 90 % interval.",
        "Bytes: reads of the tensor (twice for a tensorwise amax and cast), values and scales written.",
        "blockwise_both is 1x128 in both orientations, scales mn-major; blockwise_128x128 has padded scales.",
    ]
    write_benchmark(args.out, metrics, {"rounds": args.rounds, "notes": notes}, environment=environment)


if __name__ == "__main__":
    main()
