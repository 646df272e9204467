"""The main job on a GPU with real FP8 kernels, and the step's speed in one interleaved run.

    python benchmarks/main_job_h200.py --out OUT [--rows N] [--batch-size B] [--seeds N]

First `run_job` (Wukong, synthetic log) under a requirement without `min_speedup`: every pass that keeps its
accuracy goes to FP8, so that the quality of real kernels is seen. Then the plan by time that the default
requirement makes from the same profile. Last, the training step of bf16 and of both plans, compiled, in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from loka.artifacts import Plan, Profile, describe_environment, write_benchmark
from loka.dispatch import apply_plan, make_plan
from loka.recsys import JobConfig, JobResult, Split, TrainConfig, open_source, run_job
from loka.recsys.job.coverage import coverage_of
from loka.recsys.job.observed import fresh_model
from loka.recsys.training.optimizers import build_optimizers
from loka.recsys.training.predict import forward
from loka.recsys.training.step import click_loss
from loka.timing import Timing, paired_ratio
from loka.vocab import Pass, Requirement

ROUNDS, STEPS_A_ROUND, WARMUP = 40, 5, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4_096_000)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--preset", default="published")
    parser.add_argument("--commit", help="of the code, where the checkout does not say")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8.0f ms %(message)s")
    job = JobConfig(
        model="wukong",
        data=f"synthetic?rows={args.rows}",
        preset=args.preset,
        train=TrainConfig(
            batch_size=args.batch_size, device="cuda", compile=True, lr_dense=5e-4, checkpoint_every_s=None
        ),
        requirement=Requirement(min_speedup=None, deny=("emulated.*",)),
        seeds=args.seeds,
    )
    started = time.monotonic()
    result = run_job(job, args.out / "job")
    job_s = time.monotonic() - started
    by_time = make_plan(result.profile, dataclasses.replace(job.requirement, min_speedup=1.05))
    plans = {"accuracy": result.plan, "time": by_time}
    timings = _interleaved(job, plans)
    metrics = _metrics(result, plans, timings) | {"job_seconds": job_s}
    details = _details(job, result, plans, timings)
    environment = msgspec.structs.replace(describe_environment(), commit=args.commit)
    write_benchmark(args.out / "main_job_h200.json", metrics, details, environment=environment)
    for name, value in sorted(metrics.items()):
        print(f"{name:48} {value:.6g}")


def _interleaved(job: JobConfig, plans: dict[str, Plan]) -> dict[str, Timing]:
    """Median-able samples of one training step of bf16 and of each plan, in turn, rotating."""
    source = open_source(job.data)
    batch = next(iter(source.batches(Split.TRAIN, job.train.batch_size))).to("cuda")
    steps = {"bf16": _step(job, source, None, batch)}
    steps |= {name: _step(job, source, plan, batch) for name, plan in plans.items()}
    for step in steps.values():
        for _ in range(WARMUP):
            step()
    names = list(steps)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(ROUNDS):
        shift = round_ % len(names)
        for name in names[shift:] + names[:shift]:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(STEPS_A_ROUND):
                steps[name]()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3 / STEPS_A_ROUND)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _step(job: JobConfig, source: object, plan: Plan | None, batch: object) -> Callable[[], None]:
    model = fresh_model(job, source, 0).to("cuda")
    if plan is not None:
        apply_plan(model, plan)
    model.tower.compile()
    optimizers = build_optimizers(model, job.train)

    def step() -> None:
        optimizers.zero_grad()
        logits = forward(model, batch, dtype=job.train.dtype, tasks=1)
        click_loss(logits, batch.labels, batch.weight).backward()
        optimizers.step()

    return step


def _metrics(result: JobResult, plans: dict[str, Plan], timings: dict[str, Timing]) -> dict[str, float]:
    metrics = dict(result.comparison.flat_metrics())
    for name, timing in timings.items():
        metrics[f"step_us@{name}"] = timing.p50_us
        if name != "bf16":
            ratio = paired_ratio(timings["bf16"], timing)
            metrics[f"step_speedup@{name}"] = ratio.median
            metrics[f"step_speedup_low@{name}"] = ratio.low
            metrics[f"step_speedup_high@{name}"] = ratio.high
            metrics[f"measured_saved_us@{name}"] = timings["bf16"].p50_us - timing.p50_us
    for name, plan in plans.items():
        for part in coverage_of(plan, result.profile):
            metrics[f"fp8_sites@{name}.{part.gemm_pass}"] = part.sites_fp8
            metrics[f"fp8_flops_share@{name}.{part.gemm_pass}"] = part.gemm_flops_fp8 / max(
                1, part.gemm_flops
            )
        if plan.predicted.saved_us is not None:
            metrics[f"predicted_saved_us@{name}"] = plan.predicted.saved_us
    shares = result.profile.step
    if shares is not None:
        for name in (
            "eligible_gemm",
            "other_gemm",
            "norm_cast_activation",
            "embedding",
            "optimizer",
            "other",
        ):
            metrics[f"step_share@{name}"] = getattr(shares, name)
        metrics["fp8_ceiling"] = shares.ceiling
    products = result.profile.products
    metrics["products_timed"], metrics["products_vetted"] = len(products), sum(products.vetted)
    return metrics | _wins(result.profile)


def _wins(profile: Profile) -> dict[str, float]:
    """Of the timed shapes, the share where some FP8 product, its operands ready, beats bf16 by 5 %."""
    best: dict[tuple[int, int, int, Pass], dict[str, float]] = {}
    table = profile.products
    for i, name in enumerate(table.kernel):
        key = (table.m[i], table.n[i], table.k[i], table.pass_[i])
        best.setdefault(key, {})[name] = table.p50_us[i]
    ratios = []
    metrics: dict[str, float] = {}
    for (m, n, k, pass_), times in best.items():
        bf16 = times.get("high_precision.bf16")
        fp8 = [v for k, v in times.items() if k != "high_precision.bf16"]
        if bf16 and fp8:
            ratios.append(bf16 / min(fp8))
            metrics[f"best_fp8_product_speedup@{pass_}.{m}x{n}x{k}"] = ratios[-1]
    wins = sum(r >= 1.05 for r in ratios)
    return metrics | {"products_with_fp8": len(ratios), "products_won_by_fp8_operands_ready": wins}


def _details(
    job: JobConfig, result: JobResult, plans: dict[str, Plan], timings: dict[str, Timing]
) -> dict[str, object]:
    return {
        "job": job.identity(),
        "kernels": {
            name: dict(Counter(c.kernel for s in plan.sites for p in Pass for c in s.choices(p)))
            for name, plan in plans.items()
        },
        "samples_us": {name: list(timing.samples_us) for name, timing in timings.items()},
        "notes": [*result.profile.notes, *result.comparison.notes],
        "step_basis": result.profile.step.basis if result.profile.step else "",
    }


if __name__ == "__main__":
    main()
