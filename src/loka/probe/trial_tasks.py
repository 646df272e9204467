"""What the trials on drawn operands will run, so that processes may compile it before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from loka.kernels.preparing import ProductTask, kernel_type
from loka.probe.live import LIVE_OUTPUTS, LIVE_ROWS
from loka.probe.trial import Trial, kernel_trials_of
from loka.vocab import Device, Format, GemmProblem, Pass, Site

__all__ = ["MAX_WGRAD_ROWS", "trial_key", "trial_problem", "trial_tasks", "wgrad_rows"]

MAX_WGRAD_ROWS, _LEAST_WGRAD_ROWS = 8192, 1024
_DRAWN_ELEMENTS = 2**26  # of an operand: a quarter of a GB in fp32
_BLOCK = 128


def wgrad_rows(site: Site, rows: Sequence[int]) -> list[int]:
    """The M at which a site's weight gradient is tried, rising.

    At most 8,192; fewer where the wider operand's draw would exceed 2^26 elements, though never less than
    1,024. What casting costs, relative to the product, does not grow with M; what a fast accumulation loses
    does, and is that of the M that was tried.

    Args:
        site: The site.
        rows: What training or the caller asks for; 0 is no M.
    """
    most = _DRAWN_ELEMENTS // max(site.n, site.k, 1) // _BLOCK * _BLOCK
    most = min(MAX_WGRAD_ROWS, max(_LEAST_WGRAD_ROWS, most))
    return sorted({min(m, most) for m in rows if m > 0})


def trial_problem(site: Site, trial: Trial, m: int) -> GemmProblem:
    """The product that `live_errors` runs for a trial: at most 256 rows and 2,048 outputs.

    Args:
        site: The site.
        trial: The trial.
        m: Rows of the weight gradient; of no matter in the other passes.
    """
    inputs, outputs = min(site.k, LIVE_OUTPUTS), min(site.n, LIVE_OUTPUTS)
    sizes = {
        Pass.FWD: (LIVE_ROWS, outputs, site.k),
        Pass.DGRAD: (LIVE_ROWS, inputs, site.n),
        Pass.WGRAD: (min(LIVE_ROWS, site.n), inputs, m),
    }[trial.pass_]
    formats = (trial.spec_a.format, trial.spec_b.format)
    return GemmProblem(*sizes, trial.pass_, *formats, Format.FP32)


def trial_key(kernel: str, problem: GemmProblem) -> str:
    """`kernel:pass:MxNxK:format x format`: what failed once at exactly this is not tried again."""
    return f"{kernel}:{problem.pass_}:{problem.key}:{problem.a_format} x {problem.b_format}"


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
        tried: list[tuple[int, tuple[Pass, ...]]] = [(LIVE_ROWS, (Pass.FWD, Pass.DGRAD))]
        tried += [(m, (Pass.WGRAD,)) for m in wgrad_rows(site, rows_of(site))]
        for m, passes in tried:
            for trial in kernel_trials_of(replace(site, rows=m), device, passes):
                if trial.kernel.emulated or not trial.spec_a.is_quantized:
                    continue  # nothing compiles
                problem = trial_problem(site, trial, m)
                format_of_b = Format.FP32 if trial.pass_ is Pass.WGRAD else weight_format
                task = ProductTask(
                    trial.kernel.name,
                    kernel_type(trial.kernel),
                    problem,
                    dtypes=(Format.FP32, format_of_b),
                    given_scale=True,
                )
                found[task] = None
    return list(found)
