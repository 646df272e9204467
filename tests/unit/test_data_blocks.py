"""Blocks into batches: against lists of rows, whatever the sizes of blocks and batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.errors import DataError, UsageError
from loka.recsys.batch import FieldSchema, Schema
from loka.recsys.data.blocks import Block, BlockSource, IdColumn
from loka.recsys.data.splits import in_split
from loka.recsys.source import OnBadRow, Split

SCHEMA = Schema(("d0", "d1"), (FieldSchema("one", 1000), FieldSchema("many", 1000, 4)), ("click", "buy"))


class CountingSource(BlockSource):
    """Row r: dense (r, -r), id r % 1000 once and r % 4 times, labels (r % 2, r % 3 == 0), weight r / 2."""

    def __init__(self, block_sizes):
        super().__init__("counting", SCHEMA, on_bad_row=OnBadRow.ERROR)
        self.block_sizes = block_sizes

    def identity(self):
        return {"path": "nowhere"}

    def _blocks(self):
        start = 0
        for size in self.block_sizes:
            rows = np.arange(start, start + size, dtype=np.int64)
            many = [[r % 1000] * (r % 4) for r in rows.tolist()]
            offsets = np.cumsum([0, *map(len, many)])
            values = np.array([v for ids in many for v in ids], dtype=np.int64)
            labels = np.stack([rows % 2, rows % 3 == 0], axis=1).astype(np.float32)
            dense = np.stack([rows, -rows], axis=1).astype(np.float32)
            ids = (IdColumn(rows % 1000), IdColumn(values, offsets))
            yield Block(rows, dense, ids, labels, (rows / 2).astype(np.float32))
            start += size


def check_batch(batch, rows):
    batch.check(SCHEMA)
    assert batch.rows.tolist() == rows
    assert batch.dense.tolist() == [[r, -r] for r in rows]
    assert batch.ids.lengths.tolist() == [[1] * len(rows), [r % 4 for r in rows]]
    assert batch.ids.values.tolist() == [r % 1000 for r in rows] + [
        r % 1000 for r in rows for _ in range(r % 4)
    ]
    assert list(batch.label) == ["click", "buy"]
    assert batch.labels.tolist() == [[r % 2, r % 3 == 0] for r in rows]
    assert batch.weight.tolist() == [r / 2 for r in rows]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(1, 50),
    st.integers(0, 4),
    st.sampled_from(list(Split)),
)
def test_batches_are_exact_for_any_sizes(block_sizes, batch_size, skip, split):
    rows = np.arange(sum(block_sizes))
    rows = rows[in_split(rows, split)].tolist()
    want = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)][skip:]
    got = list(CountingSource(block_sizes).batches(split, batch_size, skip=skip))
    assert len(got) == len(want)
    for batch, expected in zip(got, want, strict=True):
        check_batch(batch, expected)


def test_a_batch_changed_in_place_reaches_no_other():
    source = CountingSource([100])
    first, second = list(source.batches(Split.TRAIN, 20))[:2]
    second_dense = second.dense.clone()
    for tensor in (first.dense, first.ids.values, first.rows, first.label["click"]):
        tensor.zero_()
    assert torch.equal(second.dense, second_dense)
    assert first.dense.untyped_storage().nbytes() == 20 * 2 * 4


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=12), st.data())
def test_id_columns_behave_as_lists_of_lists(lists, data):
    offsets = np.cumsum([0, *map(len, lists)])
    column = IdColumn(np.array([v for ids in lists for v in ids], dtype=np.int64), offsets)

    def unpack(c):
        ends = np.cumsum(c.lengths())
        return [c.values[e - n : e].tolist() for e, n in zip(ends, c.lengths(), strict=True)]

    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=12))
    start = data.draw(st.integers(0, len(lists)))
    stop = data.draw(st.integers(start, len(lists)))
    assert unpack(column.take(np.array(rows, dtype=np.int64))) == [lists[r] for r in rows]
    assert unpack(column.slice(start, stop)) == lists[start:stop]
    single = IdColumn(np.array([5, 6]))
    assert unpack(IdColumn.concat([column, single])) == [*lists, [5], [6]]


def test_no_row_at_all_is_an_error():
    with pytest.raises(DataError, match="no row of nowhere can be read"):
        list(CountingSource([]).batches(Split.TRAIN, 4))


@pytest.mark.parametrize(("batch_size", "skip"), [(0, 0), (4, -1)])
def test_impossible_sizes_are_refused_at_once(batch_size, skip):
    with pytest.raises(UsageError, match="batch_size must be >= 1 and skip >= 0"):
        CountingSource([3]).batches(Split.TRAIN, batch_size, skip=skip)
