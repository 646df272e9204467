"""Probe: know what low precision costs each product before switching."""

from loka.probe.session import Probe
from loka.probe.step_profile import StepProfiler, shares_of

__all__ = ["Probe", "StepProfiler", "shares_of"]
