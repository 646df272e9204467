"""What a data source is: rows in a fixed order, in bounded memory, split into train, valid and test."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Protocol

from loka.recsys.batch import Batch, Schema

__all__ = ["OnBadRow", "Source", "Split"]


class Split(StrEnum):
    """Disjoint parts of a source. Validation rows choose; test rows only judge."""

    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


class OnBadRow(StrEnum):
    """What a reader does with a row that cannot be read."""

    ERROR = "error"
    SKIP = "skip"


class Source(Protocol):
    """A click log."""

    name: str
    schema: Schema

    def batches(self, split: Split, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        """Batches of one split in the source's order, the last one possibly smaller, never empty.

        Args:
            split: Which rows.
            batch_size: Rows a batch.
            skip: Leave out this many batches at the front: the batches after them are bitwise those of a
                call with skip=0, so that a run can resume.
        """
        ...

    def rows(self, split: Split) -> int | None:
        """How many rows the split has, or None where that is not known without reading all of it."""
        ...

    @property
    def skipped(self) -> dict[str, int]:
        """Bad rows left out so far by reason, under `OnBadRow.SKIP`; empty otherwise."""
        ...

    def identity(self) -> dict[str, str | int | float]:
        """What makes two sources the same rows (path, size, seed, ...), kept in every run's record."""
        ...
