"""A linear layer whose three products each run on the kernel that the plan names.

Shapes: x [..., K], w_NK, bias_N, y [..., N]; M is the product of x's leading dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from loka.artifacts.plan import SitePlan
from loka.errors import UsageError
from loka.planned.fixed import FixedWeight, check_unchanged
from loka.planned.function import planned_product
from loka.planned.routes import Route, Routes

__all__ = ["PlannedLinear", "compute_dtype_of"]


class PlannedLinear(nn.Linear):
    """nn.Linear with a plan: same parameters, names, state_dict, autocast rules and shapes.

    Made of an nn.Linear in place by `loka.planned.swap_in`, never constructed. Weights are cast in every
    forward, so nothing can go stale, but within `loka.weights_fixed`.

    Attributes:
        site_plan: What was planned for this site.
        routes: The same with kernels looked up.
        fixed: The weight as it was cast within `loka.weights_fixed`; None elsewhere.
    """

    site_plan: SitePlan
    routes: Routes
    fixed: FixedWeight | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
        """Multiply as nn.Linear does: y = input @ weight.T + bias.

        Args:
            input: [..., K], any stride, any leading dimensions, also none or empty.

        Returns:
            [..., N] in the autocast dtype under autocast, else in the input's dtype.

        Raises:
            UsageError: for another last dimension than K, or dtypes that nn.Linear would refuse.
        """
        N, K = self.weight.shape
        if input.dim() == 0 or input.shape[-1] != K:
            raise UsageError(f"`{self.site_plan.name}` takes [..., {K}], got shape {list(input.shape)}")
        if input.numel() == 0 or self.weight.numel() == 0:
            return nn.functional.linear(input, self.weight, self.bias)  # nothing to multiply
        compute_dtype = compute_dtype_of(input, self.weight, site=self.site_plan.name)
        M = math.prod(input.shape[:-1])
        y_MN = planned_product(
            input.reshape(M, K),
            self.weight,
            self.bias,
            routes=self.routes.for_rows(M),
            compute_dtype=compute_dtype,
            fixed=self.fixed_for_rows(M),
        )
        return y_MN.view(*input.shape[:-1], N)

    def fixed_for_rows(self, rows: int) -> tuple[Tensor | None, ...]:
        """What is fixed of the weight for M = rows, see `weight_for`; empty elsewhere.

        Raises:
            UsageError: where the weight was written to since it was cast (compiled code does not look).
        """
        if self.fixed is None:
            return ()
        if not torch.compiler.is_compiling():
            check_unchanged(self.weight, self.fixed, site=self.site_plan.name)
        fwd, dgrad, _ = self.routes.places(rows)
        return self.fixed.at(fwd, dgrad)

    def extra_repr(self) -> str:
        """nn.Linear's, then what runs each pass."""
        passes = ", ".join(f"{name}={_shown(routes)}" for name, routes in self.routes._asdict().items())
        return f"{super().extra_repr()}, {passes}"


def compute_dtype_of(
    x: Tensor, weight: Tensor, *, site: str, dtype: torch.dtype | None = None
) -> torch.dtype:
    """The dtype in which nn.Linear would multiply: autocast's if it is on, else the input's.

    Autocast leaves float64 alone, as it does for nn.Linear.

    Args:
        x: The input.
        weight: Of the linear.
        site: Its name, for the error.
        dtype: What the input will have been made by then; by default x's own.

    Raises:
        UsageError: where the dtypes of input and weight would differ.
    """
    device = x.device.type
    given = x.dtype if dtype is None else dtype
    dtypes = [given, weight.dtype]
    if torch.is_autocast_enabled(device):
        autocast_dtype = torch.get_autocast_dtype(device)
        dtypes = [autocast_dtype if d.is_floating_point and d != torch.float64 else d for d in dtypes]
    if dtypes[0] != dtypes[1]:
        raise UsageError(
            f"`{site}` got an input of {given} for a weight of {weight.dtype}",
            hint="convert one of them, or run under torch.autocast",
        )
    return dtypes[0]


def _shown(routes: tuple[Route, ...]) -> str:
    parts = []
    for route in routes:
        bound = "" if route.m_below is None else f"M<{route.m_below}: "
        recipe = f"[{route.a.recipe_key}*{route.b.recipe_key}]" if route.a.is_quantized else ""
        parts.append(f"{bound}{route.kernel.name}{recipe}")
    return " | ".join(parts)
