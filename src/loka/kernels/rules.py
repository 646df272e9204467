"""The rules of kernels as pure functions of problem and device.

A CPU enforces none of the GPU's rules, so a green CPU run proves nothing: the rules are tested here.
"""

from __future__ import annotations

from loka.vocab import Device, Format, GemmProblem, Support

__all__ = ["emulated_rules", "scaled_mm_rules"]

# Exact lists, not lower bounds. 9.0 has been run; 8.9 and 10.0 are torch's own lists, not tried here.
# Rowwise stays at 9.0: elsewhere torch has no fp32 output for it, which a weight gradient wants.
_TENSORWISE_ARCHS = {(8, 9), (9, 0), (10, 0)}
_ROWWISE_ARCHS = {(9, 0)}


def scaled_mm_rules(problem: GemmProblem, device: Device, *, rowwise: bool, fast: bool) -> Support:
    """Whether torch._scaled_mm (cuBLASLt) can run the problem.

    k is not checked: the cast pads it to a multiple of 16. m is free, 0 and 1 included.
    """
    if not problem.a_format.is_float8 or not problem.b_format.is_float8:
        return Support.no(f"needs 8-bit operands, got {problem.a_format} and {problem.b_format}")
    if problem.a_format is Format.E5M2 and problem.b_format is Format.E5M2:
        return Support.no("e5m2 x e5m2 does not exist in hardware; use e4m3 for one operand")
    if device.type == "cpu":
        return _cpu_rules(device, rowwise=rowwise, fast=fast)
    if device.type == "hip":
        return Support.no("unverified on AMD GPUs, found " + device.name)
    archs = _ROWWISE_ARCHS if rowwise else _TENSORWISE_ARCHS
    if device.arch not in archs:
        needed = ", ".join(f"{major}.{minor}" for major, minor in sorted(archs))
        return Support.no(f"needs SM {needed}, found {device.arch[0]}.{device.arch[1]}")
    for format_ in (problem.a_format, problem.b_format):
        if format_ in (Format.E4M3FNUZ, Format.E5M2FNUZ):
            return Support.no(f"{format_} is a format of AMD GPUs")
    if problem.n % 16:
        return Support.no(f"needs N % 16 == 0, got N={problem.n}")
    return Support.yes()


def _cpu_rules(device: Device, *, rowwise: bool, fast: bool) -> Support:
    if fast:
        return Support.no("a CPU ignores fast accumulation")
    if rowwise and device.torch < (2, 13):
        found = f"{device.torch[0]}.{device.torch[1]}"
        return Support.no(f"rowwise on a CPU needs torch >= 2.13, found {found}")
    return Support.yes()


def emulated_rules(problem: GemmProblem) -> Support:
    """Whether the emulated product stands for something that hardware has."""
    if not problem.a_format.is_float8 or not problem.b_format.is_float8:
        return Support.no(f"needs 8-bit operands, got {problem.a_format} and {problem.b_format}")
    if problem.a_format is Format.E5M2 and problem.b_format is Format.E5M2:
        return Support.no("e5m2 x e5m2 does not exist in hardware; use e4m3 for one operand")
    return Support.yes()
