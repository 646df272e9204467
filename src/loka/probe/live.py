"""Errors measured in the loop, on the rows that training really multiplies; only the numbers are kept."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.kernels import device_of
from loka.numerics import amax_of
from loka.probe.trial import CastSample, OperandSample, Trial, cast_sample, run_trial
from loka.vocab import Device, GemmProblem, Granularity, OperandSpec, Pass

__all__ = ["LIVE_ROWS", "SAMPLED_ROWS", "Captured", "live_errors", "row_sample", "site_generator"]

SAMPLED_ROWS = 1024  # rows kept of a site in one observed step (decision 7)
LIVE_ROWS = 256  # rows of fwd and dgrad, and outputs of wgrad, that a trial computes


@dataclass(slots=True)
class Captured:
    """What one observed step saw at one site.

    Attributes:
        x: [S, K] sampled rows of the input, S <= 1,024.
        w: [N, K] the weight as it was in the forward.
        g: [S, N] the same rows of the gradient of the output; None where none arrived.
        x_amax: fp32 (), over all rows.
        g_amax: fp32 (), over all rows; None without g.
        passes: The passes that run here: no dgrad where the input needs no gradient, no wgrad where the
            weight is frozen.
    """

    x: Tensor
    w: Tensor
    x_amax: Tensor
    g: Tensor | None = None
    g_amax: Tensor | None = None
    passes: frozenset[Pass] = frozenset(Pass)


def site_generator(seed: int, site: str, purpose: str) -> torch.Generator:
    """A CPU generator of (seed, site, purpose) (decision 16)."""
    generator = torch.Generator()
    generator.manual_seed((seed << 32) ^ zlib.crc32(f"{site}\0{purpose}".encode()))
    return generator


def row_sample(rows: int, limit: int, generator: torch.Generator) -> Tensor | None:
    """Sorted row numbers of a sample without repetition, or None when all rows fit."""
    if rows <= limit:
        return None
    return torch.randperm(rows, generator=generator)[:limit].sort().values


def live_errors(captured: Captured, trials: list[Trial], generator: torch.Generator) -> Tensor:
    """fp64 [len(trials), 9] on the device; NaN for passes without a gradient and what no kernel takes.

    fwd and dgrad: up to 256 of the sampled rows. wgrad: all sampled rows, up to 256 output rows.
    """
    # Inside the user's autocast region the FP32 products below would become bf16 ones.
    with torch.autocast(captured.x.device.type, enabled=False):
        return _errors(captured, trials, generator)


def _errors(captured: Captured, trials: list[Trial], generator: torch.Generator) -> Tensor:
    operands = _operands(captured, generator)
    references: dict[Pass, Tensor] = {
        pass_: a.values.float() @ b.values.float().t() for pass_, (a, b) in operands.items()
    }
    casts: dict[tuple[Pass, int, OperandSpec], CastSample] = {}
    nothing = torch.full((9,), torch.nan, dtype=torch.float64, device=captured.x.device)
    device = device_of(captured.x.device)
    rows = []
    for trial in trials:
        if trial.pass_ not in operands or not _fits(trial, operands[trial.pass_], device):
            rows.append(nothing)
            continue
        pair = []
        for side, spec in enumerate((trial.spec_a, trial.spec_b)):
            key = (trial.pass_, side, spec)
            if key not in casts:  # E4M3 and E5M2 gradients share the other operand
                casts[key] = cast_sample(operands[trial.pass_][side], spec)
            pair.append(casts[key])
        a, b = pair
        rows.append(run_trial(trial, a, b, references[trial.pass_]))
    return torch.stack(rows)


def _fits(trial: Trial, operands: tuple[OperandSample, OperandSample], device: Device) -> bool:
    """Whether the kernel takes the sample: a last batch may have fewer rows than those it was chosen for.

    Some kernels end the process where they are given a shape that their rules forbid.
    """
    a, b = (sample.values for sample in operands)
    problem = GemmProblem(
        a.shape[0], b.shape[0], a.shape[1], trial.pass_, trial.spec_a.format, trial.spec_b.format
    )
    return bool(trial.kernel.supports(problem, device))


def _operands(
    captured: Captured, generator: torch.Generator
) -> dict[Pass, tuple[OperandSample, OperandSample]]:
    x, w, g = captured.x.float(), captured.w.float(), captured.g
    w_amax = amax_of(w, Granularity.TENSORWISE)
    pick = row_sample(x.shape[0], LIVE_ROWS, generator)
    some = slice(None) if pick is None else pick.to(x.device)
    out = {Pass.FWD: (OperandSample(x[some], captured.x_amax), OperandSample(w, w_amax))}
    if g is None or captured.g_amax is None:
        return out
    g = g.float()
    outputs = row_sample(g.shape[1], LIVE_ROWS, generator)
    columns = slice(None) if outputs is None else outputs.to(g.device)
    backward: dict[Pass, tuple[OperandSample, OperandSample]] = {}
    backward[Pass.DGRAD] = (
        OperandSample(g[some], captured.g_amax),
        OperandSample(w.t().contiguous(), w_amax),
    )
    backward[Pass.WGRAD] = (
        OperandSample(g[:, columns].t().contiguous(), captured.g_amax),
        OperandSample(x.t().contiguous(), captured.x_amax),
    )
    return out | {pass_: pair for pass_, pair in backward.items() if pass_ in captured.passes}
