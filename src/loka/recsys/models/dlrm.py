"""DLRM: dot products of all pairs of embeddings.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv 1906.00091 (2019), section 2.

Shapes: B rows, n embeddings a row (the fields, and the dense features as one more), d their width, T tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.recsys.models.base import TowerConfig
from loka.recsys.models.embeddings import Pooling
from loka.recsys.models.layers import MLP, DenseRow, LogitHead, check_width

__all__ = ["DLRM_PRESETS", "DLRMConfig", "DLRMTower", "dot_interaction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRMConfig(TowerConfig):
    """Sizes of a DLRM.

    Attributes:
        top: Widths of the MLP after the interaction, without the final layer.
        pad_to: The interaction's output is zero-padded to a multiple of this, so that the first GEMM of the
            top suits FP8; 1 leaves it as published.
    """

    top: tuple[int, ...]
    pad_to: int = 16

    def check(self) -> None:
        """Raise UsageError for widths that cannot be."""
        TowerConfig.check(self)
        check_width("top", self.top, where="DLRMConfig")
        check_width("pad_to", self.pad_to, where="DLRMConfig")


DLRM_PRESETS: dict[str, DLRMConfig] = {
    "tiny": DLRMConfig(dim=16, bottom=(64,), top=(128, 64)),
    "small": DLRMConfig(dim=64, bottom=(256, 128), top=(512, 256, 128)),
    # MLPerf DLRM v1 on Criteo Terabyte: bottom 13-512-256-128, top 479-1024-1024-512-256-1.
    "published": DLRMConfig(
        dim=128, bottom=(512, 256), top=(1024, 1024, 512, 256), pad_to=1, pooling=Pooling.SUM
    ),
}


def dot_interaction(x: Tensor) -> Tensor:
    """Dot products of all pairs i > j of the n vectors of each row: [B, n, d] -> [B, n (n - 1) / 2].

    Row-major over the lower triangle: (1, 0), (2, 0), (2, 1), (3, 0), ...
    """
    n = x.shape[1]
    dots = torch.bmm(x, x.transpose(1, 2))
    row, column = torch.tril_indices(n, n, offset=-1, device=x.device)
    # index_select has a cheaper backward than indexing with two tensors.
    return dots.flatten(1).index_select(1, row * n + column)


class DLRMTower(nn.Module):
    """Bottom MLP, pairwise dot interaction, top MLP.

    Args:
        config: Sizes.
        dense_features: D; with 0 there is no bottom MLP, and the top sees the dot products only.
        fields: F.
        tasks: T.
    """

    def __init__(self, config: DLRMConfig, *, dense_features: int, fields: int, tasks: int) -> None:
        super().__init__()
        self.bottom = DenseRow(dense_features, config.bottom, config.dim) if dense_features else None
        n = fields + (self.bottom is not None)
        width = n * (n - 1) // 2 + (config.dim if self.bottom is not None else 0)
        self.padding = -width % config.pad_to
        self.top = MLP(width + self.padding, config.top)
        self.head = LogitHead(self.top.out_features, tasks)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """(fp32 [B, D], fp32 [B, F, d]) -> fp32 logits [B, T]."""
        if self.bottom is None:
            z = dot_interaction(embedded)
        else:
            row = self.bottom(dense)
            x = torch.cat([row[:, None, :].to(embedded.dtype), embedded], dim=1)
            z = torch.cat([row, dot_interaction(x).to(row.dtype)], dim=1)
        out: Tensor = self.head(self.top(nn.functional.pad(z, (0, self.padding))))
        return out
