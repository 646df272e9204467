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

__all__ = ["CastLoss", "ProductError", "cast_loss", "product_error", "sqnr_db"]


class ProductError(NamedTuple):
    """Error of a product [m, n] against a reference; 0-dim fp64 tensors on the product's device.

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
        """fp64 [7], for keeping on the device and copying once."""
        return torch.stack(list(self))


def product_error(out: Tensor, ref: Tensor) -> ProductError:
    """Compare a product with its reference, both [m, n]; computed in fp64, without host synchronisation.

    A row whose reference is exactly 0 counts as error 0 where the output is 0 too, infinite otherwise.
    An empty product has error 0.
    """
    out64, ref64 = out.double(), ref.double()
    zero = ref64.new_zeros(())
    if ref64.numel() == 0:
        return ProductError(zero, zero, zero, zero, zero, zero, zero)
    diff = out64 - ref64
    row_noise, row_signal = diff.square().sum(dim=1), ref64.square().sum(dim=1)
    row_error = torch.where(row_noise == 0, torch.zeros_like(row_noise), (row_noise / row_signal).sqrt())
    # Quantiles by sorting: torch.quantile refuses more than 2^24 rows and interpolates inf into NaN.
    ranked = row_error.sort().values
    last = ranked.numel() - 1
    nonzero = ref64 != 0
    relative = torch.where(nonzero, diff.abs() / ref64.abs().clamp(min=5e-324), zero)
    return ProductError(
        signal=row_signal.sum(),
        noise=row_noise.sum(),
        row_p50=ranked[math.floor(0.50 * last)],
        row_p99=ranked[math.ceil(0.99 * last)],
        row_max=ranked[last],
        bias=diff.mean() / ref64.abs().mean().clamp(min=5e-324),
        mere=relative.sum() / nonzero.sum().clamp(min=1),
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
    over = (magnitude > q.spec.format.max * (1 + 2.0**-20) * scale) & finite
    count = finite.sum(dtype=torch.float64)
    nonzero = ((x != 0) & finite).sum(dtype=torch.float64)
    return CastLoss(lost.sum() / nonzero.clamp(min=1), over.sum() / count.clamp(min=1), rows * k - count)
