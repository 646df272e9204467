"""Times of every kernel and cast that a plan could use: compiled and vetted in processes, then timed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from loka.artifacts.profile import CastTable, ProductTable
from loka.kernels.preparing import Prepared, ProductTask, Task, default_workers, prepare_all
from loka.probe.timed_casts import cast_tasks, time_casts
from loka.probe.timed_products import product_tasks, time_products
from loka.probe.timing_cost import compilations
from loka.probe.trial_tasks import trial_key, trial_tasks
from loka.vocab import Device, Operand, Pass, Site

__all__ = ["Times", "time_kernels"]

_log = logging.getLogger("loka.probe")


class _Options(TypedDict):
    dtypes: Mapping[Operand, torch.dtype]
    on_shape: Callable[[str], None]
    prepared: Prepared


@dataclass(frozen=True, slots=True)
class Times:
    """What `time_kernels` gives.

    Attributes:
        products: Of every kernel at every shape and pass.
        casts: Of every cast, and of pairs that share a read.
        notes: What failed, and how long each stage took.
        left_out: What is not to be tried, with the reason: kernels that ended a process, as `name:pass`, and
            trials that failed, as `loka.probe.trial_tasks.trial_key` gives them.
    """

    products: ProductTable
    casts: CastTable
    notes: Sequence[str]
    left_out: Mapping[str, str]


def time_kernels(
    sites: Sequence[Site],
    device: Device,
    where: torch.device,
    *,
    rows_of: Callable[[Site], Sequence[int]],
    workers: int | None = None,
) -> Times:
    """Prepare, then time: each shape once, two sites or two M that make one problem together.

    Args:
        sites: Those that can be planned and ran.
        device: Named in the tables.
        where: Runs there.
        rows_of: Every M of a site.
        workers: Processes that compile and vet; None for `default_workers`, 0 for none.

    Raises:
        DeviceLostError: where a kernel leaves the GPU unusable in this process.
        UsageError: for a negative number of workers.
    """
    dtypes = _arrival_dtypes()
    at_every_m = [replace(site, rows=m) for site in sites for m in rows_of(site)]
    tasks: list[Task] = [
        *cast_tasks(at_every_m, device, dtypes=dtypes),
        *product_tasks(at_every_m, device, dtypes=dtypes),
        *trial_tasks(sites, device, rows_of=rows_of),
    ]
    prepared = prepare_all(tasks, where, workers=default_workers(where) if workers is None else workers)
    options: _Options = {"dtypes": dtypes, "on_shape": _tell, "prepared": prepared}
    with compilations() as compiled:
        begun = time.monotonic()
        products, notes = time_products(at_every_m, device, where, **options)
        of_products = time.monotonic()
        casts, failed = time_casts(at_every_m, device, where, **options)
        of_casts = time.monotonic()
    told = [
        "casts are timed as LoKA's own kernels, each tensor read from memory",
        f"{len(prepared.answers)} of {len(set(tasks))} products and casts were compiled and vetted by "
        f"{prepared.workers} processes in {prepared.seconds:.1f} s; products were timed in "
        f"{of_products - begun:.1f} s, casts in {of_casts - of_products:.1f} s",
    ]
    _log.info("%s", told[-1])
    _log.info("while timing, %s", compiled)
    left_out, ended = _left_out(prepared)
    return Times(products, casts, _each_once([*notes, *failed, *ended, *told]), left_out)


def _left_out(prepared: Prepared) -> tuple[dict[str, str], list[str]]:
    """What not to try on drawn operands, and notes, one a kernel and pass.

    What ended a process must not end this one. A trial that failed would fail again, and a library that
    cannot compile a shape takes seconds to say so.
    """
    left_out: dict[str, str] = {}
    notes: dict[tuple[str, Pass], str] = {}
    for task, answer in prepared.answers.items():
        if not isinstance(task, ProductTask):
            continue
        text = f"failed at {task.problem.pass_} {task.problem.key}: {answer.failed}"
        place = (task.kernel, task.problem.pass_)
        if answer.ended:
            left_out.setdefault(f"{task.kernel}:{task.problem.pass_}", text)
            notes[place] = f"{task.kernel} {left_out[f'{task.kernel}:{task.problem.pass_}']}"
        elif answer.failed and not answer.left and task.given_scale:
            left_out[trial_key(task.kernel, task.problem)] = text
            notes.setdefault(place, f"{task.kernel} {text} (on drawn operands)")
    return left_out, list(notes.values())


def _each_once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _arrival_dtypes() -> dict[Operand, torch.dtype]:
    """Under bf16 autocast with fp32 masters: activations and gradients in bf16, weights in fp32."""
    return {
        Operand.INPUT: torch.bfloat16,
        Operand.WEIGHT: torch.float32,
        Operand.GRAD_OUTPUT: torch.bfloat16,
    }


def _tell(what: str) -> None:
    _log.info("timing %s", what)
