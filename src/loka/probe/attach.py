"""To what Probe is attached, what changed since, and why there was nothing to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from loka.errors import UsageError
from loka.planned import is_planned
from loka.probe.observation import SiteObservation
from loka.sites import plannable_linears, why_not_plannable
from loka.sites.discover import module_names
from loka.sites.reasons import NOT_REACHED
from loka.vocab import Operand, Site

__all__ = [
    "Changes",
    "changes_between",
    "check_learned_of_state",
    "check_sites_of_state",
    "device_of_linears",
    "devices_of",
    "not_reached_anymore",
    "nothing_observed",
    "nothing_to_observe",
    "observable_linears",
    "observable_sites",
    "shape_of",
    "unwrapped",
]

_SHOWN = 12


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile` and DistributedDataParallel, whose names a plan goes by."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module) and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def observable_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Site name to every nn.Linear that could be planned, or could before its weight was sharded (FSDP2)."""
    sharded = {
        name: module
        for module, name in module_names(model).items()
        if type(module) is nn.Linear and _is_sharded(module)
    }
    return plannable_linears(model) | sharded


def _is_sharded(module: nn.Linear) -> bool:
    """A DTensor stands where the Parameter was; in the forward a plain Parameter takes its place."""
    weight: Tensor | None = module._parameters.get("weight")
    return weight is not None and type(weight) is not nn.Parameter and hasattr(weight, "full_tensor")


def observable_sites(sites: Sequence[Site], linears: Mapping[str, nn.Module]) -> list[Site]:
    """The sites, those that are observed marked as such: a weight's sharding is no property of the model."""
    return [
        replace(s, not_planned="") if s.kind == "linear" and s.name in linears and s.rows else s
        for s in sites
    ]


@dataclass(frozen=True, slots=True)
class Changes:
    """How a model differs from what Probe was attached to.

    Attributes:
        text: What changed, in one sentence.
        stale: Sites whose statistics belong to a linear of another shape, or to none.
    """

    text: str
    stale: frozenset[str]


def changes_between(
    old: Mapping[str, nn.Linear], new: Mapping[str, nn.Linear], shapes: Mapping[str, tuple[int, int]]
) -> Changes | None:
    """What was added, replaced, removed or given another shape; None where nothing was.

    Args:
        old: The linears that were known.
        new: Those of now.
        shapes: Of the old ones, (N, K), when they were taken: a module may be given another weight.
    """
    added = sorted(new.keys() - old.keys())
    removed = sorted(old.keys() - new.keys())
    both = sorted(old.keys() & new.keys())
    replaced = [name for name in both if old[name] is not new[name]]
    reshaped = [name for name in both if old[name] is new[name] and shape_of(new[name]) != shapes[name]]
    if not (added or removed or replaced or reshaped):
        return None
    stale = {name for name in replaced if shape_of(new[name]) != shapes[name]} | {*removed, *reshaped}
    happened = {
        "added": added,
        "replaced": replaced,
        "removed": removed,
        "given a weight of another shape": reshaped,
    }
    parts = [
        f"{_listed(names)} {'was' if len(names) == 1 else 'were'} {what}"
        for what, names in happened.items()
        if names
    ]
    text = f"after Probe was attached {', '.join(parts)}"
    return Changes(text, frozenset(stale))


def shape_of(linear: nn.Linear) -> tuple[int, int]:
    """(N, K) of the weight, which tells more than the module's own numbers where somebody put another in."""
    weight: Tensor | None = linear._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return linear.out_features, linear.in_features
    return weight.shape[0], weight.shape[1]


def not_reached_anymore(site: Site, linear: nn.Linear) -> Site:
    """A site that was found, now that its linear has a weight of another shape."""
    n, k = shape_of(linear)
    return replace(site, n=n, k=k, bias=linear.bias is not None, rows=0, calls=0, not_planned=NOT_REACHED)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def nothing_to_observe(model: nn.Module) -> UsageError:
    """Why Probe cannot be attached to a model."""
    name = type(model).__name__
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if any(is_planned(module) for _, module in linears):
        return UsageError(
            f"{name} carries a plan, so there is nothing to observe", hint="call `loka.revert(model)` first"
        )
    if linears:
        return UsageError(
            f"no nn.Linear of {name} can be planned, so there is nothing to observe",
            lines=[f"{n or name}  {why_not_plannable(module)}" for n, module in linears[:_SHOWN]],
            hint="`loka.find_sites` lists every product with its reason",
        )
    return UsageError(
        f"{name} has no nn.Linear, so there is nothing to observe",
        hint="attach Probe before wrappers that hide the modules",
    )


def nothing_observed(*, seen: int, every: int, ran: Mapping[bool, bool], found: bool) -> UsageError:
    """Why no step was observed.

    Args:
        seen: Steps that `step()` was told of.
        every: Steps between observed ones.
        ran: Whether a linear of the model was called, in training mode (True) and in evaluation mode (False).
        found: Whether the sites were found.
    """
    if seen == 0:
        called = "though the model ran" if any(ran.values()) or found else "and the model never ran either"
        return UsageError(
            f"no step was observed: `step()` was never called in Probe's `with` block, {called}",
            hint="call `probe.step()` after each optimizer step",
        )
    if not found and ran.get(False) and not ran.get(True):
        return UsageError(
            f"no step was observed: in {seen} steps the model that Probe was given ran in evaluation mode "
            "only",
            hint="call `model.train()` before the loop; evaluation between steps is left out",
        )
    if not found and ran.get(True):
        return UsageError(
            f"no step was observed: in {seen} steps the linears that ran were given nothing to look at",
            hint="inputs that are nested, sparse or inside a function transform such as vmap are left out",
        )
    if not found:
        return UsageError(
            f"no step was observed: in {seen} steps no linear of the model that Probe was given was called",
            hint="give Probe the very module that the loop calls, not a copy of it, and call it as a module",
        )
    return UsageError(
        f"no step was observed in {seen} steps with every={every}",
        hint="train longer, or observe more often with a smaller `every`",
    )


def check_sites_of_state(sites: Sequence[Site], linears: Mapping[str, nn.Linear]) -> None:
    """Refuse a saved state of another model.

    Raises:
        UsageError: listing the sites that the model lacks, or has in another shape.
    """
    lines = []
    for site in sites:
        if not site.plannable or not site.rows:
            continue
        linear = linears.get(site.name)
        if linear is None:
            lines.append(f"{site.name}  not a linear of this model that can be planned")
        elif shape_of(linear) != (site.n, site.k):
            here = "x".join(map(str, shape_of(linear)))
            lines.append(f"{site.name}  N x K is {here} here, {site.n}x{site.k} in the state")
    if lines:
        raise UsageError(
            "the saved state of Probe is of another model", lines=lines[:_SHOWN], hint="probe this model anew"
        )


def check_learned_of_state(learned: Mapping[str, SiteObservation], linears: Mapping[str, nn.Linear]) -> None:
    """Refuse statistics of other features than the model's linears of these names have.

    Raises:
        UsageError: listing them.
    """
    lines = []
    for name, known in learned.items():
        n, k = shape_of(linears[name]) if name in linears else (0, 0)
        wanted = {Operand.INPUT: k, Operand.WEIGHT: k, Operand.GRAD_OUTPUT: n}
        lines += [
            f"{name}  {operand} has {wanted[operand]} features here, {found} in the state"
            for operand, of in known.operands.items()
            if name in linears and (found := of.moments.mean.numel()) != wanted[operand]
        ]
    if lines:
        raise UsageError(
            "the saved state of Probe is of another model", lines=lines[:_SHOWN], hint="probe this model anew"
        )


def devices_of(linears: Mapping[str, nn.Linear]) -> dict[str, torch.device]:
    """Where each of them lives; one whose weight is computed meanwhile is left out."""
    weights = {name: linear._parameters.get("weight") for name, linear in linears.items()}
    return {name: weight.device for name, weight in weights.items() if weight is not None}


def device_of_linears(linears: Mapping[str, nn.Linear]) -> torch.device:
    """Where the first of them lives."""
    return next(iter(linears.values())).get_parameter("weight").device
