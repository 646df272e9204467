"""Statistics of an operand and errors of a product in Triton: few reads, few launches, never a wait."""

from loka.kernels.triton.statistics.cast_counts import counts_of_cast
from loka.kernels.triton.statistics.host import column_moments, merged_moments
from loka.kernels.triton.statistics.marginals import column_marginals
from loka.kernels.triton.statistics.row_errors import error_row_sums

__all__ = ["column_marginals", "column_moments", "counts_of_cast", "error_row_sums", "merged_moments"]
