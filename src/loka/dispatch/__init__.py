"""Dispatch: from a profile to a plan, and from a plan to a running model."""

from loka.dispatch.convert import apply_plan, revert
from loka.dispatch.explain import plan_changes, plan_flop_shares, render_diff, render_plan
from loka.dispatch.planner.checks import validate_plan
from loka.dispatch.planner.make_plan import make_plan

__all__ = [
    "apply_plan",
    "make_plan",
    "plan_changes",
    "plan_flop_shares",
    "render_diff",
    "render_plan",
    "revert",
    "validate_plan",
]
