"""The amax of an operand in the last observed steps, bounded and mergeable."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["HISTORY_STEPS", "AmaxHistory"]

HISTORY_STEPS = 64
_NO_STEP = -1


@dataclass(slots=True)
class AmaxHistory:
    """Amax by observed step, the newest last. The numbers of steps are the host's, the amax the device's.

    Attributes:
        steps: Numbers of at most 64 observed steps, rising.
        amax: fp32 [64], the last `len(steps)` of which belong to `steps`; 0 before them.
    """

    steps: tuple[int, ...] = ()
    amax: Tensor = field(default_factory=lambda: torch.zeros(HISTORY_STEPS))

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> AmaxHistory:
        """No steps."""
        return cls((), torch.zeros(HISTORY_STEPS, device=device))

    @property
    def latest(self) -> int:
        """The newest observed step; -1 without any."""
        return self.steps[-1] if self.steps else _NO_STEP

    def values(self) -> Tensor:
        """fp32 [len(steps)], in the order of `steps`."""
        return self.amax[HISTORY_STEPS - len(self.steps) :]

    def with_amax(self, step: int, amax: Tensor) -> AmaxHistory:
        """This history and one more amax () of a step, new or known; of a known one the larger amax counts.

        No host synchronisation, in any order of steps.
        """
        new, place = amax.float().view(1), bisect.bisect_left(self.steps, step)
        at = HISTORY_STEPS - len(self.steps) + place
        if step in self.steps:
            larger = torch.maximum(self.amax[at : at + 1], new)
            return AmaxHistory(self.steps, torch.cat([self.amax[:at], larger, self.amax[at + 1 :]]))
        if at == 0:  # older than 64 steps that are known
            return self
        steps = (*self.steps[:place], step, *self.steps[place:])[-HISTORY_STEPS:]
        return AmaxHistory(steps, torch.cat([self.amax[1:at], new, self.amax[at:]]))

    def merge(self, other: AmaxHistory) -> AmaxHistory:
        """The newest 64 steps of both; of a step that both have, the larger amax."""
        steps = tuple(sorted({*self.steps, *other.steps}))[-HISTORY_STEPS:]
        unknown = self.amax.new_zeros(1)
        mine, theirs = (torch.cat([h.values(), unknown]) for h in (self, other))
        amax = torch.maximum(mine[_places(self.steps, steps)], theirs[_places(other.steps, steps)])
        return AmaxHistory(steps, torch.cat([self.amax.new_zeros(HISTORY_STEPS - len(steps)), amax]))

    def largest(self, first: int, end: int | None = None) -> float:
        """The largest amax of the steps in [first, end) still known; 0 without any. Reads the device."""
        wanted = [i for i, s in enumerate(self.steps) if first <= s and (end is None or s < end)]
        values = self.values().tolist()
        return max((values[i] for i in wanted), default=0.0)

    def tensors(self) -> dict[str, Tensor]:
        """Name to tensor, for saving: `steps` int64 [64] on the CPU, -1 for none, and `amax`."""
        padded = (*(_NO_STEP,) * (HISTORY_STEPS - len(self.steps)), *self.steps)
        return {"steps": torch.tensor(padded, dtype=torch.int64), "amax": self.amax}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> AmaxHistory:
        """The inverse of `tensors`."""
        return cls(tuple(s for s in tensors["steps"].tolist() if s != _NO_STEP), tensors["amax"])

    def to(self, device: torch.device | str) -> AmaxHistory:
        """A copy on another device."""
        return AmaxHistory(self.steps, self.amax.to(device))


def _places(known: tuple[int, ...], wanted: tuple[int, ...]) -> list[int]:
    """Where each wanted step stands in `known`; past its end where it does not."""
    at = {step: i for i, step in enumerate(known)}
    return [at.get(step, len(known)) for step in wanted]
