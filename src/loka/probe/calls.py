"""What a hook can tell of one call of a linear."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loka.vocab import Pass

__all__ = ["base_of", "has_weight", "is_sharded", "passes_of", "why_not_seen"]


def why_not_seen(module: nn.Module, x: object, output: object) -> str:
    """Why a call is not looked at; empty where it is."""
    if not has_weight(module):
        return "its weight is no Parameter any more"
    for tensor in (x, output):
        if not isinstance(tensor, Tensor):
            return f"a {type(tensor).__name__} is no tensor"
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return "it ran inside a function transform such as vmap"
        if tensor.is_nested or tensor.layout is not torch.strided:
            return f"its input is {'nested' if tensor.is_nested else 'sparse'}"
    return ""


def has_weight(module: nn.Module) -> bool:
    """A pruned or parametrized module has none of its own: it is computed."""
    return module._parameters.get("weight") is not None


def base_of(output: Tensor) -> Tensor:
    """The output, or what it is a view of where that is the same elements.

    An in-place operation on a view puts another node in place of the view's, whose hooks then never run.
    """
    base = output._base
    whole = base is not None and base.grad_fn is not None and base.numel() == output.numel()
    return base if base is not None and whole else output


def passes_of(module: nn.Module, x: Tensor, *, asks: bool) -> frozenset[Pass]:
    """No gradient pass where the output asks for none, no dgrad for a leaf, no wgrad for a frozen weight."""
    needed = {
        Pass.FWD: True,
        Pass.DGRAD: asks and x.requires_grad,
        Pass.WGRAD: asks and module.get_parameter("weight").requires_grad,
    }
    return frozenset(pass_ for pass_, runs in needed.items() if runs)


def is_sharded(weight: Tensor) -> bool:
    """Whether this rank holds a part of it only, as FSDP2 has it outside a module's forward and backward."""
    return hasattr(weight, "to_local")
