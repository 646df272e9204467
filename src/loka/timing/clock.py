"""The clock: interleaved candidates, cold caches, medians with spread (decision 15).

Candidates are timed in turn within each round, in rotating order, so that a drift of clocks or a noisy
neighbour meets all of them alike. On a GPU each candidate is captured into a CUDA graph once and replayed
between two events (see `loka.timing.replay`); on a CPU it is called.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from loka.errors import UsageError
from loka.timing.failures import attempt
from loka.timing.replay import GpuClock
from loka.timing.samples import Timing

__all__ = ["Measured", "clock_overhead_us", "measure", "measure_or_reason"]

_WARMUP_CALLS = 3

Call = Callable[[], object]
_Timer = tuple[Callable[[], float], bool]


@dataclass(frozen=True, slots=True)
class Measured:
    """What `measure_or_reason` gives.

    Attributes:
        timings: One for each candidate that ran. A dropped one has fewer samples than the others.
        reasons: Why a candidate has no timing, or was dropped.
        ready_s: Seconds until a candidate could be timed: warm-up and what it compiles or loads, capture.
        rounds_s: Seconds of all rounds together.
    """

    timings: dict[str, Timing] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    ready_s: dict[str, float] = field(default_factory=dict)
    rounds_s: float = 0.0


def measure(
    candidates: Mapping[str, Call], *, device: torch.device | str, rounds: int = 20
) -> dict[str, Timing]:
    """Time every candidate once in each round.

    Args:
        candidates: Name to a call without arguments.
        device: Where the calls run.
        rounds: Samples per candidate.

    Raises:
        UsageError: for no rounds.
        RuntimeError: or whatever a candidate raises; see `measure_or_reason` for those that may fail.
    """
    _check_rounds("measure", rounds)
    with _clock_on(torch.device(device)) as clock:
        return _measured_strictly(candidates, clock, rounds)


def _measured_strictly(
    candidates: Mapping[str, Call], clock: GpuClock | None, rounds: int
) -> dict[str, Timing]:
    for call in candidates.values():
        _warm_up(clock, call)
    timers = {name: _timer(clock, call) for name, call in candidates.items()}
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        for name in _turn(names, round_):
            samples[name].append(timers[name][0]())
    return {name: Timing(tuple(values), timers[name][1]) for name, values in samples.items()}


def measure_or_reason(
    candidates: Mapping[str, Call],
    *,
    device: torch.device | str,
    rounds: int = 20,
    drop_slower_than: float | None = None,
    drop_after: int = 3,
    keep: Collection[str] = (),
    budget_us: float | None = None,
    least_rounds: int = 5,
) -> Measured:
    """As `measure`, but a candidate that fails is left out with the text of its failure.

    Args:
        candidates: Name to a call without arguments.
        device: Where the calls run.
        rounds: Samples per candidate.
        drop_slower_than: Time no further a candidate whose median is more than this many times that of the
            fastest; None drops none.
        drop_after: Rounds after which that is decided, once.
        keep: Candidates that are not dropped.
        budget_us: A candidate whose samples together took as long gets no more of them: a long call needs
            fewer, since what disturbs it averages out within. None gives every candidate all rounds.
        least_rounds: Samples that it gets whatever they take.

    Raises:
        UsageError: for no rounds.
        DeviceLostError: where a candidate leaves the GPU unusable.
    """
    _check_rounds("measure_or_reason", rounds)
    where = torch.device(device)
    stop = _Stop(drop_slower_than, drop_after, frozenset(keep), budget_us, least_rounds)
    with _clock_on(where) as clock:
        measured, timers = _timers(candidates, clock, where)
        begun = time.monotonic()
        samples = _rounds(timers, measured.reasons, where, rounds, stop)
        rounds_s = time.monotonic() - begun
    timings = {name: Timing(tuple(values), timers[name][1]) for name, values in samples.items()}
    return Measured(timings, measured.reasons, measured.ready_s, rounds_s)


@dataclass(frozen=True, slots=True)
class _Stop:
    """Who gets no more samples, and when."""

    slower_than: float | None
    after: int
    keep: frozenset[str]
    budget_us: float | None
    least_rounds: int

    def has_enough(self, samples: Sequence[float]) -> bool:
        return self.budget_us is not None and (
            len(samples) >= self.least_rounds and sum(samples) >= self.budget_us
        )

    def decides(self, rounds_done: int, rounds: int) -> bool:
        """Whether it is time to drop."""
        return self.slower_than is not None and rounds_done == self.after < rounds


def _timers(
    candidates: Mapping[str, Call], clock: GpuClock | None, where: torch.device
) -> tuple[Measured, dict[str, _Timer]]:
    measured = Measured()
    timers: dict[str, _Timer] = {}
    for name, call in candidates.items():
        begun = time.monotonic()
        timer, reason = attempt(name, functools.partial(_ready, clock, call), where=where)
        measured.ready_s[name] = time.monotonic() - begun
        if timer is None:
            measured.reasons[name] = reason
        else:
            timers[name] = timer
    return measured, timers


def _rounds(
    timers: Mapping[str, _Timer], reasons: dict[str, str], where: torch.device, rounds: int, stop: _Stop
) -> dict[str, list[float]]:
    """The samples; whoever fails or is dropped is told in `reasons`."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    running = list(timers)
    for round_ in range(rounds):
        for name in _turn(running, round_):
            value, reason = attempt(name, timers[name][0], where=where)
            if value is None:
                reasons[name] = reason
                running.remove(name)
                del samples[name]
            else:
                samples[name].append(value)
        if stop.decides(round_ + 1, rounds) and stop.slower_than is not None:
            for name, reason in _too_slow({n: samples[n] for n in running}, stop.slower_than).items():
                if name not in stop.keep:
                    reasons[name] = reason
                    running.remove(name)
        running = [name for name in running if not stop.has_enough(samples[name])]
    return samples


@contextlib.contextmanager
def _clock_on(where: torch.device) -> Iterator[GpuClock | None]:
    """A clock of the GPU, which is the current one within the block; None on a CPU."""
    if where.type != "cuda":
        yield None
        return
    with torch.cuda.device(where):
        yield GpuClock(where)


def clock_overhead_us(*, device: torch.device | str, rounds: int = 20) -> float:
    """Median time that the clock sees for a call that does nothing, in us; never subtracted from a sample.

    Raises:
        UsageError: for no rounds.
    """
    return measure({"nothing": lambda: None}, device=device, rounds=rounds)["nothing"].p50_us


def _check_rounds(function: str, rounds: int) -> None:
    if rounds < 1:
        raise UsageError(f"{function}(rounds={rounds}) needs at least 1")


def _turn(names: list[str], round_: int) -> list[str]:
    shift = round_ % max(1, len(names))
    return names[shift:] + names[:shift]


def _too_slow(samples: Mapping[str, list[float]], limit: float) -> dict[str, str]:
    medians = {name: Timing(tuple(values)).p50_us for name, values in samples.items()}
    best = min(medians.values(), default=0.0)
    return {
        name: f"dropped after {len(samples[name])} rounds: {median:.1f} us, the fastest takes {best:.1f} us"
        for name, median in medians.items()
        if median > limit * best
    }


def _ready(clock: GpuClock | None, call: Call) -> _Timer:
    _warm_up(clock, call)
    return _timer(clock, call)


def _warm_up(clock: GpuClock | None, call: Call) -> None:
    if clock is not None:
        clock.warm_up(call, _WARMUP_CALLS)
        return
    for _ in range(_WARMUP_CALLS):
        call()


def _timer(clock: GpuClock | None, call: Call) -> _Timer:
    if clock is not None:
        return clock.timer(call)

    def sample() -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    return sample, False
