"""Wukong: stacked factorization machines.

Zhang et al., "Wukong: Towards a Scaling Law for Large-Scale Recommendation", arXiv 2403.02545 (ICML 2024),
section 3: factorization machine block (FMB) with the optimized FM, linear compression block (LCB), residual
and norm. The activation is z * sigmoid(LayerNorm(z)), as in the towers that LoKA's speed claims are made on.

Shapes: B rows, n embeddings a row, d their width, k rank of the FM, h hidden width, T tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from loka.recsys.models.base import TowerConfig
from loka.recsys.models.layers import DenseRow, LogitHead, NormSwish, check_width

__all__ = [
    "TOWER_L",
    "TOWER_M",
    "WUKONG_PRESETS",
    "WukongConfig",
    "WukongLayer",
    "WukongTower",
    "optimized_fm",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WukongConfig(TowerConfig):
    """Sizes of a Wukong.

    Attributes:
        layers: Number of Wukong layers.
        rank: k, columns of the optimized FM.
        fmb_hidden: h, both hidden widths of an FMB's MLP.
        fmb_outputs: Embeddings that an FMB gives.
        lcb_outputs: Embeddings that an LCB gives.
        top: Widths of the MLP on the last layer's flattened output, without the final layer.
    """

    layers: int
    rank: int
    fmb_hidden: int
    fmb_outputs: int
    lcb_outputs: int
    top: tuple[int, ...]

    def check(self) -> None:
        """Raise UsageError for widths that cannot be."""
        TowerConfig.check(self)
        for name in ("layers", "rank", "fmb_hidden", "fmb_outputs", "lcb_outputs", "top"):
            check_width(name, getattr(self, name), where="WukongConfig")


WUKONG_PRESETS: dict[str, WukongConfig] = {
    "tiny": WukongConfig(
        dim=16, bottom=(64,), layers=2, rank=16, fmb_hidden=256, fmb_outputs=16, lcb_outputs=16, top=(256,)
    ),
    "small": WukongConfig(
        dim=64,
        bottom=(256, 128),
        layers=3,
        rank=16,
        fmb_hidden=512,
        fmb_outputs=32,
        lcb_outputs=32,
        top=(512, 256),
    ),
    # The paper's smallest scaling point (32 + 32 embeddings, k = 24, h = 2048) at Criteo's 27 embeddings of
    # MLPerf's width 128: 0.43 GFLOP an example, forward and backward.
    "published": WukongConfig(
        dim=128,
        bottom=(512, 256),
        layers=4,
        rank=24,
        fmb_hidden=2048,
        fmb_outputs=32,
        lcb_outputs=32,
        top=(1024, 512),
    ),
}

# The fixed workloads of every speed claim, on 128 and 192 given embeddings and no dense features.
TOWER_M = WukongConfig(
    dim=128, layers=4, rank=24, fmb_hidden=2048, fmb_outputs=32, lcb_outputs=32, top=(2048, 1024)
)
TOWER_L = WukongConfig(
    dim=256, layers=4, rank=32, fmb_hidden=4096, fmb_outputs=64, lcb_outputs=64, top=(4096, 2048)
)


def optimized_fm(x: Tensor, y: Tensor) -> Tensor:
    """X (X^T Y), which is (X X^T) Y without the n x n matrix (section 3): [B, n, d], [B, d, k] -> [B, n, k].

    Args:
        x: Embeddings, [B, n, d].
        y: X^T Y, the embeddings projected over the feature axis, [B, d, k].
    """
    return torch.bmm(x, y)


def _activated(in_features: int, width: int) -> list[nn.Module]:
    return [nn.Linear(in_features, width), NormSwish(width)]


class WukongLayer(nn.Module):
    """LayerNorm(concat(FMB(x), LCB(x)) + residual(x)): [B, n, d] -> [B, fmb_outputs + lcb_outputs, d].

    The three products over the feature axis are linear layers on the transposed x. They have no bias: one
    would be constant over d, and the layer's norm takes the mean over d away.
    """

    def __init__(self, config: WukongConfig, n: int) -> None:
        super().__init__()
        h, outputs = config.fmb_hidden, config.fmb_outputs + config.lcb_outputs
        self.fm_projection = nn.Linear(n, config.rank, bias=False)
        self.fmb = nn.Sequential(
            nn.LayerNorm(n * config.rank),
            *_activated(n * config.rank, h),
            *_activated(h, h),
            nn.Linear(h, config.fmb_outputs * config.dim),
        )
        self.lcb = nn.Linear(n, config.lcb_outputs, bias=False)
        self.residual = nn.Identity() if n == outputs else nn.Linear(n, outputs, bias=False)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, fmb_outputs + lcb_outputs, d]."""
        xt = x.transpose(1, 2).contiguous()
        fm = optimized_fm(x, self.fm_projection(xt).to(x.dtype))
        fmb = self.fmb(fm.flatten(1)).unflatten(1, (-1, x.shape[2]))
        lcb = self.lcb(xt).transpose(1, 2)
        residual = x if isinstance(self.residual, nn.Identity) else self.residual(xt).transpose(1, 2)
        out: Tensor = self.norm(torch.cat([fmb, lcb], dim=1) + residual)
        return out


class WukongTower(nn.Module):
    """Bottom MLP, Wukong layers, top MLP.

    Args:
        config: Sizes.
        dense_features: D; with 0 there is no bottom MLP.
        fields: F; n of the first layer is F, and one more with dense features.
        tasks: T.
    """

    def __init__(self, config: WukongConfig, *, dense_features: int, fields: int, tasks: int) -> None:
        super().__init__()
        self.bottom = DenseRow(dense_features, config.bottom, config.dim) if dense_features else None
        first, rest = fields + (self.bottom is not None), config.fmb_outputs + config.lcb_outputs
        self.layers = nn.Sequential(
            *(WukongLayer(config, rest if i else first) for i in range(config.layers))
        )
        widths = (rest * config.dim, *config.top)
        self.top = nn.Sequential(*(m for a, b in pairwise(widths) for m in _activated(a, b)))
        self.head = LogitHead(widths[-1], tasks)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """(fp32 [B, D], fp32 [B, F, d]) -> fp32 logits [B, T]."""
        x = embedded
        if self.bottom is not None:
            x = torch.cat([self.bottom(dense)[:, None, :].to(x.dtype), x], dim=1)
        out: Tensor = self.head(self.top(self.layers(x).flatten(1)))
        return out
