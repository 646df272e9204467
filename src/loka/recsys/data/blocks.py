"""Blocks of rows as readers produce them, and the one place where blocks become batches.

Shapes: n rows of a block, D dense features, F id fields, T tasks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loka.errors import DataError, UsageError
from loka.recsys.batch import Batch, Ids, Schema
from loka.recsys.data.bad_rows import BadRows
from loka.recsys.data.splits import in_split
from loka.recsys.source import OnBadRow, Split

__all__ = ["Block", "BlockSource", "IdColumn"]


@dataclass(frozen=True, slots=True)
class IdColumn:
    """The ids of one field.

    Attributes:
        values: int64 [total].
        offsets: int64 [n + 1], row i owns values[offsets[i]:offsets[i + 1]]; None where each row has one id.
    """

    values: NDArray[np.int64]
    offsets: NDArray[np.int64] | None = None

    def lengths(self) -> NDArray[np.int64]:
        """Ids a row; int64 [n]."""
        return np.ones(len(self.values), dtype=np.int64) if self.offsets is None else np.diff(self.offsets)

    def take(self, rows: NDArray[np.int64]) -> IdColumn:
        """The given rows (positions in the block), in that order."""
        if self.offsets is None:
            return IdColumn(self.values[rows])
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        return IdColumn(self.values[np.repeat(self.offsets[:-1][rows], lengths) + within], offsets)

    def slice(self, start: int, stop: int) -> IdColumn:
        """Rows start to stop, sharing memory."""
        if self.offsets is None:
            return IdColumn(self.values[start:stop])
        offsets = self.offsets[start : stop + 1]
        return IdColumn(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    @staticmethod
    def concat(parts: Sequence[IdColumn]) -> IdColumn:
        """One column after another."""
        values = np.concatenate([p.values for p in parts])
        if all(p.offsets is None for p in parts):
            return IdColumn(values)
        lengths = np.concatenate([p.lengths() for p in parts])
        return IdColumn(values, np.concatenate([[0], np.cumsum(lengths)]))


@dataclass(frozen=True, slots=True)
class Block:
    """n rows in numpy arrays.

    Attributes:
        rows: int64 [n], row numbers in the source.
        dense: float32 [n, D].
        ids: One column for each field.
        labels: float32 [n, T].
        weight: float32 [n], or None.
    """

    rows: NDArray[np.int64]
    dense: NDArray[np.float32]
    ids: tuple[IdColumn, ...]
    labels: NDArray[np.float32]
    weight: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: NDArray[np.int64]) -> Block:
        """The rows at these positions."""
        weight = None if self.weight is None else self.weight[rows]
        ids = tuple(column.take(rows) for column in self.ids)
        return Block(self.rows[rows], self.dense[rows], ids, self.labels[rows], weight)

    def slice(self, start: int, stop: int) -> Block:
        """Rows start to stop, sharing memory."""
        weight = None if self.weight is None else self.weight[start:stop]
        ids = tuple(column.slice(start, stop) for column in self.ids)
        return Block(self.rows[start:stop], self.dense[start:stop], ids, self.labels[start:stop], weight)

    @staticmethod
    def concat(parts: Sequence[Block]) -> Block:
        """One block after another."""
        ids = tuple(IdColumn.concat(columns) for columns in zip(*(p.ids for p in parts), strict=True))
        weights = [p.weight for p in parts if p.weight is not None]
        return Block(
            np.concatenate([p.rows for p in parts]),
            np.concatenate([p.dense for p in parts]),
            ids,
            np.concatenate([p.labels for p in parts]),
            np.concatenate(weights) if weights else None,
        )

    def batch(self, tasks: Sequence[str]) -> Batch:
        """The rows as tensors with memory of their own."""
        # torch.tensor and concatenate copy: a batch that is changed in place must not reach its neighbours.
        empty = np.empty(0, dtype=np.int64)
        values = np.concatenate([empty, *(column.values for column in self.ids)])
        lengths = (
            np.stack([column.lengths() for column in self.ids]) if self.ids else empty.reshape(0, len(self))
        )
        per_task = [torch.tensor(self.labels[:, t]) for t in range(len(tasks))]
        return Batch(
            torch.tensor(self.dense),
            Ids.of(torch.from_numpy(values), torch.from_numpy(lengths)),
            per_task[0] if len(tasks) == 1 else dict(zip(tasks, per_task, strict=True)),
            None if self.weight is None else torch.tensor(self.weight),
            torch.tensor(self.rows),
        )


class BlockSource(ABC):
    """A source whose reader makes blocks; splitting, batching, skipping and counting are done here, once.

    Args:
        name: The source's name in messages and records.
        schema: Its columns.
        on_bad_row: What to do with rows that cannot be read.
    """

    def __init__(self, name: str, schema: Schema, *, on_bad_row: OnBadRow) -> None:
        self.name = name
        self.schema = schema
        self._bad_rows = BadRows(on_bad_row)

    @abstractmethod
    def _blocks(self) -> Iterator[Block]:
        """All rows once, in the source's order, in blocks of bounded size."""

    @abstractmethod
    def identity(self) -> dict[str, str | int | float]:
        """What makes two sources the same rows."""

    def rows(self, split: Split) -> int | None:
        """How many rows the split has, or None: not known without reading all of it."""
        del split
        return None

    @property
    def skipped(self) -> dict[str, int]:
        """Bad rows left out so far by reason, each counted once however many passes met it."""
        return self._bad_rows.counts

    def batches(self, split: Split, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        """Batches of one split; see `Source.batches`.

        Raises:
            UsageError: if batch_size < 1 or skip < 0.
            DataError: for rows that cannot be read, and where no row can.
        """
        if batch_size < 1 or skip < 0:
            raise UsageError(f"batch_size must be >= 1 and skip >= 0, got {batch_size} and {skip}")
        return self._cut(split, batch_size, skip * batch_size)

    def _cut(self, split: Split, batch_size: int, drop: int) -> Iterator[Batch]:
        pending: list[Block] = []
        held = 0
        for block in self._split_blocks(split):
            dropped = min(drop, len(block))
            drop -= dropped
            if dropped == len(block):
                continue
            pending.append(block.slice(dropped, len(block)))
            held += len(pending[-1])
            if held < batch_size:
                continue
            whole = Block.concat(pending)
            full = held - held % batch_size
            for start in range(0, full, batch_size):
                yield whole.slice(start, start + batch_size).batch(self.schema.tasks)
            pending = [whole.slice(full, held)] if full < held else []
            held -= full
        if pending:
            yield Block.concat(pending).batch(self.schema.tasks)

    def _split_blocks(self, split: Split) -> Iterator[Block]:
        read = 0
        for block in self._blocks():
            read += len(block)
            kept = np.flatnonzero(in_split(block.rows, split))
            if len(kept):
                yield block.take(kept)
        if read == 0:
            left_out = ", ".join(f"{n} {reason}" for reason, n in self.skipped.items())
            raise DataError(
                f"no row of {self.identity()['path']} can be read"
                + (f": left out {left_out}" if left_out else ""),
                hint=f"is it of kind `{self.name}`? run without --on-bad-row skip to see the first bad row",
            )
