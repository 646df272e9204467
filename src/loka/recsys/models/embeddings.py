"""The sparse part of a model: one table a field, pooled to one vector a row.

Shapes: B rows, F fields, d width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor, nn

from loka.errors import UsageError
from loka.recsys.batch import FieldSchema, Ids

__all__ = ["Embeddings", "Pooling"]


class Pooling(StrEnum):
    """How the vectors of a row's ids become one. The same for one id a row."""

    SUM = "sum"
    MEAN = "mean"


class Embeddings(nn.Module):
    """Pooled lookups of F id fields: `Ids` -> fp32 [B, F, d].

    A row without ids in a field gets zeros there. Gradients of the tables are sparse
    (torch.sparse_coo, one entry an id), as torch.optim.SparseAdam, Adagrad and SGD take them.

    Args:
        fields: The id fields, in the batch's order; table i is `bags.{i}.weight`, [cardinality, d].
        dim: d.
        pooling: `sum` or `mean`.
    """

    def __init__(self, fields: Sequence[FieldSchema], *, dim: int, pooling: Pooling = Pooling.MEAN) -> None:
        super().__init__()
        self.dim = dim
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(spec.cardinality, dim, mode=str(pooling), sparse=True) for spec in fields
        )

    def forward(self, ids: Ids) -> Tensor:
        """Look up and pool.

        Raises:
            UsageError: if the batch has another number of fields than the model.
        """
        fields, rows = ids.lengths.shape
        if fields != len(self.bags):
            raise UsageError(
                f"the batch has {fields} id fields, the model was built for {len(self.bags)}",
                hint="build the model from the schema of the source that feeds it",
            )
        if not fields:
            return torch.zeros(rows, 0, self.dim, device=ids.lengths.device)
        return torch.stack([bag(*ids.field(i)) for i, bag in enumerate(self.bags)], dim=1)
