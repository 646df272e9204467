"""Triton's interpreter, made ready for the tests: our kernels on CPU memory, one program after the other.

Triton 3.6 turns a loop bound into a Python number by `int()` of an array with one element, which NumPy
refuses since 2.4. Nothing else is changed.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

__all__ = ["make_ready"]

_patch_tensor = interpreter._patch_lang_tensor


def _with_scalar_bounds(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def make_ready() -> None:
    """Let loops over bounds known at run time work under the interpreter."""
    interpreter._patch_lang_tensor = _with_scalar_bounds
