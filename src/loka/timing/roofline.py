"""How fast a product could be: the larger of arithmetic and memory time at the vendor's dense peaks."""

from __future__ import annotations

from dataclasses import dataclass

from loka.errors import UsageError
from loka.vocab import Format, GemmProblem

__all__ = ["PEAKS", "Peak", "bound_us", "fraction_of_roofline", "peak_of"]


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense peaks of a device (no structured sparsity), from its vendor's data sheet.

    Attributes:
        bf16_tflops: Dense BF16 rate.
        fp8_tflops: Dense FP8 rate.
        memory_gbps: Memory bandwidth in 10^9 bytes/s.
    """

    bf16_tflops: float
    fp8_tflops: float
    memory_gbps: float


PEAKS: dict[str, Peak] = {
    "H100": Peak(989.0, 1979.0, 3350.0),
    "H200": Peak(989.0, 1979.0, 4800.0),
    "B200": Peak(2250.0, 4500.0, 8000.0),
    "MI300X": Peak(1307.0, 2615.0, 5300.0),
}


def peak_of(device_name: str) -> Peak | None:
    """The peaks of a device by its marketing name, or None where they are not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)


def bound_us(problem: GemmProblem, peak: Peak, *, out_bytes: int = 2) -> float:
    """Least time of the product in us, its operands read once and its result written once."""
    fp8 = problem.a_format.is_float8 and problem.b_format.is_float8
    element = 1 if fp8 else (4 if problem.a_format is Format.FP32 else 2)
    rate = peak.fp8_tflops if fp8 else peak.bf16_tflops
    moved = (problem.m + problem.n) * problem.k * element + problem.m * problem.n * out_bytes
    return max(problem.flops / (rate * 1e6), moved / (peak.memory_gbps * 1e3))


def fraction_of_roofline(problem: GemmProblem, peak: Peak, time_us: float, *, out_bytes: int = 2) -> float:
    """What fraction of the roofline a product of this time reaches: its least time over its time.

    Args:
        problem: With the formats that the operands really have.
        peak: Of the device.
        time_us: Of the product alone, operands ready.
        out_bytes: Bytes of an element of the result.

    Raises:
        UsageError: for a time that is not above 0.
    """
    if time_us <= 0:
        raise UsageError(f"fraction_of_roofline(time_us={time_us}) must be above 0")
    return bound_us(problem, peak, out_bytes=out_bytes) / time_us
