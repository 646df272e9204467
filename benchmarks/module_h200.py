"""One block of a recommendation model, Linear, norm and swish: with biases in bf16, with Mods, and in FP8.

    python benchmarks/module_h200.py --out module_h200.json [--commit HASH] [--rows 1024] [--widths 1024 ...]

The twin is Linear with bias and x * sigmoid(LayerNorm(x)); the block with Mods is Linear without bias and
BlockNorm-256 with hard swish, its products in bf16 (`all.bf16`) or as a planned chain in FP8 (`all.fp8`: the
fastest plan on one half of the rounds, judged on the other; `all.fp8.<plan>` each of them). A sample is
forward and backward under bf16 autocast, compiled, fp32 weights cast in every forward; `..._weights_fixed`
casts them once before. One interleaved run; `peak_bytes` is what a step holds at most beside what was there.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import msgspec
import torch
from torch import nn

import loka
from linear_h200 import PLANS, Step, planned, step_of, unfit
from loka.artifacts import describe_environment, write_benchmark
from loka.kernels.gpu_casts import load_casts
from loka.mods import Chain
from loka.planned import is_chain, link
from loka.recsys.models.layers import NormSwish
from loka.timing import Timing, measure_or_reason, paired_ratio

FP8 = ("tensorwise", "tensorwise_exact")
TWIN, MODS, FIXED = "twin", "all.bf16", "_weights_fixed"


def blocks(rows: int, width: int) -> dict[str, nn.Module]:
    """Every arm, by name; those behind `_weights_fixed` are to be run so."""
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        TWIN: nn.Sequential(nn.Linear(width, width), NormSwish(width)).cuda(),
        MODS: Chain.of((width, width)).cuda(),
    }
    for name in FP8:
        if faults := unfit(PLANS[name], rows, width, width):
            print(f"  {name} at {rows}x{width} is left out: {faults}", flush=True)
            continue
        for ending in ("", FIXED):
            chain = Chain.of((width, width)).cuda()
            for module in list(chain):
                if isinstance(module, nn.Linear):
                    planned(module, PLANS[name], rows)
            assert is_chain(chain)
            link(chain)
            made[f"all.fp8.{name}{ending}"] = chain
    return made


def peak_bytes(step: Step) -> int:
    """Of one step, beyond what is allocated before it."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def measured(rows: int, width: int, rounds: int) -> tuple[dict[str, float], dict[str, object]]:
    """Metrics and details of one width."""
    key = f"{rows}x{width}"
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) * 1e-3
    with contextlib.ExitStack() as fixed:
        steps: dict[str, Step] = {}
        for name, module in blocks(rows, width).items():
            if name.endswith(FIXED):
                fixed.enter_context(loka.weights_fixed(module))
            steps[name] = step_of(module, x, g)
        peaks = {name: peak_bytes(step) for name, step in steps.items()}
        found = measure_or_reason(steps, device="cuda", rounds=rounds)
    metrics: dict[str, float] = {}
    for name, timing in found.timings.items():
        metrics |= {f"module_us@{key}.{name}": timing.p50_us, f"module_peak_bytes@{key}.{name}": peaks[name]}
        if name != TWIN:
            metrics |= _ratio(f"{key}.{name}", found.timings[TWIN], timing)
    for ending in ("", FIXED):
        metrics |= _picked(key, found.timings, ending)
    captured = {name: timing.captured for name, timing in found.timings.items()}
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return metrics, {"failed": found.reasons, "captured": captured}


def _ratio(name: str, base: Timing, timing: Timing) -> dict[str, float]:
    ratio = paired_ratio(base, timing)
    return {
        f"module_speedup@{name}": ratio.median,
        f"module_speedup_low@{name}": ratio.low,
        f"module_speedup_high@{name}": ratio.high,
    }


def _picked(key: str, timings: dict[str, Timing], ending: str) -> dict[str, float]:
    """The plan that is fastest on even rounds, over the twin on odd ones."""
    names = [f"all.fp8.{plan}{ending}" for plan in FP8 if f"all.fp8.{plan}{ending}" in timings]
    if not names:
        return {}
    pick = min(names, key=lambda name: timings[name].half(0).p50_us)
    return _ratio(f"{key}.all.fp8{ending}", timings[TWIN].half(1), timings[pick].half(1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of the code, where the checkout does not say")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    load_casts()
    environment = describe_environment()
    if args.commit:
        environment = msgspec.structs.replace(environment, commit=args.commit)
    metrics: dict[str, float] = {}
    details: dict[str, object] = {}
    for width in args.widths:
        found, about = measured(args.rows, width, args.rounds)
        metrics |= found
        details[f"{args.rows}x{width}"] = about
        for name, value in found.items():
            print(f"{name:64} {value:14.5g}", flush=True)
        # What is known is written at once.
        write_benchmark(args.out, metrics, details, environment=environment)


if __name__ == "__main__":
    main()
