"""The single checks that rules are made of: each answers yes, or no with what is needed and found."""

from __future__ import annotations

from loka.vocab import Device, Format, GemmProblem, Support

__all__ = [
    "FNUZ",
    "all_of",
    "needs_arch",
    "needs_divisible",
    "needs_e4m3",
    "needs_float8",
    "refuses_fnuz",
    "refuses_two_e5m2",
]

# The FNUZ twin of each OCP format: what an MI300X computes in.
FNUZ = {Format.E4M3: Format.E4M3FNUZ, Format.E5M2: Format.E5M2FNUZ}


def all_of(*checks: Support) -> Support:
    """The first no, or yes."""
    return next((check for check in checks if not check), Support.yes())


def needs_float8(problem: GemmProblem) -> Support:
    """Both operands are 8-bit."""
    if problem.a_format.is_float8 and problem.b_format.is_float8:
        return Support.yes()
    return Support.no(f"needs 8-bit operands, got {problem.a_format} and {problem.b_format}")


def refuses_two_e5m2(problem: GemmProblem) -> Support:
    """One operand has the longer mantissa, OCP or FNUZ."""
    e5m2 = (Format.E5M2, Format.E5M2FNUZ)
    if problem.a_format in e5m2 and problem.b_format in e5m2:
        return Support.no("e5m2 x e5m2 does not exist in hardware; use e4m3 for one operand")
    return Support.yes()


def needs_e4m3(problem: GemmProblem) -> Support:
    """Both operands are E4M3: all that the CUTLASS and DeepGEMM kernels are built for."""
    if problem.a_format is Format.E4M3 and problem.b_format is Format.E4M3:
        return Support.yes()
    return Support.no(f"needs e4m3 x e4m3, got {problem.a_format} x {problem.b_format}")


def refuses_fnuz(problem: GemmProblem) -> Support:
    """No operand is in a format of AMD's CDNA3."""
    for format_ in (problem.a_format, problem.b_format):
        if format_ in FNUZ.values():
            return Support.no(f"{format_} is a format of AMD GPUs")
    return Support.yes()


def needs_arch(device: Device, archs: frozenset[tuple[int, int]]) -> Support:
    """A CUDA device of one of these compute capabilities: exact lists, not lower bounds."""
    if device.type == "cuda" and device.arch in archs:
        return Support.yes()
    needed = ", ".join(f"{major}.{minor}" for major, minor in sorted(archs))
    found = f"{device.arch[0]}.{device.arch[1]}" if device.type == "cuda" else device.name
    return Support.no(f"needs SM {needed}, found {found}")


def needs_divisible(name: str, value: int, by: int) -> Support:
    """A dimension is a multiple."""
    return Support.no(f"needs {name} % {by} == 0, got {name}={value}") if value % by else Support.yes()
