"""How far a product is from the truth.

Decide on rel_err / SQNR and on rows: the norm over all rows hides ruined ones, since an outlier row
dominates it. MERE, the published metric, is reported for comparison only: where outputs are centred on 0
its mean is heavy-tailed (0.29 to 0.62 over five seeds of one kernel).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from loka.numerics.quantized import Quantized, scale_per_element
from loka.vocab import Format

__all__ = [
    "CAST_COUNTS",
    "OVER_LIMIT",
    "ROW_SUMS",
    "CastLoss",
    "ProductError",
    "cast_counts",
    "cast_loss",
    "error_of_rows",
    "product_error",
    "row_sums",
    "sqnr_db",
]


class ProductError(NamedTuple):
    """Error of a product [m, n] against a reference; fp64 tensors on its device, 0-dim of one product.

    Attributes:
        signal: Sum of squares of the reference.
        noise: Sum of squares of the difference. rel_err = sqrt(noise / signal).
        row_p50: Median over rows of the relative L2 error of a row.
        row_p99: 99th percentile of the same.
        row_max: Worst row.
        bias: Mean signed error over mean magnitude of the reference.
        mere: Mean element-wise relative error |out - ref| / |ref| over elements with ref != 0.
    """

    signal: Tensor
    noise: Tensor
    row_p50: Tensor
    row_p99: Tensor
    row_max: Tensor
    bias: Tensor
    mere: Tensor

    def stacked(self) -> Tensor:
        """fp64 [..., 7], for keeping on the device and copying once."""
        return torch.stack(list(self), dim=-1)


def product_error(out: Tensor, ref: Tensor) -> ProductError:
    """Compare a product with its reference, both [m, n]; computed in fp64, without host synchronisation.

    A row whose reference is exactly 0 counts as error 0 where the output is 0 too, infinite otherwise.
    An empty product has error 0.
    """
    return error_of_rows(row_sums(out, ref))


ROW_SUMS = 6


def row_sums(out: Tensor, ref: Tensor) -> Tensor:
    """What a row adds to the error of a product, fp64 [m, 6].

    Columns: sum of squares of out - ref; of ref; sum of out - ref; sum of |ref|; sum of |out - ref| / |ref|
    over elements with ref != 0; number of those.

    Args:
        out: [m, n].
        ref: [m, n].
    """
    out64, ref64 = out.double(), ref.double()
    diff, magnitude = out64 - ref64, ref64.abs()
    nonzero = magnitude != 0
    relative = torch.where(nonzero, diff.abs() / magnitude.clamp(min=5e-324), 0.0)
    columns = (diff.square(), ref64.square(), diff, magnitude, relative, nonzero.double())
    return torch.stack([column.sum(dim=1) for column in columns], dim=1)


def error_of_rows(sums: Tensor) -> ProductError:
    """The error of products from the sums of their rows.

    Args:
        sums: fp64 [..., m, 6] of `row_sums`, of one product or of many.

    Returns:
        Fields of shape [...].
    """
    noise, signal, diff, magnitude, relative, nonzero = sums.unbind(dim=-1)
    zero = torch.zeros((), dtype=sums.dtype, device=sums.device)
    if noise.shape[-1] == 0:
        return ProductError(*(zero.expand(noise.shape[:-1]) for _ in ProductError._fields))
    # Quantiles by sorting: torch.quantile refuses more than 2^24 rows and interpolates inf into NaN.
    ranked = torch.where(noise == 0, zero, (noise / signal).sqrt()).sort(dim=-1).values
    last = ranked.shape[-1] - 1
    return ProductError(
        signal=signal.sum(dim=-1),
        noise=noise.sum(dim=-1),
        row_p50=ranked[..., math.floor(0.50 * last)],
        row_p99=ranked[..., math.ceil(0.99 * last)],
        row_max=ranked[..., last],
        bias=diff.sum(dim=-1) / magnitude.sum(dim=-1).clamp(min=5e-324),
        mere=relative.sum(dim=-1) / nonzero.sum(dim=-1).clamp(min=1),
    )


def sqnr_db(signal: float, noise: float) -> float:
    """10 log10(signal / noise) in dB, kept within +-300 so that files hold finite numbers only."""
    if noise <= 0:
        return 300.0
    if signal <= 0 or not math.isfinite(noise):
        return -300.0
    return max(-300.0, min(300.0, 10.0 * math.log10(signal / noise)))


class CastLoss(NamedTuple):
    """What a cast loses; 0-dim fp64 tensors.

    Attributes:
        underflow: Share of the non-zero finite elements that become 0.
        saturation: Share of the finite elements whose scaled magnitude exceeds the format's largest value
            by more than rounding (a given scale that is too small; never with a dynamic one).
        nonfinite: Count of NaN and infinite elements.
    """

    underflow: Tensor
    saturation: Tensor
    nonfinite: Tensor


CAST_COUNTS = 4
OVER_LIMIT = 1 + 2.0**-20  # of the largest value: beyond what rounding of a scale makes


def cast_counts(values: Tensor, codes: Tensor, format_: Format, scale: Tensor | None) -> Tensor:
    """What a cast made 0 and what a given scale cut off, in numbers that can be added up: int64 [4].

    Columns: elements that were not 0 and became 0; elements that are not 0; elements whose magnitude exceeds
    the format's largest value times the scale by more than rounding, 0 without a scale; all elements.

    On the bits of the codes, without widening them: a weight may have hundreds of millions.

    Args:
        values: fp32 [rows, k], what was cast.
        codes: uint8 [rows, k], the bits of what it became.
        format_: Of the codes.
        scale: fp32 (), a decode scale that may be too small; None where it cannot be.
    """
    nonzero = values != 0
    zeroed = ((codes & format_.zero_bits) == 0) & nonzero
    counts = [zeroed.sum(), nonzero.sum()]
    if scale is None:
        counts.append(torch.zeros_like(counts[0]))
    else:
        limit = format_.max * OVER_LIMIT * scale
        counts.append((values > limit).sum() + (values < -limit).sum())
    return torch.stack([*counts, torch.full_like(counts[0], values.numel())])


def cast_loss(x: Tensor, q: Quantized) -> CastLoss:
    """What the cast of an operand lost.

    Args:
        x: [rows, k], what was cast, in the operand's orientation.
        q: What it became; zero padding of k is not counted.
    """
    rows, k = x.shape
    magnitude = x.float().abs()
    finite = magnitude < torch.inf
    nonzero = (magnitude != 0) & finite
    lost = (q.values[:, :k].float() == 0) & nonzero
    scale = scale_per_element(q)
    scale = scale[:, :k] if scale.dim() == 2 and scale.shape[1] > 1 else scale
    over = (magnitude > q.spec.format.max * OVER_LIMIT * scale) & finite
    count = finite.sum(dtype=torch.float64)
    nonzero = ((x != 0) & finite).sum(dtype=torch.float64)
    return CastLoss(lost.sum() / nonzero.clamp(min=1), over.sum() / count.clamp(min=1), rows * k - count)
