"""What torch's own scaled products take (aten::_scaled_mm and _scaled_mm_v2), and the emulated ones.

k is never checked: the cast pads it with zeros. m is free, 0 and 1 included.
"""

from __future__ import annotations

from loka.kernels.rules.checks import (
    all_of,
    needs_arch,
    needs_divisible,
    needs_e4m3,
    needs_float8,
    refuses_fnuz,
    refuses_two_e5m2,
)
from loka.vocab import Device, GemmProblem, Support

__all__ = [
    "block_scaled_mm_rules",
    "emulated_rules",
    "fnuz_scaled_mm_rules",
    "mx_scaled_mm_rules",
    "scaled_mm_rules",
]

# 9.0 has been run; 8.9 and 10.0 are torch's own lists, not tried here.
# Rowwise stays at 9.0: elsewhere torch has no fp32 output for it, which a weight gradient wants.
_TENSORWISE_ARCHS = frozenset({(8, 9), (9, 0), (10, 0)})
_ROWWISE_ARCHS = frozenset({(9, 0)})
_BLOCK_ARCHS = frozenset({(9, 0)})
_MX_ARCHS = frozenset({(10, 0)})
_FNUZ_ARCH = (9, 4)


def scaled_mm_rules(problem: GemmProblem, device: Device, *, rowwise: bool, fast: bool) -> Support:
    """Whether torch._scaled_mm (cuBLASLt on a GPU) can run the problem, tensorwise or rowwise."""
    formats = all_of(needs_float8(problem), refuses_two_e5m2(problem))
    if not formats:
        return formats
    if device.type == "cpu":
        return _cpu_rules(device, rowwise=rowwise, fast=fast)
    if device.type == "hip":
        return Support.no("unverified on AMD GPUs, found " + device.name)
    return all_of(
        needs_arch(device, _ROWWISE_ARCHS if rowwise else _TENSORWISE_ARCHS),
        refuses_fnuz(problem),
        needs_divisible("N", problem.n, 16),
    )


def _cpu_rules(device: Device, *, rowwise: bool, fast: bool) -> Support:
    if fast:
        return Support.no("a CPU ignores fast accumulation")
    if rowwise and device.torch < (2, 13):
        found = f"{device.torch[0]}.{device.torch[1]}"
        return Support.no(f"rowwise on a CPU needs torch >= 2.13, found {found}")
    return Support.yes()


def block_scaled_mm_rules(problem: GemmProblem, device: Device) -> Support:
    """Whether aten::_scaled_mm_v2 can run the problem with 1x128 and 128x128 blocks.

    torch keeps these to SM 9.0 and to E4M3 for both operands.
    """
    return all_of(
        needs_float8(problem),
        needs_e4m3(problem),
        needs_arch(device, _BLOCK_ARCHS),
        needs_divisible("N", problem.n, 16),
    )


def mx_scaled_mm_rules(problem: GemmProblem, device: Device) -> Support:
    """Whether aten::_scaled_mm_v2 can run the problem in MXFP8, by its contract."""
    return all_of(
        needs_float8(problem),
        refuses_two_e5m2(problem),
        refuses_fnuz(problem),
        needs_arch(device, _MX_ARCHS),
        needs_divisible("N", problem.n, 16),
    )


def fnuz_scaled_mm_rules(problem: GemmProblem, device: Device) -> Support:
    """Whether torch._scaled_mm (hipBLASLt) can run the problem in FNUZ formats, by its contract.

    Formats asked for as OCP are run as their FNUZ twins. Of AMD's GPUs only the MI300 series (gfx942)
    computes in FNUZ.
    """
    formats = all_of(needs_float8(problem), refuses_two_e5m2(problem))
    if not formats:
        return formats
    if device.type != "hip":
        return Support.no(f"needs an AMD GPU of the MI300 series (gfx942), found {device.name}")
    if device.arch != _FNUZ_ARCH:
        found = f"{device.arch[0]}.{device.arch[1]}"
        return Support.no(f"needs an AMD GPU of the MI300 series (9.4), found {device.name} ({found})")
    return needs_divisible("N", problem.n, 16)


def emulated_rules(problem: GemmProblem) -> Support:
    """Whether the emulated product stands for something that hardware has."""
    return all_of(needs_float8(problem), refuses_two_e5m2(problem))
