"""Weights that are cast once: for evaluation, and for the micro-batches of one optimizer step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from loka.planned.fixed import check_unchanged, fixed_weight
from loka.planned.linear import PlannedLinear

__all__ = ["weights_fixed"]


@contextlib.contextmanager
def weights_fixed(model: nn.Module) -> Iterator[None]:
    """Cast every planned weight once, not in every forward; no weight may change meanwhile.

    For evaluation and serving, and for the forwards and backwards of one optimizer step where gradients are
    accumulated. Both orientations of each weight stay in memory: two bytes an element. A model without a plan
    runs as ever. Blocks may be nested: the outer one decides.

    Args:
        model: With a plan, compiled or not. A compiled one is compiled again when the block is first entered.

    Raises:
        UsageError: in a forward, or when the block ends, if a weight was written to or replaced since. What
            is written through `weight.data` in place torch does not count, and is not seen.

    Example:
        >>> with loka.weights_fixed(model), torch.no_grad():
        ...     for batch in loader:
        ...         evaluate(model, batch)
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PlannedLinear) and module.fixed is None
    }
    before = {}
    try:
        for name, module in linears.items():
            module.fixed = fixed_weight(module.weight, module.routes)
            before[name] = module.fixed
        yield
        for name, fixed in before.items():
            check_unchanged(linears[name].weight, fixed, site=name)
    finally:
        for name in before:
            if isinstance(linears[name], PlannedLinear):
                linears[name].fixed = None
