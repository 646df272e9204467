"""The public verbs and nouns, gathered."""

from __future__ import annotations

import os

from loka.artifacts import Plan, Profile, read_plan
from loka.artifacts import read_profile as load_profile
from loka.dispatch import apply_plan, make_plan, revert, validate_plan
from loka.mods import apply_mods
from loka.planned import weights_fixed
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
    "apply_mods",
    "apply_plan",
    "find_sites",
    "load_plan",
    "load_profile",
    "make_plan",
    "revert",
    "weights_fixed",
]


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan, and check what a hand may have edited in it.

    Raises:
        ArtifactError: for a file that is no plan, or bounds on M and specs that no kernel takes.
        UnknownNameError: for a kernel that does not exist.
    """
    plan = read_plan(path)
    validate_plan(plan, where=str(path))
    return plan
