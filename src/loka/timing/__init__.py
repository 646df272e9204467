"""The clock and the roofline."""

from loka.timing.clock import Ratio, Timing, measure, paired_ratio
from loka.timing.roofline import PEAKS, Peak, bound_us, peak_of

__all__ = ["PEAKS", "Peak", "Ratio", "Timing", "bound_us", "measure", "paired_ratio", "peak_of"]
