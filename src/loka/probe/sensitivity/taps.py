"""What every linear of a model saw in one forward, and the gradient that came back to its output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Call", "Taps"]


@dataclass(slots=True)
class Call:
    """One call of a linear.

    Attributes:
        site: Its name; empty for a linear that nobody asked about.
        x: The input as it came.
        y: The output, as the product gave it.
        out: What the model goes on with: equal to y.
        arrived: Where the backward puts the gradient of y. Not the call itself: the graph of `out` would
            hold the call that holds `out`, and nothing of a batch would ever be freed.
    """

    site: str
    x: Tensor
    y: Tensor
    out: Tensor
    arrived: list[Tensor] = field(default_factory=list)

    @property
    def g(self) -> Tensor | None:
        """Gradient of the summed losses with respect to y; None until it arrived, or where none does."""
        return self.arrived[0] if self.arrived else None


@dataclass(slots=True)
class Taps:
    """Records the calls of linears while `listening`.

    Attributes:
        calls: In the order of the forward.
        anchor: A leaf that every recorded output depends on: differentiating by it makes every gradient
            arrive, and computes no gradient of a weight.
    """

    linears: Mapping[str, nn.Linear]
    calls: list[Call] = field(default_factory=list)
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    _open: bool = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record what runs inside the block. Forwards that a backward runs again are not recorded twice."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    @contextlib.contextmanager
    def placed(self, model: nn.Module) -> Iterator[None]:
        """Hooks on the sites, and on every linear with one output (it may be the logit)."""
        names = {module: name for name, module in self.linears.items()}
        others = [
            m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 1 and m not in names
        ]
        handles = [
            module.register_forward_hook(self._hook(names.get(module, "")), with_kwargs=True, prepend=True)
            for module in (*names, *others)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, site: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Any:
            if not self._open:
                return None
            x = args[0] if args else kwargs["input"]
            call = Call(site, x.detach(), y.detach(), y)
            call.out = _Tap.apply(y, self.anchor, call.arrived)  # type: ignore[no-untyped-call]
            self.calls.append(call)
            return call.out

        return hook


class _Tap(torch.autograd.Function):
    """The identity, as a copy (the model may write into what it gets), that keeps the gradient it passes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor, arrived: list[Tensor]) -> Tensor:
        ctx.arrived = arrived
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        ctx.arrived[:] = [g.detach()]
        return g, torch.zeros(()), None
