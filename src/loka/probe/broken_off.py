"""Whether a forward or a backward of an observed step ended in an exception that the loop caught.

A loop that runs out of memory may try the step again with fewer rows. What the broken try multiplied was
never trained on, so the step is then observed as if it began anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from loka.sites.hooks import PassingHook

__all__ = ["BrokenOff", "holders_of"]


def holders_of(model: nn.Module, linears: Iterable[nn.Module]) -> list[nn.Module]:
    """The model and every module that holds one of the linears, the linears left out."""
    wanted = {id(linear) for linear in linears}
    prefixes = {""}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in wanted:
            parts = name.split(".")
            prefixes |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    modules = dict(model.named_modules(remove_duplicate=False))
    return list({id(modules[name]): modules[name] for name in sorted(prefixes)}.values())


class BrokenOff:
    """Follows the outermost forwards of a model, and the backwards that reach it.

    An exception that a module of the model catches itself is none. A forward inside a backward (activation
    checkpointing ends one by an exception) is left out; the backward around it counts.

    Args:
        holders: The modules whose forwards are followed, as `holders_of` gives them.
        on_broken: Called as soon as it is known: for a forward at once, for a backward when the loop runs
            the model again or `check` is called.
        when: Asked at every forward whether it is followed.
    """

    def __init__(
        self,
        holders: Iterable[nn.Module],
        on_broken: Callable[[], object],
        *,
        when: Callable[[], bool] = lambda: True,
    ) -> None:
        self._holders = list(holders)
        self._on_broken, self._when = on_broken, when
        self._stack: list[nn.Module] = []
        self._before: BaseException | None = None  # what the loop was handling when the outermost began
        self._backwards: set[int] = set()
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Follow the next step."""
        self._stack.clear()
        self._backwards.clear()
        enter, leave = PassingHook(self._enter), PassingHook(self._leave)
        for module in self._holders:
            self._handles += [
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            ]

    def stop(self) -> None:
        """Follow no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def backward_runs(self) -> None:
        """To be called within a backward; it is broken unless it comes to its end."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._backwards:
            return
        backwards = self._backwards  # not self: a step later it is another set
        backwards.add(task)
        # Of the engine, as DistributedDataParallel uses it: called once the whole backward is through.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: backwards.discard(task))

    def check(self) -> None:
        """Outside of every backward: one that began and did not end was broken off."""
        if self._backwards and torch._C._current_graph_task_id() == -1:
            self._backwards = set()
            self._on_broken()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if not self._stack:
            self._before = sys.exc_info()[1]
            self.check()
        if self._when():
            self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if module not in self._stack or torch._C._current_graph_task_id() != -1:
            return
        while self._stack.pop() is not module:
            pass
        raised = sys.exc_info()[1]
        if not self._stack and out is None and raised is not None and raised is not self._before:
            self._on_broken()
