"""Which rows are for training, which choose, which judge: decided by the row number alone.

Row r belongs to bucket b = floor(10 * u), u = (high 32 bits of splitmix64(r ^ splitmix64(salt))) / 2**32;
buckets 0 to 7 train (80 %), 8 is validation, 9 is test. No count, no shuffle and no state is needed, so a
stream can be split while it passes, every pass gives the same parts, and rows appended to a file move no
other row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loka.recsys.data.hashing import splitmix64
from loka.recsys.source import Split

__all__ = ["count_in_split", "in_split", "row_buckets"]

_BUCKETS = {Split.TRAIN: (0, 8), Split.VALID: (8, 9), Split.TEST: (9, 10)}


def row_buckets(rows: NDArray[np.int64], *, salt: int = 0) -> NDArray[np.int64]:
    """The bucket 0 to 9 of each row number.

    Args:
        rows: int64 [n], row numbers.
        salt: Another salt gives another, independent split.

    Returns:
        int64 [n].
    """
    key = splitmix64(np.array([salt & (2**64 - 1)], dtype=np.uint64))
    mixed = splitmix64(rows.astype(np.uint64) ^ key)
    return (((mixed >> np.uint64(32)) * np.uint64(10)) >> np.uint64(32)).astype(np.int64)


def in_split(rows: NDArray[np.int64], split: Split, *, salt: int = 0) -> NDArray[np.bool_]:
    """Which of the row numbers belong to the split; bool [n]."""
    low, high = _BUCKETS[split]
    buckets = row_buckets(rows, salt=salt)
    return np.asarray((buckets >= low) & (buckets < high), dtype=np.bool_)


def count_in_split(total: int, split: Split, *, salt: int = 0, chunk: int = 1 << 20) -> int:
    """How many of the rows 0 .. total - 1 belong to the split, in memory bounded by `chunk` rows."""
    count = 0
    for start in range(0, total, chunk):
        rows = np.arange(start, min(start + chunk, total), dtype=np.int64)
        count += int(in_split(rows, split, salt=salt).sum())
    return count
