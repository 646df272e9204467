"""The public verbs and nouns, gathered."""

from __future__ import annotations

from loka.artifacts import Plan, Profile
from loka.artifacts import read_plan as load_plan
from loka.artifacts import read_profile as load_profile
from loka.dispatch import apply_plan, make_plan, revert
from loka.probe import Probe
from loka.sites import find_sites
from loka.vocab import Recipe, Requirement, Site

__all__ = [
    "Plan",
    "Probe",
    "Profile",
    "Recipe",
    "Requirement",
    "Site",
    "apply_plan",
    "find_sites",
    "load_plan",
    "load_profile",
    "make_plan",
    "revert",
]
