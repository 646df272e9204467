"""A model and one batch in, the list of its products out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from loka.errors import UsageError
from loka.sites.reasons import BOTH_ACTIVATIONS, FUNCTIONAL, NOT_REACHED, why_not_plannable
from loka.sites.recorder import Recorded, Recorder
from loka.sites.select import select_sites
from loka.vocab import Site

__all__ = ["find_sites", "module_names", "sites_in_order"]


def find_sites(
    model: nn.Module,
    run: Callable[[], object],
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
) -> list[Site]:
    """Every product of the model, found by running one batch.

    The model, its buffers and torch's random state are as before afterwards. Nothing is left out: what
    cannot or shall not be planned is listed with its reason. A weight that two modules share makes two sites
    with the same `parameter`; both can be planned. A module called several times in one forward is one site
    with `calls` > 1 and the mean of its rows.

    Args:
        model: Compiled modules are run eagerly and named as if they were not compiled.
        run: Calls the model's forward once, for example `lambda: model(batch)`.
        include: Glob patterns of the sites to plan.
        exclude: Glob patterns of the sites not to plan.

    Returns:
        Sites in the order of the model's modules; kind `linear`, `functional` or `interaction`.

    Raises:
        UsageError: for a model that carries a plan, or a run that reaches no product.
        UnknownNameError: for a pattern that matches no site.
    """
    names = module_names(model)
    if any("site_plan" in module.__dict__ for module in names):
        raise UsageError("the model already carries a plan", hint="call `loka.revert(model)` first")
    recorder = Recorder(model, names)
    eagerly = torch.compiler.set_stance("force_eager")  # compiled code runs no hooks
    with _as_before(model), torch.no_grad(), eagerly, recorder.following_modules(), recorder:
        run()
    if not recorder.found:
        raise UsageError(
            "the run reached no matrix product of the model",
            hint="`run` must call the model's forward, for example `lambda: model(batch)`",
        )
    sites = sites_in_order(model, names, recorder.found)
    return select_sites(sites, include=include, exclude=exclude)


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Module to qualified name, as if nothing were compiled."""
    return {
        module: name.replace("_orig_mod", "").replace("..", ".").strip(".")
        for name, module in model.named_modules()
    }


def sites_in_order(model: nn.Module, names: dict[nn.Module, str], found: list[Recorded]) -> list[Site]:
    """The sites of recorded products, in the order of the model's modules."""
    return _in_model_order(_sites_of(model, names, found), list(names.values()))


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Running statistics and random numbers of one training-mode forward are put back."""
    # Not by version: batch_norm writes its running statistics without counting one.
    buffers = [(b, b.detach().clone()) for b in model.buffers() if not b.is_inference()]
    devices = {p.device.index for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(i for i in devices if i is not None)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _sites_of(model: nn.Module, names: dict[nn.Module, str], found: list[Recorded]) -> list[Site]:
    linears = {names[m]: m for m in names if isinstance(m, nn.Linear)}
    parameters = {id(p): n.replace("_orig_mod.", "") for n, p in model.named_parameters()}
    calls: dict[tuple[str, str, int, int], list[Recorded]] = {}
    for product in found:
        if product.own_weight:
            key = ("linear", product.module, product.n, product.k)
        elif product.parameter:
            key = ("functional", product.parameter, product.n, product.k)
        else:
            key = ("interaction", f"{product.module}.{product.op}".strip("."), product.n, product.k)
        calls.setdefault(key, []).append(product)

    taken: dict[str, int] = {}
    groups: dict[object, int] = {}
    sites = []
    for (kind, name, n, k), products in calls.items():
        taken[name] = taken.get(name, 0) + 1
        first = products[0]
        sites.append(
            Site(
                name=name if taken[name] == 1 else f"{name}_{taken[name]}",
                kind=kind,
                n=n,
                k=k,
                bias=first.bias,
                rows=round(sum(p.rows for p in products) / len(products)),
                calls=len(products),
                input_group=groups.setdefault(first.input_key, len(groups)),
                parameter=first.parameter,
                not_planned=_reason(kind, linears.get(name), products),
            )
        )
    reached = {site.name for site in sites if site.kind == "linear"}
    for name, module in linears.items():
        if name not in reached:
            sites.append(_not_reached(name, module, parameters.get(id(module.weight), ""), len(groups)))
            groups[name] = len(groups)
    return sites


def _reason(kind: str, module: nn.Linear | None, products: Sequence[Recorded]) -> str:
    product = products[0]
    if kind == "linear" and module is not None:
        unknown = product.reason if all(p.reason for p in products) else ""
        return why_not_plannable(module) or unknown
    reason = FUNCTIONAL if kind == "functional" else BOTH_ACTIVATIONS
    return f"{reason} ({product.reason})" if product.reason else reason


def _not_reached(name: str, module: nn.Linear, parameter: str, group: int) -> Site:
    return Site(
        name=name,
        kind="linear",
        n=module.out_features,
        k=module.in_features,
        bias=module.bias is not None,
        rows=0,
        calls=0,
        input_group=group,
        parameter=parameter,
        not_planned=why_not_plannable(module) or NOT_REACHED,
    )


def _in_model_order(sites: list[Site], modules: list[str]) -> list[Site]:
    """By the module that owns the site; the order of calls within one. Groups are numbered anew."""
    position = {name: i for i, name in enumerate(modules)}

    def owner(site: Site) -> int:
        name = site.name
        while name not in position:
            name = name.rpartition(".")[0]
        return position[name]

    ordered = sorted(sites, key=owner)
    groups: dict[int, int] = {}
    return [replace(s, input_group=groups.setdefault(s.input_group, len(groups))) for s in ordered]
