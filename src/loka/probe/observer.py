"""What passes through every nn.Linear in one step: statistics of all rows, a sample of rows for trials.

Shapes: M rows of a call, K input features, N output features. Hooks exist only while a step is observed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loka.numerics import BatchStatistics, Moments, OperandStatistics, amax_of
from loka.probe.live import SAMPLED_ROWS, Captured, row_sample, site_generator
from loka.vocab import Granularity, Operand, Pass

__all__ = ["Observer", "SiteObservation"]

_TENSORWISE = Granularity.TENSORWISE


@dataclass(slots=True)
class SiteObservation:
    """Everything learned at one site.

    Attributes:
        operands: Statistics by operand. The weight's moments are of the last observed step; others add up.
        m_seen: Rows of a call to how often they were seen.
        passes: The passes that were seen to run.
        calls: Calls in the last observed step, among which the sampled rows are shared out.
    """

    operands: dict[Operand, OperandStatistics] = field(default_factory=dict)
    m_seen: Counter[int] = field(default_factory=Counter)
    passes: set[Pass] = field(default_factory=set)
    calls: int = 0

    @property
    def moments(self) -> Mapping[Operand, Moments]:
        """The moments by operand, for reading."""
        return MappingProxyType({operand: known.moments for operand, known in self.operands.items()})

    def take(self, operand: Operand, batch: BatchStatistics, *, step: int) -> None:
        """Add what one tensor gave to the operand's statistics."""
        if operand not in self.operands:
            features, device = batch.moments.mean.numel(), batch.moments.mean.device
            self.operands[operand] = OperandStatistics.empty(features, device)
        self.operands[operand].take(batch, step=step, replaces=operand is Operand.WEIGHT)


class Observer:
    """Hooks on the model's linears for one step at a time.

    Args:
        linears: Site name to module.
        on_captured: Called once a site and step, with rows of input and gradient, before any optimizer step.
        seed: For the sample of rows.
        is_training: Says whether a forward belongs to training; evaluation between steps is left out.
    """

    def __init__(
        self,
        linears: Mapping[str, nn.Module],
        *,
        on_captured: Callable[[str, Captured], None],
        seed: int,
        is_training: Callable[[], bool],
    ) -> None:
        self.sites: dict[str, SiteObservation] = {}
        self._linears = dict(linears)
        self._on_captured = on_captured
        self._is_training = is_training
        self._seed = seed
        self._handles: list[RemovableHandle] = []
        self._waiting: dict[str, Captured] = {}
        self._step = 0

    def arm(self, step: int, *, full: bool = True) -> None:
        """Place the hooks for the next step.

        Args:
            step: Its number.
            full: Take distributions and rows for live errors as well, not moments alone.
        """
        self._step = step
        for name, module in self._linears.items():
            self._handles.append(module.register_forward_hook(self._forward_hook(name), with_kwargs=True))

    def disarm(self, *, hand_over: bool = True) -> None:
        """Remove the hooks; sites whose gradient never arrived hand over what they have, or drop it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        waiting, self._waiting = self._waiting, {}
        for name, captured in waiting.items() if hand_over else ():
            self._on_captured(name, captured)

    def _forward_hook(self, name: str) -> Callable[..., None]:
        calls = 0

        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            nonlocal calls
            if not self._is_training():
                return
            # A recomputed forward (activation checkpointing) runs inside a backward: its input was counted.
            recomputed = torch._C._current_graph_task_id() != -1
            captured = self._waiting.get(name)
            if not recomputed:
                x = args[0] if args else kwargs["input"]
                captured = self._see_input(name, module, x, first=calls == 0)
                calls += 1
            if output.requires_grad:
                output.register_hook(self._gradient_hook(name, captured))

        return hook

    def _see_input(self, name: str, module: nn.Module, x: Tensor, *, first: bool) -> Captured | None:
        x_MK = x.detach().reshape(-1, x.shape[-1])
        site = self.sites.setdefault(name, SiteObservation())
        site.m_seen[x_MK.shape[0]] += 1
        if x_MK.shape[0] == 0:
            return None
        site.take(Operand.INPUT, BatchStatistics.of(x_MK), step=self._step)
        if not first:
            return None
        weight = module.get_parameter("weight")
        needed = {Pass.FWD: True, Pass.DGRAD: x.requires_grad, Pass.WGRAD: weight.requires_grad}
        passes = frozenset(pass_ for pass_, runs in needed.items() if runs)
        site.passes |= passes
        site.take(Operand.WEIGHT, BatchStatistics.of(weight.detach()), step=self._step)
        rows = self._rows(name, x_MK)
        captured = Captured(
            x=x_MK if rows is None else x_MK[rows],
            w=weight.detach(),
            x_amax=amax_of(x_MK, _TENSORWISE),
            passes=passes,
        )
        self._waiting[name] = captured
        return captured

    def _rows(self, name: str, x: Tensor) -> Tensor | None:
        generator = site_generator(self._seed, name, f"rows/{self._step}")
        rows = row_sample(x.shape[0], SAMPLED_ROWS, generator)
        return None if rows is None else rows.to(x.device)

    def _gradient_hook(self, name: str, captured: Captured | None) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def hook(grad: Tensor) -> None:
            g_MN = grad.detach().reshape(-1, grad.shape[-1])
            if g_MN.shape[0] == 0:
                return
            self.sites[name].take(Operand.GRAD_OUTPUT, BatchStatistics.of(g_MN), step=self._step)
            if captured is None or self._waiting.get(name) is not captured:
                return
            rows = self._rows(name, g_MN)
            captured.g = g_MN if rows is None else g_MN[rows]
            captured.g_amax = amax_of(g_MN, _TENSORWISE)
            # Now, not at the end of the step: the optimizer changes the weight in between.
            del self._waiting[name]
            self._on_captured(name, captured)

        return hook
