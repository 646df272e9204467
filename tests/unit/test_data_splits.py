"""The split by row number."""

import numpy as np
import pytest
from test_data_hashing import slow_splitmix

from loka.recsys.data.splits import count_in_split, in_split, row_buckets
from loka.recsys.source import Split


def slow_bucket(row: int, salt: int = 0) -> int:
    return ((slow_splitmix(row ^ slow_splitmix(salt)) >> 32) * 10) >> 32


def test_buckets_equal_the_slow_ones():
    rows = np.array([*range(200), 2**40 + 3], dtype=np.int64)
    assert row_buckets(rows).tolist() == [slow_bucket(r) for r in rows.tolist()]
    assert row_buckets(rows, salt=9).tolist() == [slow_bucket(r, 9) for r in rows.tolist()]


def test_the_parts_are_disjoint_complete_and_of_the_right_size():
    rows = np.arange(100_000, dtype=np.int64)
    masks = np.stack([in_split(rows, split) for split in Split])
    assert (masks.sum(axis=0) == 1).all()
    # 5 standard deviations of a binomial share
    for mask, share in zip(masks, (0.8, 0.1, 0.1), strict=True):
        assert abs(mask.mean() - share) < 5 * np.sqrt(share * (1 - share) / len(rows))


def test_a_longer_file_moves_no_row_and_a_salt_moves_many():
    short, long = np.arange(50), np.arange(500)
    assert (in_split(long, Split.TEST)[:50] == in_split(short, Split.TEST)).all()
    differ = (row_buckets(long) != row_buckets(long, salt=1)).mean()
    assert differ == pytest.approx(0.9, abs=0.07)


def test_counting_in_pieces():
    rows = np.arange(1000, dtype=np.int64)
    for split in Split:
        assert count_in_split(1000, split, chunk=64) == in_split(rows, split).sum()
    assert count_in_split(0, Split.TRAIN) == 0
