"""One product, many ways: the protocol, the cast engine, the registry, a library a file under backends/."""

from loka.kernels.cast_engine import cast
from loka.kernels.device import device_of
from loka.kernels.protocol import Kernel
from loka.kernels.registry import (
    HIGH_PRECISION,
    KERNELS,
    candidates,
    check_patterns,
    emulated_twin,
    kernel,
    kernel_names,
    usable,
)
from loka.kernels.vetting import vet

__all__ = [
    "HIGH_PRECISION",
    "KERNELS",
    "Kernel",
    "candidates",
    "cast",
    "check_patterns",
    "device_of",
    "emulated_twin",
    "kernel",
    "kernel_names",
    "usable",
    "vet",
]
