"""Operands drawn from learned statistics, where no real rows are at hand.

First model: independent normal features with the learned mean and standard deviation. It knows no
correlation between features and no heavy tails; the error it predicts is marked `sampled` in the profile
and yields to a `live` one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka.numerics import Moments

__all__ = ["draw_rows"]


def draw_rows(moments: Moments, rows: int, generator: torch.Generator) -> Tensor:
    """Draw fp32 [rows, features] on the statistics' device.

    The normal numbers themselves come from the CPU, so that a draw does not depend on the device.
    """
    features = moments.mean.numel()
    z = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    return (moments.mean + moments.std * z.to(moments.mean.device)).float()
