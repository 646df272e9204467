"""What makes two models the same to a plan, and the lines that show where they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import msgspec

from loka.artifacts.profile import Fingerprint
from loka.vocab import Site

__all__ = ["explain_difference", "fingerprint"]

_SHOWN = 12


class _Named(Protocol):
    """What a SitePlan and a Site have in common."""

    @property
    def name(self) -> str: ...

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def bias(self) -> bool: ...


def fingerprint(sites: Sequence[Site], parameters: int, mods: Sequence[str] = ()) -> Fingerprint:
    """The fingerprint of a model: rows and calls do not enter, so another batch size is the same model.

    Args:
        sites: Every site of the model, functional ones included, in any order.
        parameters: Number of parameters of the model.
        mods: Names of the mods in it, sorted.
    """
    rows = sorted((s.name, s.kind, s.n, s.k, s.bias) for s in sites)
    digest = hashlib.sha256(msgspec.json.encode(rows)).hexdigest()
    return Fingerprint(sites=digest, parameters=parameters, mods=tuple(mods))


def explain_difference(plan_sites: Sequence[_Named], model_sites: Sequence[_Named]) -> list[str]:
    """A line for each site that is missing, added or of another shape; empty where all agree.

    Args:
        plan_sites: The sites of the plan (`plan.sites`).
        model_sites: The plannable sites of the model.
    """
    planned = {s.name: s for s in plan_sites}
    found = {s.name: s for s in model_sites}
    lines = [f"{name}  only in the plan, {_shape(s)}" for name, s in planned.items() if name not in found]
    lines += [f"{name}  only in the model, {_shape(s)}" for name, s in found.items() if name not in planned]
    lines += [
        f"{name}  plan {_shape(s)}, model {_shape(found[name])}"
        for name, s in planned.items()
        if name in found and _shape(s) != _shape(found[name])
    ]
    if len(lines) > _SHOWN:
        lines = [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more"]
    return lines


def _shape(site: _Named) -> str:
    return f"N={site.n} K={site.k} {'with' if site.bias else 'without'} bias"
