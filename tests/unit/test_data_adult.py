"""The Adult census: the shipped file, against its rows read plainly."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data_splits import slow_bucket

from loka.errors import DataError
from loka.recsys.data import open_source
from loka.recsys.data.adult import ADULT_CATEGORIES, ADULT_FILE, ADULT_NUMBERS, AdultSource
from loka.recsys.source import OnBadRow, Split


@pytest.fixture(scope="module")
def table():
    return pq.read_table(ADULT_FILE)


@pytest.fixture(scope="module")
def source():
    return open_source("adult")


def test_counts_and_rates(source):
    counts = {split: source.rows(split) for split in Split}
    assert sum(counts.values()) == 48_842
    labels = {s: [v for b in source.batches(s, 4096) for v in b.label.tolist()] for s in Split}
    assert {s: len(v) for s, v in labels.items()} == counts
    assert sum(map(sum, labels.values())) == 11_687
    assert source.identity() == {"kind": "adult", "path": "adult", "bytes": 401_077, "on_bad_row": "error"}


def test_fields_are_numbered_from_the_training_rows(source, table):
    train = [i for i in range(table.num_rows) if slow_bucket(i) < 8]
    texts = {name: table[name].to_pylist() for name in ADULT_CATEGORIES}
    levels = {name: sorted({column[i] for i in train} - {"?"}) for name, column in texts.items()}
    assert [(f.name, f.cardinality, f.max_length) for f in source.schema.fields] == [
        (name, len(levels[name]) + 1, 1) for name in ADULT_CATEGORIES
    ]
    batch = next(source.batches(Split.TEST, 500))
    batch.check(source.schema)
    for f, name in enumerate(ADULT_CATEGORIES):
        want = [texts[name][row] for row in batch.rows.tolist()]
        got = batch.ids.field(f)[0].tolist()
        assert got == [levels[name].index(t) + 1 if t in levels[name] else 0 for t in want]
    assert 0 in batch.ids.field(0)[0].tolist()  # a `?` is among them


def test_dense_columns_are_standardised_on_training_rows(source, table):
    dense = np.concatenate([b.dense.numpy() for b in source.batches(Split.TRAIN, 4096)]).astype(np.float64)
    np.testing.assert_allclose(dense.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(dense.std(axis=0), 1, atol=1e-5)
    train = np.array([slow_bucket(i) < 8 for i in range(table.num_rows)])
    test = next(source.batches(Split.TEST, 100))
    for d, name in enumerate(ADULT_NUMBERS):
        x = table[name].to_numpy().astype(np.float64)
        if name in ("fnlwgt", "capital-gain", "capital-loss"):
            x = np.log1p(x)
        want = (x[test.rows.numpy()] - x[train].mean()) / x[train].std()
        np.testing.assert_allclose(test.dense[:, d].numpy(), want, rtol=1e-4, atol=1e-5)


def test_the_shipped_file_carries_its_attribution():
    text = (ADULT_FILE.parent / "ADULT_ATTRIBUTION.md").read_text()
    for part in ("Becker", "Kohavi", "10.24432/C5XW20", "CC BY 4.0"):
        assert part in text


def changed(table, name, row, value, kind=None):
    column = table[name].cast(kind).to_pylist() if kind else table[name].to_pylist()
    column[row] = value
    at = table.column_names.index(name)
    return table.set_column(at, name, pa.array(column, type=kind))


@pytest.mark.parametrize(
    ("name", "value", "kind", "reason", "message"),
    [
        ("income", "maybe", None, "bad_label", "income is `maybe`, neither `<=50K` nor `>50K`"),
        ("income", None, None, "bad_label", "income is `None`"),
        ("age", math.nan, pa.float64(), "nan_dense", "dense feature `age` is NaN"),
        ("age", None, None, "missing_value", "column `age` has no value"),
    ],
)
def test_bad_rows(tmp_path, table, name, value, kind, reason, message):
    path = tmp_path / "adult.parquet"
    pq.write_table(changed(table.slice(0, 300), name, 41, value, kind), path)
    with pytest.raises(DataError) as caught:
        open_source(str(path))
    assert str(caught.value).startswith(f"{path}, row 42: {message}")
    source = open_source(str(path), on_bad_row=OnBadRow.SKIP)
    assert isinstance(source, AdultSource)
    rows = [r for split in Split for b in source.batches(split, 64) for r in b.rows.tolist()]
    assert sorted(rows) == [r for r in range(300) if r != 41]
    assert sum(source.rows(split) for split in Split) == 299
    assert source.skipped == {reason: 1}


def test_files_that_are_not_adult(tmp_path, table):
    path = tmp_path / "x.parquet"
    pq.write_table(table.slice(0, 5).drop_columns(["race"]), path)
    with pytest.raises(DataError, match="lacks Adult's column `race`"):
        open_source(f"adult:{path}")
    pq.write_table(table.slice(0, 0), path)
    with pytest.raises(DataError, match="holds no rows"):
        open_source(f"adult:{path}")
    pq.write_table(changed(table.slice(0, 5), "race", 2, b"\xff", pa.binary()), path)
    with pytest.raises(DataError, match="column `race` holds a text that is not UTF-8"):
        open_source(f"adult:{path}")
    text_age = table.slice(0, 5).set_column(0, "age", pa.array(["x"] * 5))
    pq.write_table(text_age, path)
    with pytest.raises(DataError, match="column `age` is of type string, Adult's is numeric"):
        open_source(f"adult:{path}")
    with pytest.raises(DataError, match="no such file"):
        open_source(f"adult:{tmp_path}/none.parquet")
    with pytest.raises(DataError, match="is a directory"):
        open_source(f"adult:{tmp_path}")
