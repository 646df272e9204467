"""The clock and the roofline."""

from loka.timing.clock import Measured, clock_overhead_us, measure, measure_or_reason
from loka.timing.failures import DeviceLostError, attempt, check_device
from loka.timing.roofline import PEAKS, Peak, bound_us, fraction_of_roofline, peak_of
from loka.timing.samples import Ratio, Timing, paired_ratio

__all__ = [
    "PEAKS",
    "DeviceLostError",
    "Measured",
    "Peak",
    "Ratio",
    "Timing",
    "attempt",
    "check_device",
    "bound_us",
    "clock_overhead_us",
    "fraction_of_roofline",
    "measure",
    "measure_or_reason",
    "paired_ratio",
    "peak_of",
]
