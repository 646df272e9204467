"""Errors measured in the loop, on the rows that training really multiplies; only the numbers are kept."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.kernels import device_of
from loka.numerics import error_of_rows
from loka.numerics.exact import exact_products
from loka.probe.seen import row_numbers
from loka.probe.trial import ERROR_FIELDS, CastSample, OperandSample, Trial, cast_sample, run_trial
from loka.vocab import Device, GemmProblem, OperandSpec, Pass

__all__ = [
    "LIVE_OUTPUTS",
    "LIVE_ROWS",
    "SAMPLED_ROWS",
    "Captured",
    "KeptCasts",
    "LiveOperands",
    "errors_of_operands",
    "live_errors",
    "live_operands",
    "site_generator",
]

LiveOperands = dict[Pass, tuple[OperandSample, OperandSample]]
"""What a trial multiplies, by pass: A and B."""

KeptCasts = dict[tuple[Pass, int, OperandSpec], CastSample]
"""Casts by pass, side (0 is A, 1 is B) and spec."""

SAMPLED_ROWS = 1024  # rows kept of a site in one observed step (decision 7)
LIVE_ROWS = 256  # rows of fwd and dgrad, and outputs of wgrad, that a trial computes
LIVE_OUTPUTS = 2048  # columns of any product that a trial computes
_BLOCK = 128


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
    generator = torch.Generator("cpu")
    generator.manual_seed((seed % 2**31 << 32) ^ zlib.crc32(f"{site}\0{purpose}".encode()))
    return generator


def live_errors(
    captured: Captured, trials: Sequence[Trial], generator: torch.Generator, *, kept: KeptCasts | None = None
) -> Tensor:
    """fp64 [len(trials), 9] on the device; NaN for passes without a gradient and what no kernel takes.

    fwd and dgrad: up to 256 of the sampled rows. wgrad: all sampled rows, up to 256 outputs. Of more than
    2,048 columns of a product that many are computed. The reference is an FP32 product, whatever autocast and
    TF32 are in the caller's process. A row with a NaN or an infinity counts as zeros, so that it ruins no
    other row's error.

    Args:
        captured: Operands.
        trials: What to try, of any passes.
        generator: For the choice of rows and outputs.
        kept: Casts of the weight from an earlier call with the same weight, and a place for new ones.
    """
    operands = live_operands(captured, {trial.pass_ for trial in trials}, generator)
    return errors_of_operands(operands, trials, where=captured.x.device, kept=kept)


def errors_of_operands(
    operands: LiveOperands, trials: Sequence[Trial], *, where: torch.device, kept: KeptCasts | None = None
) -> Tensor:
    """The second half of `live_errors`: what `live_operands` took, multiplied and compared."""
    with torch.no_grad(), exact_products(where.type):
        return _errors(operands, trials, where, {} if kept is None else kept)


def _errors(operands: LiveOperands, trials: Sequence[Trial], where: torch.device, kept: KeptCasts) -> Tensor:
    references = _references(operands)
    casts: KeptCasts = {}
    device = device_of(where)
    # By the number of rows of the product, so that all quantiles of rows are taken in a few launches.
    sums: dict[int, list[Tensor]] = {}
    counts: list[Tensor] = []
    ran: dict[int, list[int]] = {}
    for place, trial in enumerate(trials):
        if trial.pass_ not in operands or not _fits(trial, operands[trial.pass_], device):
            continue
        a, b = (
            _cast_once(trial, side, operands[trial.pass_][side], kept if _is_weight(trial, side) else casts)
            for side in (0, 1)
        )
        rows = run_trial(trial, a, b, references[trial.pass_])
        sums.setdefault(rows.shape[0], []).append(rows)
        ran.setdefault(rows.shape[0], []).append(place)
        counts += [a.counts, b.counts]
    return _in_order(sums, ran, counts, trials=len(trials), where=where)


def _in_order(
    sums: dict[int, list[Tensor]],
    ran: dict[int, list[int]],
    counts: list[Tensor],
    *,
    trials: int,
    where: torch.device,
) -> Tensor:
    """fp64 [trials, 9] of the trials that ran, NaN for the others."""
    no_error = torch.full((len(ERROR_FIELDS) - 2,), torch.nan, dtype=torch.float64, device=where)
    no_loss = no_error[:2]
    errors, lost = [no_error] * trials, [no_loss] * trials
    for rows, places in ran.items():
        of_group = error_of_rows(torch.stack(sums[rows])).stacked()
        for error, place in zip(of_group.unbind(), places, strict=True):
            errors[place] = error
    if counts:
        few, many = torch.stack(counts).double().view(-1, 2, 2, 2).unbind(dim=-1)
        worse = (few / many.clamp(min=1)).amax(dim=1)
        in_order = sorted(place for places in ran.values() for place in places)
        for loss, place in zip(worse.unbind(), in_order, strict=True):
            lost[place] = loss
    return torch.cat([torch.stack(errors), torch.stack(lost)], dim=1)


def _cast_once(trial: Trial, side: int, sample: OperandSample, made: KeptCasts) -> CastSample:
    """Several kernels share an operand's cast, and so do E4M3 and E5M2 gradients that of the other side."""
    spec = trial.spec_b if side else trial.spec_a
    key = (trial.pass_, side, spec)
    if key not in made:
        made[key] = cast_sample(sample, spec)
    return made[key]


def _is_weight(trial: Trial, side: int) -> bool:
    return side == 1 and trial.pass_ is not Pass.WGRAD


def _fits(trial: Trial, operands: tuple[OperandSample, OperandSample], device: Device) -> bool:
    """Whether the kernel takes the sample: a last batch may have fewer rows than those it was chosen for.

    Some kernels end the process where they are given a shape that their rules forbid.
    """
    a, b = (sample.values for sample in operands)
    problem = GemmProblem(
        a.shape[0], b.shape[0], a.shape[1], trial.pass_, trial.spec_a.format, trial.spec_b.format
    )
    kernel: Any = trial.kernel  # a frozen dataclass, which its protocol does not say
    return _takes(kernel, problem, device)


@functools.lru_cache(maxsize=8192)
def _takes(kernel: Any, problem: GemmProblem, device: Device) -> bool:
    return bool(kernel.supports(problem, device))


def live_operands(
    captured: Captured, passes: Collection[Pass], generator: torch.Generator, *, own: bool = False
) -> LiveOperands:
    """A [m, k] and B [n, k] of each pass that ran and is asked for, n at most 2,048; transposes are views.

    An amax is of the whole operand, so it bounds what is looked at of it.

    Args:
        captured: What a step saw.
        passes: Which products.
        generator: For the choice of rows and outputs.
        own: Copy what would be a view of the weight, which the optimizer is about to change.
    """
    with torch.no_grad(), torch.autocast(captured.x.device.type, enabled=False):
        return _operands(captured, passes, generator, own=own)


def _operands(
    captured: Captured, passes: Collection[Pass], generator: torch.Generator, *, own: bool
) -> LiveOperands:
    x, w = _finite_rows(captured.x), captured.w
    w_amax = _amax_of_weight(w)
    pick = row_numbers(x, LIVE_ROWS, generator)
    some = slice(None) if pick is None else pick
    out: LiveOperands = {}
    whole = w.clone() if own and min(w.shape) <= LIVE_OUTPUTS else w
    if Pass.FWD in passes:
        outputs = _some_outputs(w.shape[0], w.device)
        part = whole if outputs is None else w[outputs]
        out[Pass.FWD] = _pair(x[some], captured.x_amax, part, w_amax)
    if captured.g is None or captured.g_amax is None:
        return out
    g = _finite_rows(captured.g)
    chosen = row_numbers(g.t(), LIVE_ROWS, generator)
    columns = slice(None) if chosen is None else chosen
    inputs = _some_outputs(w.shape[1], w.device)
    wanted = captured.passes.intersection(passes)
    if Pass.DGRAD in wanted:
        part = whole if inputs is None else w[:, inputs].contiguous()
        out[Pass.DGRAD] = _pair(g[some], captured.g_amax, part.t(), w_amax)
    if Pass.WGRAD in wanted:
        part = x if inputs is None else x[:, inputs].contiguous()
        out[Pass.WGRAD] = _pair(g[:, columns].contiguous().t(), captured.g_amax, part.t(), captured.x_amax)
    return out


def _pair(a: Tensor, a_amax: Tensor, b: Tensor, b_amax: Tensor) -> tuple[OperandSample, OperandSample]:
    return OperandSample(a, a_amax, bounded=True), OperandSample(b, b_amax, bounded=True)


def _some_outputs(n: int, device: torch.device) -> Tensor | None:
    """Which of n outputs a trial computes: whole blocks of 128 (a block may share a scale) spread evenly.

    The same ones every time, so that a weight's cast can be kept; None for all of them.
    """
    if n <= LIVE_OUTPUTS:
        return None
    blocks = torch.arange(LIVE_OUTPUTS // _BLOCK, device=device) * (n // _BLOCK) // (LIVE_OUTPUTS // _BLOCK)
    return (blocks[:, None] * _BLOCK + torch.arange(_BLOCK, device=device)).flatten()


def _references(operands: LiveOperands) -> dict[Pass, Tensor]:
    """FP32 products."""
    return {pass_: a.values.float() @ b.values.t().float() for pass_, (a, b) in operands.items()}


def _finite_rows(x: Tensor) -> Tensor:
    """fp32 [rows, F], zeros in place of the rows that hold a NaN or an infinity."""
    wide = x.float()
    good = (wide.abs() < torch.inf).all(dim=1, keepdim=True)
    return torch.where(good, wide, 0.0)


def _amax_of_weight(w: Tensor) -> Tensor:
    """fp32 (); in one pass and without a copy. A weight with a NaN has no amax and its trials no error."""
    if not w.numel():
        return torch.zeros((), device=w.device)
    low, high = torch.aminmax(w)
    return torch.maximum(-low, high).float()
