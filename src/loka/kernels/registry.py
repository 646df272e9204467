"""Every kernel by name. A new library is a new file under backends/ and one line here."""

from __future__ import annotations

from fnmatch import fnmatchcase
from types import MappingProxyType

from loka.errors import UnknownNameError, unknown_name
from loka.kernels.backends import emulated, high_precision, torch_scaled_mm
from loka.kernels.protocol import Kernel
from loka.vocab import Device, GemmProblem, Support

__all__ = [
    "HIGH_PRECISION",
    "KERNELS",
    "candidates",
    "check_patterns",
    "emulated_twin",
    "kernel",
    "kernel_names",
    "usable",
]

HIGH_PRECISION = "high_precision.bf16"

_ALL: tuple[Kernel, ...] = (*high_precision.KERNELS, *torch_scaled_mm.KERNELS, *emulated.KERNELS)
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
    """The emulated kernel with the same recipe as a real one (`torch.rowwise.fast` -> `emulated.rowwise`).

    Fast accumulation is not emulated: the twin accumulates exactly.

    Raises:
        UnknownNameError: for an unknown kernel, or one that has no twin.
    """
    real = kernel(name)
    if real.emulated or real.name == HIGH_PRECISION:
        return real
    twin = "emulated." + real.name.split(".", 1)[1].removesuffix(".fast")
    return kernel(twin)
