"""Dispatch: from a profile to a plan, and from a plan to a running model."""

from loka.dispatch.convert import apply_plan, revert
from loka.dispatch.planner import make_plan

__all__ = ["apply_plan", "make_plan", "revert"]
