"""Metrics of a run in progress: over all rows so far and over the last steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.recsys.evaluation.metrics import ClickSums

__all__ = ["RunningMetrics"]


class RunningMetrics:
    """Progressive metrics of training: each row is predicted before the model learns from it.

    Everything stays on the device; only asking for a value waits for it.

    Args:
        tasks: Number of tasks T.
        window: How many of the last steps the windowed NE covers.
        device: Where the logits will be.
    """

    def __init__(self, tasks: int, *, window: int = 100, device: torch.device | str = "cpu") -> None:
        if window < 1:
            raise UsageError(f"the window of the running NE must be at least one step, got {window}")
        self._total = ClickSums.zeros(tasks, device=device).sums
        self._ring = torch.zeros(window, 4, tasks, dtype=torch.float64, device=device)
        self._steps = 0

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add one step's rows; arguments as in `ClickSums.of`."""
        sums = ClickSums.of(logits, labels, weights).sums
        self._total += sums
        self._ring[self._steps % self._ring.shape[0]] = sums
        self._steps += 1

    @property
    def total(self) -> ClickSums:
        """The sums over all rows so far."""
        return ClickSums(self._total.clone())

    @property
    def window(self) -> ClickSums:
        """The sums over the last steps."""
        return ClickSums(self._ring.sum(dim=0))

    def window_ne(self) -> float | None:
        """Mean over the tasks of the NE of the last steps; None where a task's is undefined."""
        values = [v for v in self.window.normalized_entropy() if v is not None]
        return sum(values) / len(values) if len(values) == self._ring.shape[2] else None

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors."""
        return {"total": self._total, "ring": self._ring, "steps": torch.tensor(self._steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a saved state, exactly.

        Raises:
            UsageError: if it was saved for another number of tasks or another window.
        """
        if state["total"].shape != self._total.shape or state["ring"].shape != self._ring.shape:
            raise UsageError(
                f"running metrics of shape {tuple(state['ring'].shape)} do not fit {tuple(self._ring.shape)}"
            )
        self._total.copy_(state["total"])
        self._ring.copy_(state["ring"])
        self._steps = int(state["steps"])
