"""DCN-V2: cross layers, full or low-rank, beside or below a deep part.

Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank
Systems", arXiv 2008.13535 (WWW 2021), equations 1 (full) and 3 (low rank), figure 1 (stacked, parallel).

Shapes: B rows, n embeddings a row (the fields, and the dense features as one more), d their width, X = n d,
T tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from loka.recsys.models.base import TowerConfig
from loka.recsys.models.embeddings import Pooling
from loka.recsys.models.layers import MLP, DenseRow, LogitHead, check_width

__all__ = ["DCNV2_PRESETS", "CrossLayer", "DCNv2Config", "DCNv2Tower", "Structure"]


class Structure(StrEnum):
    """Where the deep part stands: on the cross layers' output, or beside them on their input."""

    STACKED = "stacked"
    PARALLEL = "parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class DCNv2Config(TowerConfig):
    """Sizes of a DCN-V2.

    Attributes:
        cross_layers: Number of cross layers.
        rank: Rank of a cross layer's matrix; None for a full one.
        deep: Widths of the deep part.
        structure: Deep part stacked on the cross layers, or parallel to them.
    """

    cross_layers: int
    rank: int | None
    deep: tuple[int, ...]
    structure: Structure = Structure.STACKED

    def check(self) -> None:
        """Raise UsageError for widths that cannot be."""
        TowerConfig.check(self)
        check_width("cross_layers", self.cross_layers, where="DCNv2Config")
        check_width("rank", () if self.rank is None else self.rank, where="DCNv2Config")
        check_width("deep", self.deep, where="DCNv2Config")


DCNV2_PRESETS: dict[str, DCNv2Config] = {
    "tiny": DCNv2Config(
        dim=16, bottom=(64,), cross_layers=2, rank=None, deep=(128, 64), structure=Structure.PARALLEL
    ),
    "small": DCNv2Config(dim=64, bottom=(256, 128), cross_layers=3, rank=128, deep=(512, 256, 128)),
    # MLPerf DLRM-DCNv2 on Criteo Terabyte: bottom 13-512-256-128, stacked on three crosses of rank 512 over
    # 27 * 128.
    "published": DCNv2Config(
        dim=128, bottom=(512, 256), cross_layers=3, rank=512, deep=(1024, 1024, 512, 256), pooling=Pooling.SUM
    ),
}


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x, elementwise product; with a rank, W = U V (equations 1 and 3).

    Args:
        width: X, the width of x0 and x.
        rank: Rank of W; None for a full matrix.
    """

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        self.down = None if rank is None else nn.Linear(width, rank, bias=False)
        self.linear = nn.Linear(rank or width, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """([B, X], [B, X]) -> [B, X]."""
        out: Tensor = x0 * self.linear(x if self.down is None else self.down(x)) + x
        return out


class DCNv2Tower(nn.Module):
    """Bottom MLP, cross layers and a deep part.

    Args:
        config: Sizes.
        dense_features: D; with 0 there is no bottom MLP.
        fields: F.
        tasks: T.
    """

    def __init__(self, config: DCNv2Config, *, dense_features: int, fields: int, tasks: int) -> None:
        super().__init__()
        self.bottom = DenseRow(dense_features, config.bottom, config.dim) if dense_features else None
        width = (fields + (self.bottom is not None)) * config.dim
        self.stacked = config.structure is Structure.STACKED
        self.crosses = nn.ModuleList(CrossLayer(width, config.rank) for _ in range(config.cross_layers))
        self.deep = MLP(width, config.deep)
        self.head = LogitHead(self.deep.out_features + (0 if self.stacked else width), tasks)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """(fp32 [B, D], fp32 [B, F, d]) -> fp32 logits [B, T]."""
        x0 = embedded.flatten(1)
        if self.bottom is not None:
            x0 = torch.cat([self.bottom(dense).to(x0.dtype), x0], dim=1)
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        if self.stacked:
            out: Tensor = self.head(self.deep(x))
        else:
            out = self.head(torch.cat([x, self.deep(x0).to(x.dtype)], dim=1))
        return out
