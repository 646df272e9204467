"""Exact maths: the cast's formula, the reference product, errors and mergeable statistics."""

from loka.numerics.amax_history import HISTORY_STEPS, AmaxHistory
from loka.numerics.block_norm import block_rms_norm, block_rms_norm_gradients, bound_scale
from loka.numerics.cast import amax_of, cast_operand, decode_scale, round_to_format
from loka.numerics.covariance import FULL_FEATURES, RANK, SKETCH, Covariance
from loka.numerics.drift import WINDOW_STEPS, Drift, total_variation
from loka.numerics.dtypes import format_of, torch_dtype
from loka.numerics.error import (
    CAST_COUNTS,
    OVER_LIMIT,
    ROW_SUMS,
    CastLoss,
    ProductError,
    cast_counts,
    cast_loss,
    error_of_rows,
    product_error,
    row_sums,
    sqnr_db,
)
from loka.numerics.fine_bins import FINE_BINS
from loka.numerics.format_loss import (
    FLOAT8_FORMATS,
    FormatLoss,
    Share,
    column_octaves,
    format_loss,
    row_octaves,
)
from loka.numerics.marginals import MARGINAL_BINS, Marginals
from loka.numerics.moments import HISTOGRAM_BINS, HISTOGRAM_MIN_EXPONENT, Moments
from loka.numerics.operand_statistics import BatchStatistics, OperandStatistics, statistics_bytes
from loka.numerics.product import exact_product, product_of_operands
from loka.numerics.quantized import (
    Quantized,
    decode,
    lay_out,
    not_quantized,
    scale_per_element,
    scale_shape,
)

__all__ = [
    "CAST_COUNTS",
    "OVER_LIMIT",
    "FINE_BINS",
    "FLOAT8_FORMATS",
    "FULL_FEATURES",
    "HISTOGRAM_BINS",
    "HISTOGRAM_MIN_EXPONENT",
    "HISTORY_STEPS",
    "MARGINAL_BINS",
    "RANK",
    "SKETCH",
    "WINDOW_STEPS",
    "AmaxHistory",
    "BatchStatistics",
    "CastLoss",
    "Covariance",
    "Drift",
    "FormatLoss",
    "Marginals",
    "Moments",
    "OperandStatistics",
    "ProductError",
    "Quantized",
    "Share",
    "amax_of",
    "block_rms_norm",
    "block_rms_norm_gradients",
    "bound_scale",
    "cast_counts",
    "cast_loss",
    "cast_operand",
    "column_octaves",
    "decode",
    "decode_scale",
    "exact_product",
    "format_loss",
    "format_of",
    "lay_out",
    "not_quantized",
    "ROW_SUMS",
    "error_of_rows",
    "product_error",
    "row_sums",
    "product_of_operands",
    "round_to_format",
    "row_octaves",
    "scale_per_element",
    "scale_shape",
    "sqnr_db",
    "statistics_bytes",
    "torch_dtype",
    "total_variation",
]
