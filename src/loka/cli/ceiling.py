"""The ceiling: where a training step's time goes, and the most that FP8 could give."""

from __future__ import annotations

from typing import Any

import msgspec

from loka.artifacts import StepShares

__all__ = ["ceiling_json", "ceiling_text"]

_PARTS = (
    ("products that FP8 can speed up", "eligible_gemm"),
    ("other products", "other_gemm"),
    ("norms, casts, activations", "norm_cast_activation"),
    ("embedding", "embedding"),
    ("optimizer", "optimizer"),
    ("other", "other"),
)


def ceiling_text(shares: StepShares | None) -> str:
    """The ceiling in a few lines; what to do where it was not measured."""
    if shares is None:
        return "ceiling: not measured, no step was timed (train for 8 steps or more)"
    lines = [f"ceiling: FP8 can make this step at most {shares.ceiling:.2f}x as fast"]
    lines += [f"  {title:<32}{100 * getattr(shares, name):5.1f} %" for title, name in _PARTS]
    lines.append(f"  one step takes {shares.step_us / 1000:.2f} ms; {shares.basis}")
    return "\n".join(lines)


def ceiling_json(shares: StepShares | None) -> dict[str, Any] | None:
    """The shares as plain values."""
    plain: dict[str, Any] | None = None if shares is None else msgspec.to_builtins(shares)
    return plain
