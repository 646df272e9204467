"""How our kernels are launched: through `wrap_triton`, so that torch.compile and AOTInductor see them."""

from __future__ import annotations

from typing import Any

from torch.library import wrap_triton
from triton.runtime.jit import JITFunction

__all__ = ["is_compiled", "launcher"]


def launcher(kernel: Any) -> Any:
    """What is subscripted with a grid and called.

    Under Triton's interpreter a kernel is a plain Python object on CPU memory, which `wrap_triton` does not
    take; nothing is compiled there, so nothing is lost.
    """
    return wrap_triton(kernel) if is_compiled(kernel) else kernel


def is_compiled(kernel: Any) -> bool:
    """Whether the kernel becomes machine code; False under the interpreter, which has no instructions."""
    return isinstance(kernel, JITFunction)
