"""What the Mods are worth on the towers M and L, products in bf16: in plain torch, and by LoKA's kernels.

    python benchmarks/mods_h200.py --out mods_h200.json [--towers M L] [--ways train inference] [--only ...]

Variants, all compiled and timed in turn in one run: `plain` (LayerNorm, x * sigmoid(LayerNorm(x)), biases),
`tuned` (the same, no transpose in memory, skinny products merged), each Mod, each pair and all three; those
with BlockNorm by torch.compile of its formula (`<name>.torch`) and by the Triton kernels (`<name>.fused`),
and `all.fused_tuned`. BlockNorm-256; a width that is no multiple of 256 is one block.

`<way>_speedup@<tower>.<name>` is against `plain`, `<way>_speedup_vs_tuned@...` against `tuned`: medians of
the ratios of neighbouring steps, with the 90 % interval (`_low`, `_high`). `<way>_peak_bytes@...` is the
memory of one step at most. Compile times stand in the details.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from loka.artifacts import describe_environment, write_benchmark
from loka.mods import BlockNorm, UseBlockNorm, apply_mods
from loka.numerics import block_rms_norm
from loka.timing import Timing, paired_ratio
from towers import TowerInference, TowerStep, tuned

MODS = {"no_bias": "no_bias", "block_norm": UseBlockNorm(256, whole_rows=True), "hard_swish": "hard_swish"}
_WARM_UP = 3
Change = Callable[[nn.Module], object] | None


def _mods(names: Sequence[str], *, fused: bool = True, also: Change = None) -> Change:
    def change(model: nn.Module) -> None:
        apply_mods(model, {"*": [MODS[name] for name in names]})
        if not fused:
            for module in model.modules():
                if isinstance(module, BlockNorm):
                    module.forward = _in_torch(module)  # type: ignore[method-assign]
        if also is not None:
            also(model)

    return change


def _in_torch(module: BlockNorm) -> Callable[[Tensor], Tensor]:
    return lambda x: block_rms_norm(x, module.norm, module.weight).to(x.dtype)


def variants() -> dict[str, Change]:
    """What is done to the plain tower, by name."""
    found: dict[str, Change] = {"plain": None, "tuned": tuned}
    for count in (1, 2, 3):
        for names in combinations(MODS, count):
            name = "all" if count == 3 else "+".join(names)
            if "block_norm" in names:
                found[f"{name}.torch"] = _mods(names, fused=False)
                found[f"{name}.fused"] = _mods(names)
            else:
                found[name] = _mods(names)
    found["all.fused_tuned"] = _mods(tuple(MODS), also=tuned)
    return found


def measured(
    tower: str, way: str, only: Sequence[str], rounds: int, *, device: str = "cuda"
) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of one tower trained or served, and the seconds that each variant took to compile."""
    steps: dict[str, Callable[[], object]] = {}
    peaks, compile_s = {}, {}
    for name, change in variants().items():
        if only and name not in (*only, "plain", "tuned"):
            continue
        kind = TowerStep if way == "train" else TowerInference
        step = kind(tower, device=device, change=change)
        begun = time.monotonic()
        for _ in range(_WARM_UP):
            step()
        torch.cuda.synchronize()
        compile_s[f"{way}@{tower}.{name}"] = time.monotonic() - begun
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks[name] = torch.cuda.max_memory_allocated() - before
        steps[name] = step
    timings = _in_turn(steps, rounds)
    metrics: dict[str, float] = {}
    for name, timing in timings.items():
        key = f"{tower}.{name}"
        metrics |= {f"{way}_us@{key}": timing.p50_us, f"{way}_peak_bytes@{key}": peaks[name]}
        for base, label in (("plain", "speedup"), ("tuned", "speedup_vs_tuned")):
            if base != name:
                ratio = paired_ratio(timings[base], timing)
                metrics |= {
                    f"{way}_{label}@{key}": ratio.median,
                    f"{way}_{label}_low@{key}": ratio.low,
                    f"{way}_{label}_high@{key}": ratio.high,
                }
    return metrics, compile_s


def _in_turn(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Each step once a round, by the GPU's own clock; the order turns by one from round to round."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds):
        for name in _turned(list(steps), round_):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            steps[name]()
            end.record()
            end.synchronize()
            samples[name].append(1000.0 * start.elapsed_time(end))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _turned(names: list[str], round_: int) -> Iterator[str]:
    first = round_ % len(names)
    yield from names[first:]
    yield from names[:first]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of the code, where the checkout does not say")
    parser.add_argument("--towers", nargs="+", default=["M", "L"], choices=["M", "L"])
    parser.add_argument("--ways", nargs="+", default=["train", "inference"], choices=["train", "inference"])
    parser.add_argument(
        "--only", nargs="+", default=[], choices=list(variants()), help="beside plain and tuned"
    )
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    metrics: dict[str, float] = {}
    compile_s: dict[str, float] = {}
    environment = describe_environment()
    if args.commit is not None:
        environment = msgspec.structs.replace(environment, commit=args.commit)
    for tower in args.towers:
        for way in args.ways:
            found, seconds = measured(tower, way, args.only, args.rounds)
            metrics |= found
            compile_s |= seconds
            torch.cuda.empty_cache()
            torch.compiler.reset()
            # What is known is written at once.
            write_benchmark(args.out, metrics, {"compile_seconds": compile_s}, environment=environment)
            for name, value in found.items():
                print(f"{name:64} {value:14.5g}", flush=True)


if __name__ == "__main__":
    main()
