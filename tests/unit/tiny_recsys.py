"""A click model and a source that are small enough to reason about, for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from loka.recsys.batch import Batch, FieldSchema, Ids, Schema
from loka.recsys.source import Split

SCHEMA = Schema(("x0", "x1", "x2"), (FieldSchema("user", 40), FieldSchema("items", 60, max_length=3)))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For test modules that import it: on models this small a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TinyModel(nn.Module):
    """Two pooled embeddings and a tower with dropout."""

    def __init__(self, seed: int = 0, *, tasks: int = 1, dropout: float = 0.1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embeddings = nn.ModuleList(
            nn.EmbeddingBag(f.cardinality, 8, mode="sum", sparse=True) for f in SCHEMA.fields
        )
        self.tower = nn.Sequential(
            nn.Linear(3 + 16, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, tasks)
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def forward(self, batch: Batch) -> Tensor:
        pooled = [bag(*batch.ids.field(f)) for f, bag in enumerate(self.embeddings)]
        return self.tower(torch.cat([batch.dense, *pooled], dim=1)).float()

    def sparse_parameters(self) -> Iterator[nn.Parameter]:
        return self.embeddings.parameters()

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        return self.tower.parameters()


class TinySource:
    """Rows in memory, with labels that depend on the features."""

    name = "tiny"

    def __init__(self, *, seed: int = 7, tasks: int = 1, weighted: bool = False, **rows: int) -> None:
        sizes = {"train": 330, "valid": 60, "test": 90} | rows
        names = ("label",) if tasks == 1 else tuple(f"t{t}" for t in range(tasks))
        self.schema = Schema(SCHEMA.dense, SCHEMA.fields, names)
        self.seed = seed
        self._rows = {Split(k): v for k, v in sizes.items()}
        generator = torch.Generator().manual_seed(seed)
        total = sum(sizes.values())
        self._dense = torch.randn(total, 3, generator=generator)
        self._user = torch.randint(40, (total,), generator=generator)
        self._lengths = torch.randint(0, 4, (total,), generator=generator)
        self._items = torch.randint(60, (total, 3), generator=generator)
        logit = 1.5 * self._dense[:, :1] - 1 + 0.5 * self._dense[:, 1:2] * torch.arange(1, tasks + 1)
        self._labels = (torch.rand(total, tasks, generator=generator) < logit.sigmoid()).float()
        self._weights = torch.rand(total, generator=generator) + 0.5 if weighted else None

    def batches(self, split: Split, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        splits = list(self._rows)
        start = sum(self._rows[s] for s in splits[: splits.index(split)])
        stop = start + self._rows[split]
        for first in range(start + skip * batch_size, stop, batch_size):
            yield self._batch(slice(first, min(first + batch_size, stop)))

    def _batch(self, part: slice) -> Batch:
        lengths = self._lengths[part]
        kept = torch.arange(3)[None, :] < lengths[:, None]
        values = torch.cat([self._user[part], self._items[part][kept]])
        ids = Ids.of(values, torch.stack([torch.ones_like(lengths), lengths]))
        labels = self._labels[part]
        label = labels[:, 0] if labels.shape[1] == 1 else dict(zip(self.schema.tasks, labels.T, strict=True))
        weight = None if self._weights is None else self._weights[part]
        return Batch(self._dense[part], ids, label, weight, torch.arange(part.start, part.stop))

    def rows(self, split: Split) -> int | None:
        return self._rows[split]

    @property
    def skipped(self) -> dict[str, int]:
        return {}

    def identity(self) -> dict[str, str | int | float]:
        return {"seed": self.seed, "rows": sum(self._rows.values())}
