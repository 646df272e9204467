"""Hooks that are in place for one step only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["PassingHook", "is_traced"]

_TRACING_MODES = tuple(
    getattr(torch._C._TorchDispatchModeKey, key) for key in ("FUNCTIONAL", "PROXY", "FAKE")
)


def is_traced() -> bool:
    """Whether torch only traces what runs now (export, fx, jit, fake tensors): no call of a training."""
    by_jit = torch._C._get_tracing_state() is not None
    return by_jit or any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING_MODES)


class PassingHook:
    """A hook that stays behind when its module is copied or pickled: the copy has one that does nothing.

    A loop may save the whole model while a step is watched, and closures cannot be pickled. What the file
    holds in its place is of Python's own library, so that the model opens where there is no LoKA. Where torch
    only traces the model, the hook does nothing either: its numbers would become part of what is traced.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the function does."""
        return None if is_traced() else self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        # Takes anything and gives None.
        return getattr, (contextlib.nullcontext(), "__exit__")
