"""Hooks that are in place for one step only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["PassingHook"]


class PassingHook:
    """A hook that stays behind when its module is copied or pickled: the copy has one that does nothing.

    A loop may save the whole model while a step is watched, and closures cannot be pickled.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the function does."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _left_behind, ()


def _left_behind() -> Callable[..., None]:
    return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a copy of a watched module calls."""
