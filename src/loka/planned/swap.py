"""Turning an nn.Linear into a planned one and back, in place.

Only the class changes: the module, its hooks, Parameters, buffers, training flag and names stay the very
objects they were, so optimizers, tied weights and checkpoints do not notice.
"""

from __future__ import annotations

from torch import nn

from loka.artifacts.plan import SitePlan
from loka.errors import PlanMismatchError, UsageError
from loka.planned.linear import PlannedLinear
from loka.planned.routes import routes_of
from loka.sites import why_not_plannable

__all__ = ["is_planned", "swap_in", "swap_out", "why_not_revertible"]


def is_planned(module: nn.Module) -> bool:
    """True for a module that `swap_in` has changed."""
    return isinstance(module, PlannedLinear)


def swap_in(module: nn.Linear, site_plan: SitePlan) -> None:
    """Make an nn.Linear run by its plan, in place. `swap_out` undoes it exactly.

    Raises:
        UsageError: for a module that is planned already, or is no plain nn.Linear.
        PlanMismatchError: for a plan of another shape.
        ArtifactError: for a plan whose bounds on M do not rise.
        UnknownNameError: for a kernel that does not exist.
    """
    if is_planned(module):
        raise UsageError(f"`{site_plan.name}` is planned already", hint="revert it first")
    if reason := why_not_plannable(module):
        raise UsageError(f"`{site_plan.name}` cannot be planned: {reason}")
    shape = (module.out_features, module.in_features, module.bias is not None)
    planned = (site_plan.n, site_plan.k, site_plan.bias)
    if shape != planned:
        raise PlanMismatchError(
            f"the plan of `{site_plan.name}` has (N, K, bias) = {planned}, the module has {shape}"
        )
    routes = routes_of(site_plan)
    module.__class__ = PlannedLinear
    module.site_plan = site_plan  # type: ignore[assignment]
    module.routes = routes  # type: ignore[assignment]


def why_not_revertible(module: nn.Module) -> str:
    """Why `swap_out` would undo more than the plan; empty for any module that it can or need not change."""
    if isinstance(module, PlannedLinear) and type(module) is not PlannedLinear:
        return f"it was made a {type(module).__name__} after the plan was applied"
    return ""


def swap_out(module: nn.Module) -> None:
    """Make a planned module the nn.Linear it was, in place; any other module is left alone.

    Raises:
        UsageError: for a planned module whose class was changed since (a parametrization, a sharding).
    """
    if reason := why_not_revertible(module):
        raise UsageError(f"a planned linear cannot be reverted: {reason}", hint="undo that first")
    if isinstance(module, PlannedLinear):
        module.__dict__.pop("fixed", None)
        del module.site_plan, module.routes
        module.__class__ = nn.Linear  # type: ignore[assignment]
