"""Why a Linear cannot be planned, in words for the site table."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

__all__ = ["BOTH_ACTIVATIONS", "FUNCTIONAL", "NOT_REACHED", "why_not_plannable"]

FUNCTIONAL = "functional"
NOT_REACHED = "not reached by the batch"
BOTH_ACTIVATIONS = "not FP8: both operands are activations"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_plannable(module: nn.Linear) -> str:
    """Why a planned linear cannot take this module's place; empty when it can."""
    weight: Any = module._parameters.get("weight")
    if isinstance(weight, UninitializedParameter):
        return "a lazy module that has not seen a batch"
    if parametrize.is_parametrized(module, "weight"):
        return "its weight is parametrized"
    if type(module) is not nn.Linear:
        return f"a subclass of nn.Linear: {type(module).__module__}.{type(module).__qualname__}"
    if "forward" in module.__dict__:
        return "its forward is replaced on the instance"
    if weight is None:
        return "its weight is no Parameter: a hook computes it"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}"
    return ""
