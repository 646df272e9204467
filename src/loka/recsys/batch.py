"""One batch of click-log rows, and the schema that says what its columns are.

Shapes: B rows, D dense features, F id fields, T tasks. Ids are jagged and field-major, as in TorchRec's
KeyedJaggedTensor: all rows of field 0, then all rows of field 1, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from loka.errors import UsageError

__all__ = ["Batch", "FieldSchema", "Ids", "Schema"]


@dataclass(frozen=True, slots=True)
class FieldSchema:
    """One id field.

    Attributes:
        name: Column name.
        cardinality: Ids lie in [0, cardinality); by convention 0 stands for "missing or unknown".
        max_length: Most ids a row can carry; 1 for a one-hot field.
    """

    name: str
    cardinality: int
    max_length: int = 1


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a source."""

    dense: tuple[str, ...]
    fields: tuple[FieldSchema, ...]
    tasks: tuple[str, ...] = ("label",)


@dataclass(frozen=True, slots=True)
class Ids:
    """Jagged ids of F fields over B rows.

    Attributes:
        values: int64 [total], field-major.
        lengths: int64 [F, B].
        starts: F + 1 positions on the host; field f owns values[starts[f]:starts[f + 1]].
    """

    values: Tensor
    lengths: Tensor
    starts: tuple[int, ...]

    @classmethod
    def of(cls, values: Tensor, lengths: Tensor) -> Ids:
        """Build from values and lengths; checks that they agree.

        Raises:
            UsageError: if the lengths do not add up to the number of values.
        """
        per_field = [int(v) for v in lengths.sum(dim=1).tolist()]
        starts = [0]
        for count in per_field:
            starts.append(starts[-1] + count)
        if starts[-1] != values.numel():
            raise UsageError(f"lengths add up to {starts[-1]} ids, values hold {values.numel()}")
        return cls(values, lengths, tuple(starts))

    def field(self, index: int) -> tuple[Tensor, Tensor]:
        """(values, offsets) of one field; offsets int64 [B], as nn.EmbeddingBag takes them."""
        values = self.values[self.starts[index] : self.starts[index + 1]]
        lengths = self.lengths[index]
        return values, lengths.cumsum(0) - lengths

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Ids:
        """A copy on another device."""
        return Ids(
            self.values.to(device, non_blocking=non_blocking),
            self.lengths.to(device, non_blocking=non_blocking),
            self.starts,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of a click log.

    Attributes:
        dense: float32 [B, D].
        ids: Jagged ids, F fields.
        label: float32 [B], or one such tensor for each task.
        weight: float32 [B], or None for 1 everywhere.
        rows: int64 [B], the row numbers in the source; they identify predictions.
    """

    dense: Tensor
    ids: Ids
    label: Tensor | Mapping[str, Tensor]
    weight: Tensor | None = None
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __len__(self) -> int:
        return int(self.dense.shape[0])

    @property
    def labels(self) -> Tensor:
        """float32 [B, T]; T = 1 for a single label."""
        if isinstance(self.label, Mapping):
            return torch.stack(list(self.label.values()), dim=1)
        return self.label[:, None]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """A copy on another device."""

        def move(t: Tensor) -> Tensor:
            return t.to(device, non_blocking=non_blocking)

        label = (
            {k: move(v) for k, v in self.label.items()}
            if isinstance(self.label, Mapping)
            else move(self.label)
        )
        weight = None if self.weight is None else move(self.weight)
        return Batch(
            move(self.dense), self.ids.to(device, non_blocking=non_blocking), label, weight, move(self.rows)
        )

    def check(self, schema: Schema) -> None:
        """Raise UsageError if shapes or id ranges do not fit the schema (for tests and new readers)."""
        B, F = len(self), len(schema.fields)
        if self.dense.shape != (B, len(schema.dense)):
            raise UsageError(f"dense is {tuple(self.dense.shape)}, expected {(B, len(schema.dense))}")
        if self.ids.lengths.shape != (F, B):
            raise UsageError(f"lengths is {tuple(self.ids.lengths.shape)}, expected {(F, B)}")
        for spec, (start, stop) in zip(schema.fields, pairwise(self.ids.starts), strict=True):
            values = self.ids.values[start:stop]
            if values.numel() and (int(values.min()) < 0 or int(values.max()) >= spec.cardinality):
                raise UsageError(f"field `{spec.name}` holds ids outside [0, {spec.cardinality})")
