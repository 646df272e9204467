"""What passes through every nn.Linear in one step: statistics of all rows, a sample of rows for trials.

Shapes: M rows of a call, K input features, N output features. Hooks exist only while a step is observed; they
read no number from the device, so nothing waits. Of a full step the sampled rows stay until their gradient
arrives: at most 1,024 rows of every input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loka.numerics import OperandStatistics
from loka.probe.broken_off import BrokenOff
from loka.probe.calls import base_of, has_weight, is_sharded, passes_of, why_not_seen
from loka.probe.live import SAMPLED_ROWS, Captured, site_generator
from loka.probe.observation import SiteObservation
from loka.probe.seen import Sampled, SeenTensors, row_numbers, rows_of_features, taken
from loka.sites.hooks import PassingHook
from loka.vocab import Operand

__all__ = ["Observer", "SiteObservation"]


@dataclass(slots=True)
class _Call:
    """What is known of a call when its gradient arrives.

    Attributes:
        sampled: Its input was sampled, so its gradient is; None where nobody can tell (a recomputed call).
        rows: The sampled rows; None for all of them.
        captured: What a live error needs, where this call was chosen for one.
    """

    sampled: bool | None = False
    rows: Tensor | None = None
    captured: Captured | None = None


@dataclass(slots=True)
class _SiteStep:
    """One site in one observed step.

    Attributes:
        planned: Calls in the observed step before, which share the sampled rows.
        chosen: The call that live errors are measured on.
        calls: Calls so far, recomputed ones left out.
        gradients: Gradients so far.
        weighed: The weight was looked at.
        captured: What waits for its gradient.
        taken: Something was captured in this step.
        hooked: The captured call's own output asks for a gradient.
        number: Of the observed step.
        full: Distributions are taken as well.
        before: What was known of the site when the step began, rows of calls left out; None for nothing.
        rows: Rows of the calls of this step, to how often they were seen.
        over: Gradients that arrive from now on are of no interest.
    """

    planned: int
    chosen: int
    number: int
    full: bool
    before: SiteObservation | None = None
    rows: Counter[int] = field(default_factory=Counter)
    calls: int = 0
    gradients: int = 0
    weighed: bool = False
    captured: Captured | None = None
    taken: bool = False
    hooked: bool = False
    over: bool = False

    @property
    def limit(self) -> int:
        """Rows sampled of each call."""
        return max(1, SAMPLED_ROWS // self.planned)


class Observer:
    """Hooks on the model's linears for one step at a time.

    Args:
        linears: Site name to module.
        on_captured: Called once a site and full step, with rows of input and gradient, before any optimizer
            step.
        seed: For the sample of rows.
        is_training: Says whether a forward belongs to training; evaluation between steps is left out.
        holders: Modules whose forwards are followed, so that a step which is broken off by an exception can
            begin anew.
        on_restart: Called when it does, to drop what was captured and sampled of it.
        on_sampled: Called with an operand and rows of it, whose distributions are to be added to what is
            known of it; by default they are so at once.

    Attributes:
        sites: What is known, by site.
        left_out: Site to the reason why a call of it was not looked at.
        was_broken_off: Whether the last step gave nothing because an exception ended it.
    """

    def __init__(
        self,
        linears: Mapping[str, nn.Module],
        *,
        on_captured: Callable[[str, Captured], None],
        seed: int,
        is_training: Callable[[], bool],
        holders: Iterable[nn.Module] = (),
        on_restart: Callable[[], object] = lambda: None,
        on_sampled: Callable[[OperandStatistics, Sampled], object] | None = None,
    ) -> None:
        self.sites: dict[str, SiteObservation] = {}
        self.left_out: dict[str, str] = {}
        self._linears = dict(linears)
        self._on_captured = on_captured
        self._is_training = is_training
        self._on_restart = on_restart
        self._on_sampled = on_sampled or _add_distributions
        self._broken = BrokenOff(holders, self._restart, when=is_training)
        self.was_broken_off = False
        self._seed = seed
        self._handles: list[RemovableHandle] = []
        self._now: dict[str, _SiteStep] = {}
        self._late: dict[str, _SiteStep] = {}
        self._seen = SeenTensors()
        self._step = 0
        self._full: frozenset[str] = frozenset()

    def arm(self, step: int, *, full: Collection[str] | None = None) -> None:
        """Place the hooks for the next step.

        Args:
            step: Its number.
            full: The sites of which distributions and rows for live errors are taken as well, not moments
                alone; None for all.
        """
        self._step = step
        self._full = frozenset(self._linears if full is None else full)
        self._now.clear()
        self.was_broken_off = False
        self._broken.start()
        for name, module in self._linears.items():
            hook = PassingHook(self._forward_hook(name))
            # First: a hook of the user's may change what the linear gave.
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True, prepend=True))

    @property
    def is_waiting(self) -> bool:
        """Whether gradients of a step that is over are still awaited."""
        return bool(self._late)

    def disarm(self, *, hand_over: bool = True, await_gradients: bool = False) -> None:
        """Remove the hooks; sites whose gradient never arrived hand over what they have, or drop it.

        Args:
            hand_over: Keep what the step gave.
            await_gradients: Where no gradient of the step arrived at all, its forward may have run a batch
                ahead: wait for them until `end_wait`.
        """
        self._broken.check()
        self._broken.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()
        self.was_broken_off &= not self._now
        steps, self._now = self._now, {}
        for name, now in steps.items() if hand_over else ():
            self.sites[name].calls = now.calls
        hooked = any(now.hooked for now in steps.values())
        if await_gradients and hooked and not any(now.gradients for now in steps.values()):
            self._late = steps
        else:
            self._end(steps, hand_over=hand_over)

    def forget_step(self) -> bool:
        """Whatever the step under way, or one that waits, has given or will give is of no interest.

        Returns:
            Whether the step under way had given anything.
        """
        began = bool(self._now)
        for now in (*self._now.values(), *self._late.values()):
            now.over = True
        self._now, self._late = {}, {}
        return began

    def _restart(self) -> None:
        """The step under way was broken off: take back what it gave, as if it began now."""
        steps, self._now = self._now, {}
        if not steps:
            return
        self.was_broken_off = True
        for name, now in steps.items():
            now.over = True
            rows = self.sites.pop(name).m_seen - now.rows
            if now.before is not None:
                self.sites[name] = now.before
                self.sites[name].m_seen = rows
        self._seen.clear()
        self._on_restart()

    def end_wait(self, *, hand_over: bool = True) -> None:
        """Wait no longer for the gradients of a step before; what has none is handed over, or dropped."""
        steps, self._late = self._late, {}
        self._end(steps, hand_over=hand_over)
        if steps:
            self._seen.clear()

    def _end(self, steps: Mapping[str, _SiteStep], *, hand_over: bool) -> None:
        for name, now in steps.items():
            now.over = True
            if hand_over and now.captured is not None and not is_sharded(now.captured.w):
                self._on_captured(name, now.captured)

    # --- forward --------------------------------------------------------------------------------------

    def _forward_hook(self, name: str) -> Callable[..., None]:
        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            # A copy of the model that was made while hooks were in place has copies of them.
            if module is not self._linears.get(name) or not self._handles or not self._is_training():
                return
            x = args[0] if args else kwargs["input"]
            if reason := why_not_seen(module, x, output):
                self.left_out.setdefault(name, reason)
                return
            # A recomputed forward (activation checkpointing) runs inside a backward: its input was counted.
            recomputed = torch._C._current_graph_task_id() != -1
            see = self._see_again if recomputed else self._see_input
            with torch.autocast(output.device.type, enabled=False):  # would make bf16 of our products
                call = see(name, module, x, asks=output.requires_grad)
            now = self._now.get(name)
            made = base_of(output)
            if made.grad_fn is not None and now is not None:
                # Of the node: after all hooks of the output, one of which may gather a sharded weight.
                made.grad_fn.register_prehook(self._gradient_hook(name, module, now, call, made.output_nr))

        return hook

    def _see_input(self, name: str, module: nn.Module, x: Tensor, *, asks: bool) -> _Call:
        now = self._site_step(name)
        site = self.sites[name]
        number, rows = now.calls, x.numel() // max(1, x.shape[-1])
        now.calls += 1
        site.m_seen[rows] += 1
        now.rows[rows] += 1
        if rows == 0:
            return _Call()
        self._see_weight(site, now, module)
        site.passes |= passes_of(module, x, asks=asks)
        batch = self._seen.batch(x)
        if not now.full or number >= now.planned:
            site.take(Operand.INPUT, batch, step=self._step)
            return _Call()
        sample = self._seen.sampled(
            x, limit=now.limit, generator=lambda: self._generator(name, Operand.INPUT, now, number)
        )
        site.take(Operand.INPUT, batch, step=self._step)
        self._on_sampled(site.operands[Operand.INPUT], sample)
        call = _Call(sampled=True, rows=sample.rows)
        if not now.taken and number >= now.chosen:
            now.taken, now.hooked = True, asks
            weight, passes = module.get_parameter("weight").detach(), passes_of(module, x, asks=asks)
            call.captured = now.captured = Captured(
                x=sample.values, w=weight, x_amax=batch.amax, passes=passes
            )
        return call

    def _see_again(self, name: str, module: nn.Module, x: Tensor, *, asks: bool) -> _Call:
        """A recomputed call. Where the first run was outside autograd, only this one can get a gradient.

        Which of a site's calls it is nobody can tell, so what is captured is taken from it.
        """
        now = self._now.get(name)
        if now is None or not asks:
            return _Call(sampled=None)
        passes = passes_of(module, x, asks=asks)
        self.sites[name].passes |= passes
        if now.captured is None or now.hooked:
            return _Call(sampled=None)
        x_MK = rows_of_features(x)
        rows = row_numbers(x_MK, now.limit, self._generator(name, Operand.INPUT, now, now.chosen))
        values = taken(x_MK, rows)
        amax = now.captured.x_amax if now.calls == 1 else self._seen.batch(x).amax
        now.hooked = True
        now.captured = Captured(x=values, w=now.captured.w, x_amax=amax, passes=passes)
        return _Call(sampled=True, rows=rows, captured=now.captured)

    def _see_weight(self, site: SiteObservation, now: _SiteStep, module: nn.Module) -> None:
        weight = module.get_parameter("weight")
        known = Operand.WEIGHT in site.operands
        # A weight changes slowly and is most of what there would be to read: only in its site's turn.
        if now.weighed or is_sharded(weight) or (known and not now.full):
            return
        now.weighed = True
        site.take(Operand.WEIGHT, self._seen.batch(weight), step=now.number)

    def _site_step(self, name: str) -> _SiteStep:
        now = self._now.get(name)
        if now is None:
            before = self.sites[name].snapshot() if name in self.sites else None
            site = self.sites.setdefault(name, SiteObservation())
            planned = max(1, site.calls)
            generator = site_generator(self._seed, name, f"call/{self._step}")
            chosen = int(torch.randint(planned, (), generator=generator)) if planned > 1 else 0
            now = self._now[name] = _SiteStep(planned, chosen, self._step, name in self._full, before)
        return now

    def _generator(self, name: str, operand: Operand, now: _SiteStep, number: int) -> torch.Generator:
        return site_generator(self._seed, name, f"rows/{operand}/{now.number}/{number}")

    # --- backward -------------------------------------------------------------------------------------

    def _gradient_hook(
        self, name: str, module: nn.Module, now: _SiteStep, call: _Call, place: int
    ) -> Callable[[tuple[Tensor, ...]], None]:
        @torch.no_grad()
        def hook(grads: tuple[Tensor | None, ...]) -> None:
            grad = grads[place]
            if now.over or grad is None or grad.numel() == 0:  # a backward that nobody waits for
                return
            self._broken.backward_runs()
            if not has_weight(module):
                return
            with torch.autocast(grad.device.type, enabled=False):
                self._see_gradient(name, module, grad, now, call)

        return hook

    def _see_gradient(self, name: str, module: nn.Module, grad: Tensor, now: _SiteStep, call: _Call) -> None:
        site, number = self.sites[name], now.gradients
        now.gradients += 1
        self._see_weight(site, now, module)
        batch = self._seen.batch(grad)
        sampled = number < now.planned if call.sampled is None else call.sampled
        if not now.full or not sampled:
            site.take(Operand.GRAD_OUTPUT, batch, step=now.number)
            return
        g_MN = rows_of_features(grad)
        rows = call.rows
        if call.sampled is None:
            rows = row_numbers(g_MN, now.limit, self._generator(name, Operand.GRAD_OUTPUT, now, number))
        sample = Sampled.of(g_MN, rows)
        site.take(Operand.GRAD_OUTPUT, batch, step=now.number)
        self._on_sampled(site.operands[Operand.GRAD_OUTPUT], sample)
        captured = call.captured
        if captured is None or now.captured is not captured:
            return
        captured.g, captured.g_amax = sample.values, batch.amax
        weight = module.get_parameter("weight")
        if not is_sharded(weight):
            captured.w = weight.detach()  # one that is sharded outside of backward has its memory only now
        # Now, not at the end of the step: the optimizer changes the weight in between.
        now.captured = None
        self._on_captured(name, captured)


def _add_distributions(known: OperandStatistics, sample: Sampled) -> None:
    known.take_distributions(*sample.distributions())
