"""One trial: a recipe's product of given operands against FP32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from loka.kernels import HIGH_PRECISION, KERNELS, Kernel, cast, emulated_twin, usable
from loka.kernels.column_statistics import cast_counts_of, row_errors_of
from loka.numerics import CAST_COUNTS, Quantized, decode_scale, not_quantized
from loka.vocab import A_FORMATS, Device, Format, GemmProblem, Granularity, OperandSpec, Pass, Site

__all__ = [
    "ERROR_FIELDS",
    "CastSample",
    "OperandSample",
    "Trial",
    "cast_sample",
    "kernel_trials_of",
    "run_trial",
    "trials_of",
]

# Row layout of what a trial returns: seven numbers of ProductError, then what the casts lose.
ERROR_FIELDS = ("signal", "noise", "row_p50", "row_p99", "row_max", "bias", "mere", "underflow", "saturation")


@dataclass(slots=True)
class OperandSample:
    """Rows of an operand and the amax of the whole of it.

    A tensorwise scale comes from the whole tensor; taking it from the sampled rows would flatter it.

    Attributes:
        values: [rows, k], as the product takes it; a transposed view where the pass wants that, so that a
            weight need not be copied.
        amax: fp32 (), over the finite elements of the whole operand.
        bounded: `amax` is known to bound `values`, so that no cast with its scale cuts anything off.
    """

    values: Tensor
    amax: Tensor
    bounded: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """A recipe of one pass and the kernel that stands for it."""

    pass_: Pass
    spec_a: OperandSpec
    spec_b: OperandSpec
    kernel: Kernel

    @property
    def key(self) -> tuple[Pass, str, str, str]:
        """What the error belongs to: pass, recipe keys of the operands, accumulation."""
        return (
            self.pass_,
            self.spec_a.recipe_key,
            self.spec_b.recipe_key,
            str(self.kernel.accumulation),
        )


def trials_of(site: Site, device: Device) -> list[Trial]:
    """Every usable recipe of every pass of a site, each once.

    On a GPU a real kernel stands for the recipe where one runs, so that its own accumulation is measured;
    on a CPU the emulated one does (same numbers, faster there). The emulated twin stands for a kernel that
    nobody has run yet: a training loop is no place to find out what it does. What bf16 itself costs is
    measured once, by the product as PyTorch runs it.
    """
    found: dict[tuple[Pass, str, str, str], Trial] = {}
    for trial in _usable_trials(site, device, tuple(Pass)):
        verified = trial.kernel.verified
        chosen = trial if verified else replace(trial, kernel=emulated_twin(trial.kernel.name))
        found.setdefault(chosen.key, chosen)
    return list(found.values())


def kernel_trials_of(site: Site, device: Device, passes: Sequence[Pass]) -> list[Trial]:
    """Every usable kernel of these passes, on a GPU; on a CPU one for each recipe, as in `trials_of`.

    An emulated kernel is left out where a real one has the recipe: it would be slow there and tell nothing
    that a plan could use.

    Args:
        site: Its `rows` decide which kernels take a weight gradient.
        device: Where they shall run.
        passes: Which products.
    """
    if device.type == "cpu":
        return [trial for trial in trials_of(site, device) if trial.pass_ in passes]
    usable_ones = list(_usable_trials(site, device, passes))
    real = {trial.key for trial in usable_ones if not trial.kernel.emulated}
    chosen = (trial for trial in usable_ones if not trial.kernel.emulated or trial.key not in real)
    return list({(trial.key, trial.kernel.name): trial for trial in chosen}.values())


def _usable_trials(site: Site, device: Device, passes: Sequence[Pass]) -> list[Trial]:
    found = []
    for pass_ in passes:
        for grad_format in A_FORMATS[pass_]:
            problem = GemmProblem.of_linear(
                pass_,
                rows=site.rows,
                out_features=site.n,
                in_features=site.k,
                grad_format=grad_format,
            )
            for kernel in _by_preference(device):
                spec_a, spec_b = kernel.operands(problem)
                if not spec_a.is_quantized and (kernel.name != HIGH_PRECISION or grad_format is Format.E5M2):
                    continue
                if usable(kernel, problem, device):
                    found.append(Trial(pass_, spec_a, spec_b, kernel))
    return found


def _by_preference(device: Device) -> list[Kernel]:
    return sorted(KERNELS.values(), key=lambda k: k.emulated if device.type != "cpu" else not k.emulated)


class CastSample(NamedTuple):
    """A sample as one spec casts it, and what that loses, as `cast_counts`: int64 [4]."""

    quantized: Quantized
    counts: Tensor


def cast_sample(sample: OperandSample, spec: OperandSpec) -> CastSample:
    """Cast a sample by a spec; bf16 specs round it to bf16, to see what bf16 itself costs."""
    values = sample.values
    turned = not values.is_contiguous() and values.t().is_contiguous()
    # The sample is oriented already; `transposed` says only that memory holds it the other way round.
    oriented = spec.with_transposed(turned)
    if not spec.is_quantized:
        rounded = not_quantized(values.to(torch.bfloat16), oriented)
        return CastSample(rounded, torch.zeros(CAST_COUNTS, dtype=torch.int64, device=values.device))
    scale = None
    if spec.granularity is Granularity.TENSORWISE:
        scale = decode_scale(sample.amax, spec.format, spec.scale_rounding)
    quantized = cast(values.t() if turned else values, (oriented,), scale=scale)[0]
    codes = quantized.values[:, : values.shape[1]].view(torch.uint8)
    # A scale from an operand's own amax cuts nothing off; one of the whole tensor may, where a sample
    # exceeds it.
    counts = cast_counts_of(values, codes, spec.format, None if sample.bounded else scale)
    return CastSample(quantized, counts)


def run_trial(trial: Trial, a: CastSample, b: CastSample, reference: Tensor) -> Tensor:
    """What each row of the trial's product adds to its error against `reference` [m, n]: fp64 [m, 6]."""
    out_dtype = torch.float32 if trial.spec_a.is_quantized else torch.bfloat16
    out = trial.kernel.matmul(a.quantized, b.quantized, out_dtype=out_dtype)
    return row_errors_of(out, reference)
