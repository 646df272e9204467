"""What every reference model is: pooled embeddings, then a dense tower.

Shapes: B rows, D dense features, F id fields, d embedding width, T tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from loka.recsys.batch import Batch, Schema
from loka.recsys.models.embeddings import Embeddings, Pooling
from loka.recsys.models.layers import check_width

__all__ = ["RecModel", "TowerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """What the configurations of all models share.

    Attributes:
        dim: Width d of an embedding.
        bottom: Widths of the MLP on the dense features, before its last layer of width d.
        pooling: How several ids of one field become one vector.
    """

    dim: int
    bottom: tuple[int, ...] = ()
    pooling: Pooling = Pooling.MEAN

    def check(self) -> None:
        """Raise UsageError for widths that cannot be."""
        check_width("dim", self.dim, where=type(self).__name__)
        check_width("bottom", self.bottom, where=type(self).__name__)


class RecModel(nn.Module):
    """A click model: `forward(batch)` gives fp32 logits [B, T].

    Attributes:
        embeddings: The sparse part, `Ids` -> [B, F, d]; its gradients are sparse.
        tower: The dense part, `(dense [B, D], embedded [B, F, d]) -> [B, T]`, with every GEMM of the model.
            It has no data-dependent Python, so `model.tower.compile(fullgraph=True)` works; it runs in fp32,
            under bf16 autocast, or in bf16 with bf16 inputs.
        schema: The columns it was built for.
        config: Its sizes.
    """

    def __init__(self, schema: Schema, config: TowerConfig, tower: nn.Module) -> None:
        super().__init__()
        self.schema = schema
        self.config = config
        self.embeddings = Embeddings(schema.fields, dim=config.dim, pooling=config.pooling)
        self.tower = tower

    def forward(self, batch: Batch) -> Tensor:
        """Logits of a batch, fp32 [B, T], in the order of `schema.tasks`."""
        logits: Tensor = self.tower(batch.dense, self.embeddings(batch.ids))
        return logits

    def sparse_parameters(self) -> Iterator[nn.Parameter]:
        """The embedding tables: for an optimizer that takes sparse gradients."""
        return self.embeddings.parameters()

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """Everything else: for the dense optimizer."""
        return self.tower.parameters()
