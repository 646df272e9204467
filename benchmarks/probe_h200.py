"""What Probe costs and how well it predicts, on one GPU.

    python benchmarks/probe_h200.py --out probe_h200.json [--commit HASH] [--parts tower fidelity ...]

tower: blocks of steps of the compiled L tower with Probe and without it, in turn. A block holds one observed
step; at each of ten such the sites take turns to be looked at in full (live errors and distributions). What a
block costs more is what one observed step costs; at every = 100 that is spread over 100 plain steps. Of it
the observed step itself is told apart (`observed_step_us`) from what the work that it leaves to the plain
steps costs there (`later_work_us`), by the GPU's own clock. Finding the sites in the first step and the one
profiled step are paid once and reported apart. `overhead` is the same without the profile.
profile_seconds: what `profile()` of the L tower takes, kernels compiled and vetted anew.
fidelity, faults, loss: see `fidelity.py`, `faulty_kernel.py`, `loss_prediction.py`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch

from loka.artifacts import Profile, describe_environment, write_benchmark
from loka.artifacts.envelope import Envelope, read_envelope
from loka.artifacts.records import BENCHMARK
from loka.numerics.intervals import mean_interval
from loka.probe import Probe
from towers import TowerStep

EVERY, LIVE_EVERY = 100, 10
BLOCK_STEPS, BLOCKS = 16, 30

Metrics = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of the code, where the checkout does not say")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", default=["tower", "fidelity", "faults", "loss"])
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--join", nargs="+", type=Path, help="records of single parts, to be made one")
    args = parser.parse_args()
    if args.join:
        join(args.join, args.out)
        return
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8.0f ms %(message)s")
    metrics: Metrics = {}
    details: dict[str, object] = {"notes": [" ".join((__doc__ or "").split())]}
    for part in args.parts:
        started = time.monotonic()
        # What is known is written at once: a part that is cut off takes nothing along.
        for found in measured(part, args.device, args.blocks):
            metrics |= found
            details[f"seconds of {part}"] = time.monotonic() - started
            for name, value in found.items():
                print(f"{name:64} {value:12.5g}", flush=True)
            environment = describe_environment()
            if args.commit:
                environment = msgspec.structs.replace(environment, commit=args.commit)
            write_benchmark(args.out, metrics, details, environment=environment)


def join(paths: list[Path], out: Path) -> None:
    """One record of several parts, each measured by itself; its environment is the last one's.

    A metric that several files have is the last one's too. Parts of a joined record stay apart.
    """
    found = [read_envelope(path, BENCHMARK) for path in paths]
    metrics: Metrics = {}
    parts: dict[str, dict[str, object]] = {}
    for envelope, path in zip(found, paths, strict=True):
        metrics |= envelope.body.metrics
        for part in parts.values():
            part["metrics"] = sorted(set(part["metrics"]) - envelope.body.metrics.keys())  # type: ignore[call-overload]
        parts = {name: part for name, part in parts.items() if part["metrics"]}
        for name, part in (envelope.body.details.get("parts") or {path.stem: _part(envelope)}).items():
            names = (name, *(f"{name}.{n}" for n in range(2, len(parts) + 3)))
            parts[next(free for free in names if free not in parts)] = part
    write_benchmark(out, metrics, {"parts": parts}, environment=found[-1].environment)


def _part(envelope: Envelope[Any]) -> dict[str, object]:
    environment = envelope.environment
    return {
        "created": envelope.created,
        "commit": environment.commit,
        "device": ", ".join(environment.devices) or "CPU",
        "metrics": sorted(envelope.body.metrics),
        **envelope.body.details,
    }


def measured(part: str, device: str, blocks: int) -> Iterator[Metrics]:
    """The metrics of one part, as they become known."""
    if part in ("tower", "overhead"):
        yield from tower(device, blocks, profiles=part == "tower")
        return
    module = {"fidelity": "fidelity", "faults": "faulty_kernel", "loss": "loss_prediction"}[part]
    measure: Callable[..., Metrics] = importlib.import_module(module).measure
    yield measure(device)


def tower(device: str, blocks: int, *, profiles: bool) -> Iterator[Metrics]:
    """Overhead and, where asked, profile of the L tower."""
    step = TowerStep("L", device=device)
    for _ in range(3):
        step()
    base_bytes = torch.cuda.memory_allocated()
    probe = Probe(step.model, every=BLOCK_STEPS, live_every=LIVE_EVERY, max_overhead=None)
    with probe:
        found, attach_s = _attached(probe, step)
        yield _overhead(probe, step, blocks) | found
    yield {
        "probe_attach_seconds@L": attach_s,
        "probe_statistics_bytes@L": probe.statistics_bytes,
        "probe_allocated_bytes@L": torch.cuda.memory_allocated() - base_bytes,
        "probe_peak_allocated_bytes@L": torch.cuda.max_memory_allocated(),
    }
    if not profiles:
        return
    started = time.monotonic()
    profile: Profile = probe.profile()
    yield {
        "profile_seconds@L": time.monotonic() - started,
        "profile_errors@L": len(profile.errors),
        "profile_products@L": len(profile.products),
        "profile_casts@L": len(profile.casts),
    }


def _attached(probe: Probe, step: TowerStep) -> tuple[Metrics, float]:
    """The steps that are not like the others: sites, first observed, profiled."""
    before = _seconds(step, 4) / 4
    started = time.monotonic()
    for _ in range(4 * BLOCK_STEPS):
        step()
        probe.step()
    torch.cuda.synchronize()
    once = time.monotonic() - started - 4 * BLOCK_STEPS * before
    return {"plain_step_us@L.before": before * 1e6}, once


def _overhead(probe: Probe, step: TowerStep, blocks: int) -> Metrics:
    marks: list[list[torch.cuda.Event]] = []

    def observed() -> None:
        marks.append([_mark()])
        for _ in range(BLOCK_STEPS):
            step()
            probe.step()
            marks[-1].append(_mark())

    def plain() -> None:
        for _ in range(BLOCK_STEPS):
            step()

    extra_us, plain_us = [], []
    for block in range(blocks):
        calls: list[Callable[[], None]] = [plain, observed]
        times = {call: _seconds(call, 1) for call in (calls if block % 2 else reversed(calls))}
        plain_us.append(times[plain] / BLOCK_STEPS * 1e6)
        extra_us.append((times[observed] - times[plain]) * 1e6)
    # Every site has its turn once in ten blocks: whole tens are alike, single blocks are not.
    tens = [sum(extra_us[i : i + LIVE_EVERY]) / LIVE_EVERY for i in range(0, blocks, LIVE_EVERY)]
    interval = mean_interval(tens)
    step_us = sorted(plain_us)[blocks // 2]
    ranked = sorted(extra_us)
    percent = functools.partial(_percent, step_us=step_us)
    return {
        "plain_step_us@L": step_us,
        "observed_step_extra_us@L": interval.mean,
        "observed_step_extra_us@L.median": ranked[blocks // 2],
        **_apart(marks, step_us),
        "overhead_percent@L": percent(interval.mean),
        "overhead_percent@L.low": percent(interval.low),
        "overhead_percent@L.high": percent(interval.high),
    }


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _apart(marks: list[list[torch.cuda.Event]], plain_us: float) -> Metrics:
    """The last step of each block, which is observed, and what the others take beyond plain ones."""
    steps = [[1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(block)] for block in marks]
    return {
        "observed_step_us@L": fmean(block[-1] for block in steps),
        "later_work_us@L": fmean(sum(block[:-1]) - (BLOCK_STEPS - 1) * plain_us for block in steps),
    }


def _percent(extra_us: float, *, step_us: float) -> float:
    return 100 * extra_us / (EVERY * step_us)


def _seconds(call: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
