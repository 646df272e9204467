"""Exact maths: the cast's formula, the reference product, errors and mergeable statistics."""

from loka.numerics.cast import amax_of, cast_operand, decode_scale, round_to_format
from loka.numerics.dtypes import format_of, torch_dtype
from loka.numerics.error import CastLoss, ProductError, cast_loss, product_error, sqnr_db
from loka.numerics.moments import HISTOGRAM_BINS, HISTOGRAM_MIN_EXPONENT, Moments
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
    "HISTOGRAM_BINS",
    "HISTOGRAM_MIN_EXPONENT",
    "CastLoss",
    "Moments",
    "ProductError",
    "Quantized",
    "amax_of",
    "cast_loss",
    "cast_operand",
    "decode",
    "decode_scale",
    "exact_product",
    "format_of",
    "lay_out",
    "not_quantized",
    "product_error",
    "product_of_operands",
    "round_to_format",
    "scale_per_element",
    "scale_shape",
    "sqnr_db",
    "torch_dtype",
]
