"""What the trials on drawn operands will run, so that processes may compile it before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from loka.kernels.preparing import ProductTask, kernel_type
from loka.probe.live import LIVE_ROWS
from loka.probe.sampled import MAX_WGRAD_ROWS
from loka.probe.trial import Trial, kernel_trials_of
from loka.vocab import Device, Format, GemmProblem, Pass, Site

__all__ = ["trial_tasks"]


def trial_tasks(
    sites: Sequence[Site],
    device: Device,
    *,
    rows_of: Callable[[Site], Sequence[int]],
    weight_format: Format = Format.FP32,
) -> list[ProductTask]:
    """The products of `sample_errors`, each once: fp32 operands cast with a given scale, results in fp32.

    Args:
        sites: Those that can be planned and ran.
        device: The machine.
        rows_of: The M at which a site's weight gradient is tried.
        weight_format: The dtype of the weights.
    """
    found: dict[ProductTask, None] = {}
    alike = {(site.n, site.k, tuple(rows_of(site))): site for site in sites}
    for site in alike.values():
        for trial in kernel_trials_of(replace(site, rows=LIVE_ROWS), device, (Pass.FWD, Pass.DGRAD)):
            if trial.pass_ is Pass.FWD:
                _add(found, trial, (LIVE_ROWS, site.n, site.k), weight_format)
            else:
                _add(found, trial, (LIVE_ROWS, site.k, site.n), weight_format)
        for m in sorted({min(m, MAX_WGRAD_ROWS) for m in rows_of(site) if m > 0}):
            for trial in kernel_trials_of(replace(site, rows=m), device, (Pass.WGRAD,)):
                _add(found, trial, (min(LIVE_ROWS, site.n), site.k, m), Format.FP32)
    return list(found)


def _add(
    found: dict[ProductTask, None], trial: Trial, sizes: tuple[int, int, int], format_of_b: Format
) -> None:
    kernel = trial.kernel
    if kernel.emulated or not trial.spec_a.is_quantized:
        return  # nothing compiles
    formats = (trial.spec_a.format, trial.spec_b.format)
    problem = GemmProblem(*sizes, trial.pass_, *formats, Format.FP32)
    dtypes = (Format.FP32, format_of_b)
    found[ProductTask(kernel.name, kernel_type(kernel), problem, dtypes=dtypes, given_scale=True)] = None
