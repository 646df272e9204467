"""What names the code that Triton compiled, kept equal in this process and in new ones."""

from __future__ import annotations

import sys

__all__ = ["ask_for_the_assembler_again"]


def ask_for_the_assembler_again() -> None:
    """Have Triton ask ptxas for its version anew when it next looks for something that was compiled.

    The version is part of the name under which compiled code lies on disk, and a process asks for it once.
    torch's compiler asks, and may then set TRITON_PTXAS_PATH to the ptxas that torch brings: from there on
    this process names code by the one and compiles with the other, while a new process knows only the second,
    and what it compiles would never be found here.
    """
    compiler = sys.modules.get("triton.backends.nvidia.compiler")
    clear = getattr(getattr(compiler, "get_ptxas_version", None), "cache_clear", None)
    if clear is not None:
        clear()
