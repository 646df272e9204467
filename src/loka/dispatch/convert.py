"""A model and a plan in, the same model running by the plan; and back.

Shapes: N output features, K input features of a site; M is the number of rows of a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from loka.artifacts.fingerprint import explain_difference, fingerprint
from loka.artifacts.plan import Choice, Plan, SitePlan
from loka.dispatch.warm_up import choice_problem, warm_up
from loka.errors import PlanMismatchError, UsageError
from loka.kernels import HIGH_PRECISION, Kernel, device_of, emulated_twin, kernel, usable
from loka.kernels.gpu_casts import load_casts
from loka.planned import (
    is_chain,
    is_high_precision,
    is_planned,
    link,
    routes_of,
    swap_in,
    swap_out,
    unlink,
    why_not_revertible,
)
from loka.sites import why_not_plannable
from loka.sites.mods import mods_of
from loka.vocab import Device, Pass, Site

__all__ = ["apply_plan", "revert"]

_log = logging.getLogger("loka")
_MANY_ROWS = 4096  # stands for an M without an upper bound when kernels are asked what they support


def apply_plan(
    model: nn.Module, plan: Plan, *, emulate: bool = False, sites: Sequence[Site] | None = None
) -> nn.Module:
    """Make the model run by the plan, in place.

    Modules, Parameters, names and state_dict stay what they are, so an optimizer made before still works. A
    site whose three passes are bf16 stays the untouched nn.Linear. Everything is checked before anything is
    changed. On a GPU every planned product is first run on zeros, so that no kernel compiles in a step.
    Weights on the meta device are taken to be meant for the plan's device.

    Args:
        model: Not compiled, not planned yet.
        plan: As the planner or a file gives it.
        emulate: Replace every kernel by its emulated twin, to run a plan that was made for other hardware.
        sites: The model's sites as `find_sites` gives them; with them products that are not nn.Linears are
            compared as well, and kernels compile for the M that they tell. Without, the plan is held against
            the names and shapes of the nn.Linears, and 4,096 rows stand for an M that nothing tells.

    Returns:
        The same model.

    Raises:
        UsageError: for a model that is planned or compiled already.
        PlanMismatchError: for a plan of another model, another GPU architecture, or with a kernel that
            cannot run here.
        ArtifactError: for bounds on M that do not rise.
        UnknownNameError: for a kernel that does not exist.
    """
    _check_order(model)
    _check_model(model, plan, sites)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    planned = [_emulated(site) if emulate else site for site in plan.sites]
    switched = [site for site in planned if not is_high_precision(site)]
    _check_machine([linears[site.name] for site in switched], plan, switched)
    for site in switched:
        routes_of(site)  # raises here, while nothing is changed
    _compile_ahead(linears, switched, sites or ())
    for site in switched:
        swap_in(linears[site.name], site)
        _log.debug("%s: %s; ban a kernel with Requirement(deny=...)", site.name, _kernels_of(site))
    _link_chains(model)
    _log.info("plan applied: %d of %d sites switched", len(switched), len(plan.sites))
    return model


def revert(model: nn.Module) -> nn.Module:
    """Take the plan off the model again, in place and exactly; a model without one is left alone.

    Raises:
        UsageError: for a planned module whose class was changed since; nothing is changed then.
    """
    lines = [
        f"{name}  {reason}"
        for name, module in model.named_modules()
        if (reason := why_not_revertible(module))
    ]
    if lines:
        raise UsageError(
            "the plan cannot be taken off: modules were changed after it was applied",
            lines=lines[:12],
            hint="undo those changes first, for example with `parametrize.remove_parametrizations`",
        )
    for module in model.modules():
        unlink(module)
        swap_out(module)
    return model


def _link_chains(model: nn.Module) -> None:
    """Where a block norm and a planned linear adjoin in an nn.Sequential, FP8 is handed on."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential) and is_chain(module):
            link(module)
            _log.debug("%s: planned linears and block norms run as one", name)


def _check_order(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_planned(module):
            raise UsageError(
                f"the model carries a plan already (at `{name}`)", hint="call `loka.revert(model)` first"
            )
        if "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None:
            raise UsageError(
                f"the module `{name or type(module).__name__}` is compiled already",
                hint="apply the plan first, then call torch.compile",
            )


def _check_model(model: nn.Module, plan: Plan, sites: Sequence[Site] | None) -> None:
    lines = explain_difference(plan.sites, _linears_known_to(plan, model))
    modules = dict(model.named_modules())
    for site in plan.sites:
        module = modules.get(site.name)
        if isinstance(module, nn.Linear) and (reason := why_not_plannable(module)):
            lines.append(f"{site.name}  cannot be planned: {reason}")
    mods = mods_of(model)
    for where, more in (
        ("plan", set(plan.model.mods) - set(mods)),
        ("model", set(mods) - set(plan.model.mods)),
    ):
        if more:
            lines.append(f"mods  only in the {where}: {', '.join(sorted(more))}")
    if sites is not None and not lines and fingerprint(sites, plan.model.parameters, mods) != plan.model:
        known = {site.name for site in plan.sites} | set(plan.unplanned)
        found = {site.name for site in sites}
        lines += [f"{name}  only in the plan" for name in sorted(known - found)]
        lines += [f"{name}  only in the model" for name in sorted(found - known)]
        lines = lines or ["a product that is not an nn.Linear has another shape or kind"]
    if lines:
        raise PlanMismatchError(
            "the plan was made for another model",
            lines=lines,
            hint="probe this model and make a plan for it, or apply the mods that the plan names",
        )


def _linears_known_to(plan: Plan, model: nn.Module) -> list[Site]:
    """The model's nn.Linears as sites, without those that the plan lists as not planned."""
    return [
        Site(
            name=name,
            kind="linear",
            n=module.out_features,
            k=module.in_features,
            bias=module.bias is not None,
            rows=0,
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in plan.unplanned
    ]


def _check_machine(modules: Sequence[nn.Linear], plan: Plan, site_plans: Sequence[SitePlan]) -> None:
    """Raise unless every kernel can run where its module's weight lies."""
    lines: list[str] = []
    devices: dict[torch.device, Device] = {}
    for module, site in zip(modules, site_plans, strict=True):
        where = module.weight.device
        if where not in devices:
            devices[where] = plan.device if where.type == "meta" else device_of(where)
        lines += _unsupported(site, devices[where])
    real = [k for site in site_plans for k in _kernels_of(site) if not _runs_anywhere(kernel(k))]
    others = {d.name: d for d in devices.values() if (d.type, d.arch) != (plan.device.type, plan.device.arch)}
    if real and others:
        found = ", ".join(f"{d.name} ({d.sm})" for d in others.values())
        raise PlanMismatchError(
            f"the plan is for {plan.device.name} ({plan.device.sm}), the model lies on {found}",
            lines=lines[:12],
            hint="make a plan for this device, or run the plan with `apply_plan(..., emulate=True)`",
        )
    if lines:
        raise PlanMismatchError(
            f"the plan names {len(lines)} products that their kernels cannot run here",
            lines=lines[:12],
            hint="make the plan anew with `loka.make_plan`, or run it with `apply_plan(..., emulate=True)`",
        )


def _unsupported(site: SitePlan, device: Device) -> list[str]:
    lines = []
    for pass_ in Pass:
        lowest = 1
        for choice in site.choices(pass_):
            highest = max(lowest, _MANY_ROWS) if choice.m_below is None else max(lowest, choice.m_below - 1)
            for rows in dict.fromkeys((lowest, highest)):
                if problem_line := _trouble(site, pass_, choice, rows, device):
                    lines.append(f"{site.name} {pass_}  {choice.kernel}  {problem_line}")
                    break
            lowest = choice.m_below or lowest
    return lines


def _compile_ahead(
    linears: dict[str, nn.Linear], switched: Sequence[SitePlan], sites: Sequence[Site]
) -> None:
    """Compile what runs on a GPU, and load the casts before a compiler of the model traces one."""
    on_gpu = [(linears[site.name], site) for site in switched if linears[site.name].weight.is_cuda]
    if any(choice.spec_a.is_quantized for _, site in on_gpu for p in Pass for choice in site.choices(p)):
        load_casts()
    warm_up(on_gpu, rows={site.name: site.rows for site in sites})


def _trouble(site: SitePlan, pass_: Pass, choice: Choice, rows: int, device: Device) -> str:
    chosen = kernel(choice.kernel)
    if chosen.name == HIGH_PRECISION:
        return ""
    problem = choice_problem(site, pass_, choice, rows)
    support = usable(chosen, problem, device)
    if not support:
        return support.reason
    takes = chosen.operands(problem)
    if takes != (choice.spec_a, choice.spec_b):
        return f"takes {takes[0]} * {takes[1]}, the plan casts {choice.spec_a} * {choice.spec_b}"
    return ""


def _runs_anywhere(chosen: Kernel) -> bool:
    return chosen.emulated or chosen.name == HIGH_PRECISION


def _kernels_of(site: SitePlan) -> tuple[str, ...]:
    return tuple(choice.kernel for pass_ in Pass for choice in site.choices(pass_))


def _emulated(site: SitePlan) -> SitePlan:
    """The site's plan with every kernel replaced by its emulated twin, formats kept."""

    def twins(pass_: Pass) -> tuple[Choice, ...]:
        return tuple(_emulated_choice(site, pass_, choice) for choice in site.choices(pass_))

    return SitePlan(
        name=site.name,
        n=site.n,
        k=site.k,
        bias=site.bias,
        fwd=twins(Pass.FWD),
        dgrad=twins(Pass.DGRAD),
        wgrad=twins(Pass.WGRAD),
    )


def _emulated_choice(site: SitePlan, pass_: Pass, choice: Choice) -> Choice:
    twin = emulated_twin(choice.kernel)
    spec_a, spec_b = twin.operands(choice_problem(site, pass_, choice, rows=1))
    return Choice(
        m_below=choice.m_below,
        kernel=twin.name,
        spec_a=spec_a,
        spec_b=spec_b,
        reason=f"emulates {choice.kernel}: {choice.reason}",
    )
