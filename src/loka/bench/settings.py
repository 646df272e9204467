"""What `loka bench gemm` measures, and what makes two runs the same run."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from loka.artifacts.environment import Environment
from loka.bench.accounting import Pair
from loka.bench.shapes import Shape, default_shapes
from loka.errors import UsageError
from loka.kernels import HIGH_PRECISION, KERNELS, Kernel, check_patterns, device_of
from loka.vocab import Pass

__all__ = ["GemmBench"]

_LEAST_ROUNDS = 8  # four on each half: the least on which an interval above 1 says something


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmBench:
    """What is measured, and where.

    Attributes:
        shapes: Linear layers.
        passes: Products of each.
        kernels: Glob patterns of the kernels that are timed beside bf16; empty takes all. Emulated kernels
            are left out: their speed means nothing.
        rounds: Samples of each total; at least 4, a choice is made on half of them.
        device: `cpu`, `cuda` or `cuda:1`.

    Raises:
        UsageError: for no shapes or passes, too few rounds, a device that is not there, or patterns that
            leave no kernel.
        UnknownNameError: for a pattern that matches no kernel.
    """

    shapes: tuple[Shape, ...] = field(default_factory=default_shapes)
    passes: tuple[Pass, ...] = tuple(Pass)
    kernels: tuple[str, ...] = ()
    rounds: int = 16
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.shapes or not self.passes:
            raise UsageError("a benchmark of products needs at least one shape and one pass")
        if self.rounds < _LEAST_ROUNDS:
            raise UsageError(
                f"{self.rounds} rounds are too few: a kernel is picked on one half and judged on the other",
                hint=f"take at least {_LEAST_ROUNDS}",
            )
        check_patterns(self.kernels)
        if len(self.chosen()) < 2:
            raise UsageError(
                f"the patterns `{', '.join(self.kernels)}` leave no kernel whose speed could be measured",
                hint="emulated kernels have none, and bf16 is always measured",
            )
        device_of(self.device)

    def chosen(self) -> list[Kernel]:
        """The kernels that may be timed: bf16, and what the patterns take."""
        return [
            kernel
            for name, kernel in KERNELS.items()
            if name == HIGH_PRECISION
            or (not kernel.emulated and any(fnmatchcase(name, p) for p in self.kernels or ("*",)))
        ]

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Every shape in every pass."""
        return tuple(Pair(shape, pass_) for shape in self.shapes for pass_ in self.passes)

    def identity(self, environment: Environment) -> dict[str, Any]:
        """What two runs must agree on so that one goes on where the other stopped."""
        plain: dict[str, Any] = msgspec.to_builtins(environment)
        return {
            "shapes": [shape.key + ("" if shape.bias else " without bias") for shape in self.shapes],
            "passes": [str(pass_) for pass_ in self.passes],
            "kernels": [kernel.name for kernel in self.chosen()],
            "rounds": self.rounds,
            "device": f"{self.device}: {device_of(self.device).name}",
            **{name: plain[name] for name in ("machine", "cpu_count", "python", "torch", "cuda", "driver")},
            **{name: plain[name] for name in ("loka", "commit", "libraries")},
        }
