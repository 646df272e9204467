"""One pair of shape and pass: vet what can run it, time it, pick."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka.bench.accounting import Pair, Tensors, Work
from loka.bench.assemble import Times, assembled
from loka.bench.results import PairResult
from loka.kernels import HIGH_PRECISION, Kernel, device_of, usable
from loka.kernels.vetting import Vetting
from loka.timing import DeviceLostError, attempt, measure_or_reason, peak_of
from loka.vocab import GemmProblem

__all__ = ["DROP_SLOWER_THAN", "PairTimer", "blamed"]

# Three times slower after three rounds is no candidate; going on would only cost time.
DROP_SLOWER_THAN = 3.0

_PRODUCT, _CASTS = "product", "casts"


def blamed(lost: DeviceLostError) -> str:
    """The kernel on whose account the device was lost."""
    return lost.culprit.rpartition(" ")[2]


@dataclass(slots=True)
class PairTimer:
    """Times pairs on one device; verdicts on kernels are kept from pair to pair.

    Attributes:
        where: The device.
        kernels: What may be timed; `high_precision.bf16` is among them.
        rounds: Samples of each total; half as many of each part.
        vetting: Each kernel once a shape class.
        verdicts: What `loka.bench.prepare` found before; such a kernel is not vetted again.
        seconds: Time spent, by what it was spent on.
    """

    where: torch.device
    kernels: Sequence[Kernel]
    rounds: int
    vetting: Vetting = field(default_factory=Vetting)
    verdicts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"vetting": 0.0, "timing": 0.0})

    def run(self, pair: Pair, *, left_out: Mapping[str, str]) -> PairResult:
        """Vet, time and pick.

        Args:
            pair: The pair.
            left_out: Kernels that are not tried here, and why.

        Raises:
            DeviceLostError: where a kernel leaves the device unusable; see `blamed`.
        """
        problem, device = pair.problem, device_of(self.where)
        answers = [(kernel, usable(kernel, problem, device)) for kernel in self.kernels]
        able = [kernel for kernel, support in answers if support]
        with self._counted("vetting"):
            known = {**self.verdicts.get(pair.key, {}), **left_out}
            unfit = {k.name: known[k.name] if k.name in known else self._why_unfit(k, problem) for k in able}
        unfit = {name: reason for name, reason in unfit.items() if reason}
        with self._counted("timing"):
            times = self._times(pair, [k for k in able if k.name not in unfit])
        if self.where.type == "cuda":
            torch.cuda.empty_cache()  # the next pair's tensors are of other sizes
        refused = {kernel.name: support.reason for kernel, support in answers if not support}
        return assembled(
            pair, able, times, unfit=unfit, refused=refused, rounds=self.rounds, peak=peak_of(device.name)
        )

    @contextlib.contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += time.monotonic() - begun

    def _why_unfit(self, kernel: Kernel, problem: GemmProblem) -> str:
        """Why the kernel is not timed: wrong results in the shape's class, or a failure to compile."""
        if kernel.name == HIGH_PRECISION:
            return ""
        vetted = functools.partial(self.vetting.vetted, kernel, problem, self.where)
        verdict, failure = attempt(kernel.name, vetted, where=self.where)
        if verdict is None:
            return failure
        if not verdict.support:
            return verdict.support.reason
        # The class may have been vetted on another of its shapes, so this one may still have to compile.
        warm_up = functools.partial(kernel.warm_up, problem, self.where)
        return attempt(kernel.name, warm_up, where=self.where)[1]

    def _times(self, pair: Pair, kernels: Sequence[Kernel]) -> Times:
        make = functools.partial(_work, pair, self.where)
        work, failure = attempt(f"tensors for {HIGH_PRECISION}", make, where=self.where)
        if work is None:
            return Times(reasons={HIGH_PRECISION: failure})
        totals = measure_or_reason(
            {kernel.name: _later(work.total, kernel) for kernel in kernels},
            device=self.where,
            rounds=self.rounds,
            drop_slower_than=DROP_SLOWER_THAN,
            keep=(HIGH_PRECISION,),
        )
        complete = [k for k in kernels if k.name in totals.timings and k.name not in totals.reasons]
        casts = _one_a_cast(complete, pair.problem)
        calls: dict[str, Callable[[], object]] = {}
        for kernel in complete:
            calls[f"{_PRODUCT} {kernel.name}"] = _later(work.product, kernel)
            if casts.get(kernel.name) == kernel.name:
                calls[f"{_CASTS} {kernel.name}"] = work.casts(kernel)
        parts = measure_or_reason(calls, device=self.where, rounds=max(2, self.rounds // 2))
        return Times(
            totals=totals.timings,
            products={n.partition(" ")[2]: t for n, t in parts.timings.items() if n.startswith(_PRODUCT)},
            casts={
                kernel: parts.timings[f"{_CASTS} {first}"]
                for kernel, first in casts.items()
                if f"{_CASTS} {first}" in parts.timings
            },
            reasons=totals.reasons,
        )


def _work(pair: Pair, where: torch.device) -> Work:
    return Work(pair, Tensors.random(pair, where))


def _later(make: Callable[[Kernel], Callable[[], Tensor]], kernel: Kernel) -> Callable[[], Tensor]:
    """A call that makes what it needs when it is first made, so that a failure is the kernel's own."""
    ready: list[Callable[[], Tensor]] = []

    def call() -> Tensor:
        if not ready:
            ready.append(make(kernel))
        return ready[0]()

    return call


def _one_a_cast(kernels: Sequence[Kernel], problem: GemmProblem) -> dict[str, str]:
    """FP8 kernel to the first one with the same operands: their casts are the same and timed once."""
    firsts: dict[object, str] = {}
    return {
        kernel.name: firsts.setdefault(kernel.operands(problem), kernel.name)
        for kernel in kernels
        if kernel.operands(problem)[0].is_quantized
    }
