"""What changed of an operand from one window of observed steps to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from loka.numerics.amax_history import AmaxHistory
from loka.numerics.moments import HISTOGRAM_BINS

__all__ = ["WINDOW_STEPS", "Drift", "Window", "total_variation"]

WINDOW_STEPS = 10  # two windows fit into the history of the amax, with room for steps that come late


class Drift(NamedTuple):
    """The current window of observed steps against the one before it.

    Attributes:
        total_variation: Distance of the exponent histograms, 0 (equal) to 1 (nothing in common).
        amax_octaves: log2 of the ratio of the largest amax; 0 where either is 0.
        steps: Observed steps in the current window.
    """

    total_variation: float
    amax_octaves: float
    steps: int


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """Half the sum of |p_i - q_i| of two normalised histograms [bins]; fp64 (), 0 where one is empty."""
    empty = (a.sum() == 0) | (b.sum() == 0)
    p, q = (h.double() / h.sum().clamp(min=1) for h in (a, b))
    return torch.where(empty, 0.0, (p - q).abs().sum() / 2)


def _no_counts(device: torch.device | str = "cpu") -> Tensor:
    return torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device)


@dataclass(slots=True)
class Window:
    """Where the current window of observed steps and the one before it start.

    Cumulated histograms are kept, so that a window is a difference of two and a new one costs nothing.

    Attributes:
        start: First step of the current window; -1 before any.
        previous: First step of the window before it; -1 without one.
        steps: Observed steps in the current window.
        latest: The newest step.
        total: int64 [64], exponent histogram of everything so far.
        at_start: int64 [64], the same when the current window began.
        at_previous: int64 [64], the same when the window before it began.
    """

    start: int = -1
    previous: int = -1
    steps: int = 0
    latest: int = -1
    total: Tensor = field(default_factory=_no_counts)
    at_start: Tensor = field(default_factory=_no_counts)
    at_previous: Tensor = field(default_factory=_no_counts)

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Window:
        """No steps."""
        return cls(total=_no_counts(device), at_start=_no_counts(device), at_previous=_no_counts(device))

    def add(self, step: int, exponents: Tensor) -> Window:
        """This window and the exponent histogram of one tensor of a step; no host synchronisation.

        The eleventh observed step begins a new window.
        """
        total = self.total + exponents
        if step <= self.latest:
            return replace(self, total=total)
        if self.start >= 0 and self.steps < WINDOW_STEPS:
            return replace(self, total=total, steps=self.steps + 1, latest=step)
        return Window(step, self.start, 1, step, total, at_start=self.total, at_previous=self.at_start)

    def merge(self, other: Window) -> Window:
        """Of both: the same windows on two ranks add up; an older part comes before both windows."""
        if (self.start, self.previous) == (other.start, other.previous):
            return Window(
                self.start,
                self.previous,
                max(self.steps, other.steps),
                max(self.latest, other.latest),
                self.total + other.total,
                self.at_start + other.at_start,
                self.at_previous + other.at_previous,
            )
        newer, older = (self, other) if self.start > other.start else (other, self)
        return replace(
            newer,
            total=newer.total + older.total,
            at_start=newer.at_start + older.total,
            at_previous=newer.at_previous + older.total,
        )

    def drift(self, history: AmaxHistory) -> Drift | None:
        """The current window against the one before it; None without one. Reads the device."""
        if self.previous < 0:
            return None
        distance = total_variation(self.total - self.at_start, self.at_start - self.at_previous)
        now = history.largest(self.start)
        before = history.largest(self.previous, self.start)
        octaves = math.log2(now / before) if now > 0 and before > 0 else 0.0
        return Drift(distance.item(), octaves, self.steps)

    def tensors(self) -> dict[str, Tensor]:
        """Name to tensor, for saving: `steps` int64 [4] on the CPU holds start, previous, steps, latest."""
        numbers = torch.tensor([self.start, self.previous, self.steps, self.latest], dtype=torch.int64)
        return {
            "steps": numbers,
            "total": self.total,
            "at_start": self.at_start,
            "at_previous": self.at_previous,
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Window:
        """The inverse of `tensors`."""
        start, previous, steps, latest = tensors["steps"].tolist()
        counts = (tensors[name] for name in ("total", "at_start", "at_previous"))
        return cls(start, previous, steps, latest, *counts)

    def to(self, device: torch.device | str) -> Window:
        """A copy on another device."""
        return replace(
            self,
            total=self.total.to(device),
            at_start=self.at_start.to(device),
            at_previous=self.at_previous.to(device),
        )
