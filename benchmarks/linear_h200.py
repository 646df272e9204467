"""One nn.Linear, trained: bf16, LoKA and torchao in one interleaved run.

    python benchmarks/linear_h200.py --out linear_h200.json [--commit HASH] [--shapes MxNxK ...]

The layer has a bias and fp32 parameters and runs under bf16 autocast; its bf16 input requires grad. A sample
is forward and backward, compiled: the weight is cast in every forward, the gradients of input, weight and
bias are made, `.grad` is fp32, there is no optimizer. LoKA's choice among its plans and bf16 is made on one
half of the interleaved rounds and judged on the other. Keys are MxNxK: rows, out features, in features.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from loka.artifacts import describe_environment, write_benchmark
from loka.artifacts.plan import Choice, SitePlan
from loka.kernels import kernel, vet
from loka.kernels.gpu_casts import load_casts
from loka.planned import swap_in
from loka.timing import Timing, measure_or_reason, paired_ratio
from loka.vocab import GemmProblem, Pass

SHAPES = (
    (8192, 2048, 2048),
    (8192, 4096, 4096),
    (8192, 1024, 1024),
    (8192, 512, 3456),
    (65536, 512, 512),
    (16384, 256, 256),
)
# Kernels of fwd, dgrad and wgrad. Sums over the batch are always exact.
PLANS = {
    "tensorwise": ("torch.tensorwise.fast", "torch.tensorwise.fast", "torch.tensorwise"),
    "tensorwise_exact": ("torch.tensorwise", "torch.tensorwise", "torch.tensorwise"),
    "wgrad_alone": ("bf16", "bf16", "torch.tensorwise"),
}
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MIN_SPEEDUP = 1.05  # the default of Requirement

Step = Callable[[], object]


def planned(layer: nn.Linear, kernels: tuple[str, str, str], rows: int) -> nn.Module:
    """The layer with a plan of these kernels."""

    def choice(pass_: Pass, name: str) -> tuple[Choice, ...]:
        problem = GemmProblem.of_linear(
            pass_, rows=rows, out_features=layer.out_features, in_features=layer.in_features
        )
        chosen = kernel(name)
        a, b = chosen.operands(problem)
        return (Choice(m_below=None, kernel=chosen.name, spec_a=a, spec_b=b, reason="benchmark"),)

    fwd, dgrad, wgrad = (choice(pass_, name) for pass_, name in zip(Pass, kernels, strict=True))
    swap_in(
        layer,
        SitePlan(
            name="linear",
            n=layer.out_features,
            k=layer.in_features,
            bias=layer.bias is not None,
            fwd=fwd,
            dgrad=dgrad,
            wgrad=wgrad,
        ),
    )
    return layer


def unfit(kernels: tuple[str, str, str], M: int, N: int, K: int) -> str:
    """Why one of the kernels may not run its pass, by vetting; empty where all may."""
    for pass_, name in zip(Pass, kernels, strict=True):
        chosen = kernel(name)
        problem = GemmProblem.of_linear(pass_, rows=M, out_features=N, in_features=K)
        if chosen.operands(problem)[0].is_quantized and not (verdict := vet(chosen, problem, "cuda")):
            return f"{name} in {pass_}: {verdict.reason}"
    return ""


def torchao(layer: nn.Linear, recipe: str) -> nn.Module:
    """The layer as torchao converts it."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(nn.Sequential(layer), config=config)


def step_of(module: nn.Module, x: Tensor, g: Tensor) -> Step:
    """Forward and backward of the compiled module, gradients made anew."""
    leaf = x.detach().requires_grad_()
    compiled = torch.compile(module, fullgraph=True, dynamic=False)
    leaves = [leaf, *module.parameters()]

    def step() -> object:
        for tensor in leaves:
            tensor.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            y = compiled(leaf)
        y.backward(g)
        return [tensor.grad for tensor in leaves]

    return step


def steps(M: int, N: int, K: int) -> dict[str, Step]:
    """Every arm at one shape, all with the same numbers."""
    load_casts()
    torch.manual_seed(0)
    layer = nn.Linear(K, N, device="cuda")
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(M, N, device="cuda", dtype=torch.bfloat16) * 1e-3
    made: dict[str, Step] = {"bf16": step_of(copy.deepcopy(layer), x, g)}
    for name, kernels in PLANS.items():
        if faults := unfit(kernels, M, N, K):
            print(f"  {name} at {M}x{N}x{K} is left out: {faults}", flush=True)
            continue
        made[f"loka.{name}"] = step_of(planned(copy.deepcopy(layer), kernels, M), x, g)
    for recipe in TORCHAO:
        made[f"torchao.{recipe}"] = step_of(torchao(copy.deepcopy(layer), recipe), x, g)
    return made


def gradients_agree(made: dict[str, Step]) -> dict[str, float]:
    """Relative L2 difference of each arm's gradients from those of bf16: all do the same work."""
    wanted = [t.float() for t in made["bf16"]()]
    out = {}
    for name, step in made.items():
        got = step()
        out[name] = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True))
    return out


def judged(timings: dict[str, Timing], names: list[str]) -> tuple[str, dict[str, float]]:
    """The pick on even rounds and its speed-up over bf16 on odd ones."""
    halves = [{name: timing.half(i) for name, timing in timings.items()} for i in (0, 1)]
    best = min(names, key=lambda name: halves[0][name].p50_us)
    pick = best if paired_ratio(halves[0]["bf16"], halves[0][best]).median >= MIN_SPEEDUP else "bf16"
    ratio = paired_ratio(halves[1]["bf16"], halves[1][pick])
    return pick, {"speedup": ratio.median, "speedup_low": ratio.low, "speedup_high": ratio.high}


def measured(shape: tuple[int, int, int], rounds: int) -> tuple[dict[str, float], dict[str, object]]:
    """Metrics and details of one shape."""
    key = "x".join(map(str, shape))
    made = steps(*shape)
    differences = gradients_agree(made)
    found = measure_or_reason(made, device="cuda", rounds=rounds)
    timings = found.timings
    ours = [name for name in timings if name.startswith("loka.")]
    theirs = [name for name in timings if name.startswith("torchao.")]
    pick, ratios = judged(timings, ours)
    metrics = {f"{name}@{key}": value for name, value in ratios.items()}
    for name, timing in timings.items():
        label = name.replace(".", "_")
        metrics[f"{label}_us@{key}"] = timing.p50_us
        if name != "bf16":
            metrics[f"{label}_speedup@{key}"] = paired_ratio(timings["bf16"], timing).median
    if theirs:
        metrics[f"torchao_best@{key}"] = max(metrics[f"{n.replace('.', '_')}_speedup@{key}"] for n in theirs)
    metrics[f"slower_than_bf16@{key}"] = float(metrics[f"speedup@{key}"] < 0.98)
    details: dict[str, object] = {
        "pick": pick,
        "gradient_difference_from_bf16": differences,
        "captured": {name: timing.captured for name, timing in timings.items()},
        "failed": found.reasons,
    }
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return metrics, details


def compile_all(shapes: list[tuple[int, int, int]]) -> None:
    """Fill the compiler's cache for all shapes side by side, so that the timed process compiles little."""
    others = [
        subprocess.Popen([sys.executable, __file__, "--compile", "x".join(map(str, shape))])
        for shape in shapes
    ]
    for other in others:
        other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the code, where the checkout does not say")
    parser.add_argument("--shapes", nargs="*", help="MxNxK; the built-in list if not given")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--compile", help="only compile every arm of this shape (MxNxK)")
    parser.add_argument("--compiled", action="store_true", help="the compiler's cache is filled already")
    args = parser.parse_args()

    def shape_of(text: str) -> tuple[int, int, int]:
        M, N, K = map(int, text.split("x"))
        return M, N, K

    if args.compile:
        for step in steps(*shape_of(args.compile)).values():
            step()
        return
    shapes = [shape_of(text) for text in args.shapes] if args.shapes else list(SHAPES)
    if not args.compiled:
        compile_all(shapes)
    metrics: dict[str, float] = {}
    details: dict[str, object] = {}
    for shape in shapes:
        found, about = measured(shape, args.rounds)
        metrics |= found
        details["x".join(map(str, shape))] = about
        print(shape, about["pick"], flush=True)
        for name, value in found.items():
            print(f"  {name:46} {value:9.3f}", flush=True)
        for name, reason in about["failed"].items():
            print(f"  {name}: {reason}", flush=True)
    notes = [
        "speedup is LoKA's choice over bf16 on the half of the rounds that did not make the choice, with its "
        "90 % interval; the other speed-ups are over all rounds.",
        "Every kernel of a plan is vetted at the shape first. A plan is chosen where it is at least "
        f"{MIN_SPEEDUP} times as fast as bf16; else the layer stays as it is and the ratio is 1.",
        "torchao_best is the best of torchao's tensorwise, rowwise and rowwise_with_gw_hp recipes, compiled.",
    ]
    environment = describe_environment()
    if args.commit:
        environment = msgspec.structs.replace(environment, commit=args.commit)
    write_benchmark(
        args.out, metrics, {"rounds": args.rounds, "shapes": details, "notes": notes}, environment=environment
    )


if __name__ == "__main__":
    main()
