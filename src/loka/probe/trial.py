"""One trial: a recipe's product of given operands against FP32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loka.kernels import HIGH_PRECISION, KERNELS, Kernel, cast, emulated_twin, usable
from loka.numerics import (
    Quantized,
    cast_loss,
    decode_scale,
    not_quantized,
    product_error,
)
from loka.vocab import A_FORMATS, Device, GemmProblem, Granularity, OperandSpec, Pass, Site

__all__ = [
    "ERROR_FIELDS",
    "CastSample",
    "OperandSample",
    "Trial",
    "cast_sample",
    "run_trial",
    "trials_of",
]

# Row layout of what a trial returns: seven numbers of ProductError, then what the casts lose.
ERROR_FIELDS = ("signal", "noise", "row_p50", "row_p99", "row_max", "bias", "mere", "underflow", "saturation")


class OperandSample(NamedTuple):
    """Rows of an operand and the amax of the whole of it.

    A tensorwise scale comes from the whole tensor; taking it from the sampled rows would flatter it.

    Attributes:
        values: [rows, k], as the product takes it (already transposed where the pass wants that).
        amax: fp32 (), over the finite elements of the whole operand.
    """

    values: Tensor
    amax: Tensor


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
    for pass_ in Pass:
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
                if not spec_a.is_quantized and kernel.name != HIGH_PRECISION:
                    continue
                if not usable(kernel, problem, device):
                    continue
                runs = kernel if kernel.verified else emulated_twin(kernel.name)
                trial = Trial(pass_, spec_a, spec_b, runs)
                found.setdefault(trial.key, trial)
    return list(found.values())


def _by_preference(device: Device) -> list[Kernel]:
    return sorted(KERNELS.values(), key=lambda k: k.emulated if device.type != "cpu" else not k.emulated)


class CastSample(NamedTuple):
    """A sample as one spec casts it, and what that loses: fp64 [2], underflow and saturation."""

    quantized: Quantized
    loss: Tensor


def cast_sample(sample: OperandSample, spec: OperandSpec) -> CastSample:
    """Cast a sample by a spec; bf16 specs round it to bf16, to see what bf16 itself costs."""
    # The sample is already oriented; only the label says that memory holds the transpose.
    upright = spec.with_transposed(False)
    if not spec.is_quantized:
        rounded = not_quantized(sample.values.to(torch.bfloat16), upright)
        return CastSample(rounded, torch.zeros(2, dtype=torch.float64, device=sample.values.device))
    scale = None
    if spec.granularity is Granularity.TENSORWISE:
        scale = decode_scale(sample.amax, spec.format, spec.scale_rounding)
    quantized = cast(sample.values, (upright,), scale=scale)[0]
    loss = cast_loss(sample.values, quantized)
    return CastSample(quantized, torch.stack([loss.underflow, loss.saturation]))


def run_trial(trial: Trial, a: CastSample, b: CastSample, reference: Tensor) -> Tensor:
    """Error of the trial's product against `reference` [m, n]; fp64 [9] on the device, see `ERROR_FIELDS`."""
    out_dtype = torch.float32 if trial.spec_a.is_quantized else torch.bfloat16
    out = trial.kernel.matmul(a.quantized, b.quantized, out_dtype=out_dtype)
    return torch.cat([product_error(out, reference).stacked(), torch.maximum(a.loss, b.loss)])
