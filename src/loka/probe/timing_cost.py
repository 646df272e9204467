"""What timing itself costs: seconds by what they were spent on, and what Triton had to compile meanwhile."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from loka.timing import Measured

__all__ = ["Compilations", "Spent", "compilations"]

_log = logging.getLogger("loka.probe")
_SHOWN = 5


@dataclass(slots=True)
class Spent:
    """Seconds of many measurements.

    Attributes:
        making: Operands, made and cast: on the host, and what the casts compile.
        ready: Warm-up and capture by candidate, its operands included.
        rounds: Samples.
    """

    making: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    rounds: float = 0.0

    def add(self, measured: Measured, *, making: float = 0.0, shown: Mapping[str, str] | None = None) -> str:
        """Count a measurement.

        Args:
            measured: What the clock gave.
            making: Seconds of its operands.
            shown: Names of candidates for readers; several may share one.

        Returns:
            Its own seconds in words.
        """
        ready: dict[str, float] = {}
        for name, seconds in measured.ready_s.items():
            for counted in (ready, self.ready):
                _count(counted, (shown or {}).get(name, name), seconds)
        self.making += making
        self.rounds += measured.rounds_s
        return _in_words(making, ready, measured.rounds_s)

    def __str__(self) -> str:
        return _in_words(self.making, self.ready, self.rounds)


def _count(seconds_of: dict[str, float], name: str, seconds: float) -> None:
    seconds_of[name] = seconds_of.get(name, 0.0) + seconds


def _longest(seconds_of: dict[str, float]) -> str:
    ranked = sorted(seconds_of.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in ranked[:_SHOWN])


def _in_words(making: float, ready: dict[str, float], rounds: float) -> str:
    return (
        f"operands {making:.2f} s; ready in {sum(ready.values()):.2f} s with them ({_longest(ready)}); "
        f"rounds {rounds:.2f} s"
    )


@dataclass(slots=True)
class Compilations:
    """What Triton did within the block of `compilations`.

    Attributes:
        compiled_s: Seconds of the compiler, by kernel.
        count: Kernels that it compiled.
        found: Kernels that lay compiled in its cache.
    """

    compiled_s: dict[str, float] = field(default_factory=dict)
    count: int = 0
    found: int = 0

    def note(self, name: str, seconds: float, *, cache_hit: bool) -> None:
        """One answer of the compiler."""
        if cache_hit:
            self.found += 1
            return
        self.count += 1
        _count(self.compiled_s, name, seconds)
        _log.debug("Triton compiles `%s` while timing, %.2f s", name, seconds)

    def __str__(self) -> str:
        shown = f" ({_longest(self.compiled_s)})" if self.compiled_s else ""
        return (
            f"Triton compiled {self.count} kernels in {sum(self.compiled_s.values()):.1f} s{shown} and found "
            f"{self.found} in its cache"
        )


@contextlib.contextmanager
def compilations() -> Iterator[Compilations]:
    """Count what Triton compiles within the block; nothing where it is not loaded, or tells nobody.

    Whoever listened before goes on being told.
    """
    seen = Compilations()
    knobs = getattr(getattr(sys.modules.get("triton"), "knobs", None), "compilation", None)
    if knobs is None or not hasattr(knobs, "listener"):
        yield seen
        return
    before = knobs.listener

    def listen(**told: Any) -> None:
        seconds = float(getattr(told.get("times"), "total", 0)) / 1e6
        name = str(getattr(told.get("src"), "name", "a kernel"))
        seen.note(name, seconds, cache_hit=bool(told.get("cache_hit")))
        if before is not None:
            before(**told)

    knobs.listener = listen
    try:
        yield seen
    finally:
        knobs.listener = before
