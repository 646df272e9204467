"""LoKA: FP8 that pays for large recommendation models.

The public names are loaded when first used, so that importing the package is cheap and touches no GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Plan": "loka.api",
    "Probe": "loka.api",
    "Profile": "loka.api",
    "Recipe": "loka.api",
    "Requirement": "loka.api",
    "Site": "loka.api",
    "apply_mods": "loka.api",
    "apply_plan": "loka.api",
    "find_sites": "loka.api",
    "load_plan": "loka.api",
    "load_profile": "loka.api",
    "make_plan": "loka.api",
    "revert": "loka.api",
    "weights_fixed": "loka.api",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name == "mods":
        return import_module("loka.mods")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'loka' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
