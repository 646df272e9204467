"""What a plan must keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from loka.errors import UsageError

__all__ = ["Requirement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """What a plan must keep (decision 9).

    Attributes:
        min_sqnr_db: Least signal-to-quantization-noise ratio of a product against FP32, in dB.
        max_row_error_p99: Largest 99th percentile over rows of the relative L2 error of a row.
        max_loss_increase: Largest relative increase of the loss (2e-4 is 0.02 % of NE); None for no limit.
            Without an estimate in the profile it is reported as "not estimated" and does not gate.
        min_speedup: Least speed-up of what is switched over bf16, casts included; None for no limit.
            Without measured times it does not apply: the plan is "by accuracy only".
        otherwise: What a pass runs in when nothing passes; only `bf16` exists.
        allow: Glob patterns of kernels that may be used; empty allows all.
        deny: Glob patterns of kernels that must not be used.
        pin: Site glob (optionally `:pass`) to a kernel name that must be used there, or `bf16`.
            A pin overrides the gates; one that cannot run is an error.

    Raises:
        UsageError: for a value out of range.
    """

    min_sqnr_db: float = 20.0
    max_row_error_p99: float = 0.25
    max_loss_increase: float | None = 2e-4
    min_speedup: float | None = 1.05
    otherwise: str = "bf16"
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    pin: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("min_sqnr_db", "max_row_error_p99", "max_loss_increase", "min_speedup"):
            value = getattr(self, name)
            limit = value is None and name in ("max_loss_increase", "min_speedup")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not limit and not (number and math.isfinite(value)):
                raise UsageError(f"Requirement({name}={value!r}) is not a finite number")
        if self.max_row_error_p99 <= 0:
            raise UsageError(f"Requirement(max_row_error_p99={self.max_row_error_p99}) must be above 0")
        if self.min_speedup is not None and self.min_speedup <= 0:
            raise UsageError(
                f"Requirement(min_speedup={self.min_speedup}) must be above 0", hint="use None for no limit"
            )
        if self.otherwise != "bf16":
            raise UsageError(
                f"Requirement(otherwise={self.otherwise!r}) is not known", hint="only `bf16` exists"
            )
