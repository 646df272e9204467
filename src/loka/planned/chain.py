"""An nn.Sequential that runs its planned linears and the block norms between them as one.

Found by what its links are, not by name: where a block norm and a planned linear adjoin, both and what
adjoins them run in one function (`chain_function`). Every other link runs by itself, and so do all of them
where somebody watches one: a hook must see what its module takes and gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from loka.planned.chain_function import LinearLink, NormLink, planned_chain
from loka.planned.linear import PlannedLinear, compute_dtype_of
from loka.vocab import BlockNormSpec

__all__ = ["BlockNormLike", "PlannedChain", "is_chain", "link", "unlink"]


class BlockNormLike(Protocol):
    """A module that computes `loka.kernels.block_norm.block_norm` and nothing else.

    Attributes:
        block_norm_link: True, and of the very class: a subclass may compute something else.
        norm: Block, eps and whether hard swish follows.
        weight: [features] or None.
        features: Of the last dimension.
    """

    block_norm_link: bool
    norm: BlockNormSpec
    weight: nn.Parameter | None
    features: int


class PlannedChain(nn.Sequential):
    """nn.Sequential with planned links: the same modules, names, parameters and state_dict.

    Made of one in place by `link`; a slice of one is one too.

    Attributes:
        unlinked_class: What it was.
    """

    unlinked_class: type[nn.Sequential] = nn.Sequential

    def forward(self, input: Any) -> Any:  # noqa: A002 - nn.Sequential's own name
        """As nn.Sequential; FP8 is handed on where the plan says FP8."""
        if _everything_is_watched():
            return super().forward(input)  # type: ignore[no-untyped-call]
        h = input
        for part in _parts(list(self)):
            if len(part) > 1 and _rounds_first(part, h):
                h, part = part[0](h), part[1:]
            h = _run_as_one(part, h) if len(part) > 1 and _can_run_as_one(part, h) else _run_each(part, h)
        return h


def is_chain(module: nn.Module) -> bool:
    """Whether a plain nn.Sequential (or what calls itself one) has a block norm beside a planned linear."""
    plain = type(module) is nn.Sequential or type(module).__dict__.get("runs_as_one", False)
    return plain and isinstance(module, nn.Sequential) and any(len(part) > 1 for part in _parts(list(module)))


def link(module: nn.Sequential) -> None:
    """Make an nn.Sequential a chain, in place; `unlink` undoes it."""
    before: Any = type(module)
    module.__class__ = PlannedChain
    module.unlinked_class = before


def unlink(module: nn.Module) -> None:
    """Make a chain the nn.Sequential it was; any other module is left alone."""
    if isinstance(module, PlannedChain):
        before: Any = module.unlinked_class
        module.__dict__.pop("unlinked_class", None)
        module.__class__ = before


def _parts(modules: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """The modules cut into runs that are one function each, and single ones."""
    run: list[nn.Module] = []
    for module in modules:
        if type(module) is nn.Identity and not _is_watched(module):
            continue
        chained = type(module) is PlannedLinear or _is_norm(module)
        if chained:
            run.append(module)
            continue
        yield from _cut(run)
        run = []
        yield [module]
    yield from _cut(run)


def _cut(run: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """A run as one where it holds both: linears alone have nothing to hand on; else link by link."""
    norms = sum(_is_norm(module) for module in run)
    if 0 < norms < len(run):
        yield run
    else:
        yield from ([module] for module in run)


def _is_norm(module: nn.Module | BlockNormLike) -> TypeGuard[BlockNormLike]:
    return bool(type(module).__dict__.get("block_norm_link", False))


def _run_each(part: list[nn.Module], h: Any) -> Any:
    for module in part:
        h = module(h)
    return h


def _can_run_as_one(part: list[nn.Module], h: Any) -> bool:
    """Whether nobody watches a link, and the input is one that needs no error or special case of a link's."""
    if any(_is_watched(module) for module in part) or _has_twins(part):
        return False
    if not isinstance(h, Tensor) or h.dim() == 0 or h.numel() == 0 or not h.is_floating_point():
        return False
    width = h.shape[-1]
    for module in part:
        takes, gives = _widths(module)
        if takes != width:
            return False
        width = gives
    return True


def _rounds_first(part: list[nn.Module], h: Any) -> bool:
    """Whether the run begins with a norm in another dtype than the products have: it then runs by itself.

    What is not quantized would else be rounded from another dtype than the norm gives.
    """
    if not _is_norm(part[0]) or not isinstance(h, Tensor) or not h.is_floating_point():
        return False
    linear = next(module for module in part if isinstance(module, PlannedLinear))
    return compute_dtype_of(h, linear.weight, site=linear.site_plan.name) != h.dtype


def _widths(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, PlannedLinear):
        return module.in_features, module.out_features
    return (module.features, module.features) if _is_norm(module) else (-1, -1)


def _run_as_one(part: list[nn.Module], h: Tensor) -> Tensor:
    rows = math.prod(h.shape[:-1])
    links: list[LinearLink | NormLink] = []
    tensors: list[Tensor | None] = []
    fixed: list[Tensor | None] = []
    dtype = h.dtype
    for module in part:
        if isinstance(module, PlannedLinear):
            dtype = compute_dtype_of(h, module.weight, site=module.site_plan.name, dtype=dtype)
            own = module.fixed_for_rows(rows)
            fixed_at = 2 * len(part) + len(fixed) if own else -1
            links.append(LinearLink(module.routes.for_rows(rows), dtype, fixed_at))
            tensors += [module.weight, module.bias]
            fixed += own
        elif _is_norm(module):
            links.append(NormLink(module.norm))
            tensors += [module.weight, None]
    y = planned_chain(h.reshape(rows, h.shape[-1]), tuple(links), (*tensors, *fixed))
    return y.view(*h.shape[:-1], y.shape[-1])


def _has_twins(part: list[nn.Module]) -> bool:
    """Whether two links share a parameter, which torch's compiler takes only once into one function."""
    parameters = [id(p) for module in part for p in module.parameters(recurse=False)]
    return len(set(parameters)) < len(parameters)


def _is_watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _everything_is_watched() -> bool:
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )
