"""What LoKA's Triton products can run, as pure functions of problem and device."""

from __future__ import annotations

from loka.vocab import Device, Format, GemmProblem, Support

__all__ = ["bf16_rules", "fp8_rules"]

_OCP = (Format.E4M3, Format.E5M2)
# 9.0 is what they were written for. 8.9 has the same formats with 99 KB of shared memory, for which the
# tiles shrink; later parts run the same code through other instructions.
_FIRST_FP8 = (8, 9)
_FIRST_BF16 = (8, 0)


def fp8_rules(problem: GemmProblem, device: Device) -> Support:
    """Whether the FP8 products can run: any m, n and k, of E4M3 and at most one E5M2 operand."""
    a, b = problem.a_format, problem.b_format
    if not a.is_float8 or not b.is_float8:
        return Support.no(f"needs 8-bit operands, got {a} and {b}")
    for format_ in (a, b):
        if format_ not in _OCP:
            return Support.no(f"{format_} is a format of AMD GPUs")
    if a is Format.E5M2 and b is Format.E5M2:
        return Support.no("e5m2 x e5m2 does not exist in hardware; use e4m3 for one operand")
    return _where(device, _FIRST_FP8)


def bf16_rules(problem: GemmProblem, device: Device) -> Support:
    """Whether the bf16 product can run: any m, n and k, any stride."""
    return _where(device, _FIRST_BF16)


def _where(device: Device, first: tuple[int, int]) -> Support:
    if device.type == "cpu":
        return Support.no("runs on CUDA; on a CPU only under Triton's interpreter")
    if device.type != "cuda":
        return Support.no("unverified on AMD GPUs, found " + device.name)
    if device.arch < first:
        return Support.no(f"needs SM {first[0]}.{first[1]} or later, found {device.arch[0]}.{device.arch[1]}")
    return Support.yes()
