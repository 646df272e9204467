"""Every kernel by name. A new library is a new file under backends/ and one line here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType

from loka.errors import UnknownNameError, unknown_name
from loka.kernels.backends import (
    deep_gemm,
    emulated,
    high_precision,
    mslk,
    torch_blockwise,
    torch_fnuz,
    torch_mx,
    torch_scaled_mm,
    transformer_engine,
    triton_products,
)
from loka.kernels.protocol import Kernel
from loka.vocab import Device, GemmProblem, Pass, Support

__all__ = [
    "HIGH_PRECISION",
    "KERNELS",
    "candidates",
    "check_patterns",
    "emulated_twin",
    "kernel",
    "kernel_names",
    "twin_of",
    "usable",
]

HIGH_PRECISION = "high_precision.bf16"

_ALL: tuple[Kernel, ...] = (
    *high_precision.KERNELS,
    *torch_scaled_mm.KERNELS,
    *torch_blockwise.KERNELS,
    *mslk.KERNELS,
    *deep_gemm.KERNELS,
    *triton_products.KERNELS,
    *torch_mx.KERNELS,
    *torch_fnuz.KERNELS,
    *transformer_engine.KERNELS,
    *emulated.KERNELS,
)
KERNELS = MappingProxyType({k.name: k for k in _ALL})


def kernel_names() -> list[str]:
    """Every name, in the order of the backends."""
    return list(KERNELS)


def kernel(name: str) -> Kernel:
    """The kernel of this name; `bf16` stands for `high_precision.bf16`.

    Raises:
        UnknownNameError: listing what exists.
    """
    found = KERNELS.get(HIGH_PRECISION if name == "bf16" else name)
    if found is None:
        raise unknown_name("kernel", name, kernel_names())
    return found


def check_patterns(patterns: tuple[str, ...]) -> None:
    """Raise UnknownNameError for a glob pattern that matches no kernel."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in KERNELS):
            raise UnknownNameError(
                f"kernel pattern `{pattern}` matches no kernel", hint=f"known: {', '.join(KERNELS)}"
            )


def usable(chosen: Kernel, problem: GemmProblem, device: Device) -> Support:
    """Whether the kernel can run the problem here and now: its rules, then its library."""
    support = chosen.supports(problem, device)
    return support and chosen.available()


def candidates(problem: GemmProblem, device: Device) -> list[tuple[Kernel, Support]]:
    """Every kernel with its yes, or its no and the reason."""
    return [(k, usable(k, problem, device)) for k in KERNELS.values()]


def emulated_twin(name: str) -> Kernel:
    """The emulated kernel with the same recipe as a real one (`mslk.rowwise.fast` -> `emulated.rowwise`).

    Fast accumulation is not emulated: the twin accumulates exactly. A kernel that casts nothing has bf16 for
    its twin.

    Raises:
        UnknownNameError: for an unknown kernel, or one that has no twin.
    """
    real = kernel(name)
    found = twin_of(real, KERNELS.values())
    if found is None:
        raise UnknownNameError(
            f"kernel `{name}` has no emulated twin: no emulated kernel casts its operands in the same way",
            hint=f"emulated: {', '.join(k.name for k in KERNELS.values() if k.emulated)}",
        )
    return found


def twin_of(real: Kernel, among: Iterable[Kernel]) -> Kernel | None:
    """The first kernel of `among` that casts as `real` does and runs anywhere; None where none does.

    Compared by recipe (formats, granularities, scale rounding) in every pass that the kernel is defined for.
    """
    if real.emulated or real.name == HIGH_PRECISION:
        return real
    passes = _passes(real)
    if not any(spec.is_quantized for spec in real.operands(GemmProblem(128, 128, 128, passes[0]))):
        return kernel(HIGH_PRECISION)
    fitting = (
        k for k in among if k.emulated and set(passes) <= set(_passes(k)) and _same_recipe(real, k, passes)
    )
    return next(fitting, None)


def _passes(chosen: Kernel) -> tuple[Pass, ...]:
    """The passes a kernel is defined for: all, unless it says otherwise."""
    return getattr(chosen, "passes", tuple(Pass))


def _same_recipe(real: Kernel, twin: Kernel, passes: tuple[Pass, ...]) -> bool:
    for pass_ in passes:
        problem = GemmProblem(128, 128, 128, pass_)
        a, b = real.operands(problem)
        # A kernel may take twins of the formats that were asked for (FNUZ); the emulated one takes any.
        theirs = twin.operands(replace(problem, a_format=a.format, b_format=b.format))
        if (a.recipe_key, b.recipe_key) != tuple(spec.recipe_key for spec in theirs):
            return False
    return True
