"""The weight of a planned linear, cast once for as long as it does not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.kernels import cast
from loka.numerics import Quantized
from loka.planned.routes import Route, Routes

__all__ = ["FixedWeight", "check_unchanged", "fixed_weight"]


class FixedWeight(NamedTuple):
    """The weight of a planned linear as its products take it, an entry for each range of M.

    Attributes:
        fwd: For the forward; None where that is not quantized.
        dgrad: For the input's gradient.
        version: Of the weight when it was cast; -1 where torch counts none.
        pointer: Where its memory lay then.
    """

    fwd: tuple[Quantized | None, ...]
    dgrad: tuple[Quantized | None, ...]
    version: int
    pointer: int

    def at(self, fwd: int, dgrad: int) -> tuple[Tensor | None, ...]:
        """Values and scales of both, for the routes at these places."""
        chosen = (self.fwd[fwd], self.dgrad[dgrad])
        return tuple(t for made in chosen for t in ((None, None) if made is None else made[:2]))


def fixed_weight(weight: Tensor, routes: Routes) -> FixedWeight:
    """A weight [N, K] cast for every route of fwd and dgrad; equal specs share a cast."""
    fwd, dgrad = routes.fwd, routes.dgrad
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        specs = tuple(route.b for route in (*fwd, *dgrad) if route.b.is_quantized)
        made = iter(cast(weight.detach(), specs))
    first, second = (tuple(_next(made, route) for route in some) for some in (fwd, dgrad))
    # Both orientations may share a scale, and torch's compiler takes no tensor twice into one function.
    own = tuple(None if q is None else q._replace(scale=q.scale.clone()) for q in second)
    return FixedWeight(first, own, _version_of(weight), weight.data_ptr())


def _next(made: Iterator[Quantized], route: Route) -> Quantized | None:
    return next(made) if route.b.is_quantized else None


def _version_of(weight: Tensor) -> int:
    """How often a tensor was written to; -1 for one of inference mode, which torch does not count for."""
    return -1 if weight.is_inference() else weight._version


def check_unchanged(weight: Tensor, fixed: FixedWeight, *, site: str) -> None:
    """Raise UsageError where the weight was written to or replaced since."""
    if (_version_of(weight), weight.data_ptr()) != (fixed.version, fixed.pointer):
        raise UsageError(
            f"the weight of `{site}` was changed within loka.weights_fixed",
            hint="step the optimizer outside of the block, and enter it anew",
        )
