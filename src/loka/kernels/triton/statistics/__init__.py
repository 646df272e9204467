"""Statistics of an operand in Triton: one read of narrow tensors, two of wide ones, never a wait."""

from loka.kernels.triton.statistics.host import column_moments, merged_moments

__all__ = ["column_moments", "merged_moments"]
