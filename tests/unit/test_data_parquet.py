"""Parquet with any columns: roles, values and what can be wrong, against plain Python lists."""

import decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data_hashing import slow_id
from test_data_splits import slow_bucket

from loka.errors import DataError, UnknownNameError, UsageError
from loka.recsys.data import open_source
from loka.recsys.data.splits import in_split
from loka.recsys.source import OnBadRow, Split

N = 400


def columns():
    return {
        "label": pa.array([i % 2 for i in range(N)], type=pa.int8()),
        "price": pa.array([None if i % 7 == 0 else i / 4 for i in range(N)]),
        "count": pa.array(range(N), type=pa.int32()),
        "flag": pa.array([i % 3 == 0 for i in range(N)]),
        "cost": pa.array([decimal.Decimal(i) / 4 for i in range(N)], type=pa.decimal128(9, 2)),
        "brand": pa.array([None if i % 5 == 0 else f"b{i % 11}" for i in range(N)]),
        "shop": pa.array([f"s{i % 3}" for i in range(N)]).dictionary_encode(),
        "tags": pa.array([None if i % 6 == 0 else [f"t{j}" for j in range(i % 4)] for i in range(N)]),
        "seen": pa.array([[j + i for j in range(i % 5)] for i in range(N)], type=pa.list_(pa.int64())),
    }


def write(path, table, **options):
    pq.write_table(pa.table(table), path, **options)
    return str(path)


def read(source, batch_size=64):
    """{row: (dense, ids per field, labels, weight)} over all splits."""
    rows = {}
    for split in Split:
        for batch in source.batches(split, batch_size):
            batch.check(source.schema)
            fields = [batch.ids.field(f) for f in range(len(source.schema.fields))]
            for i, row in enumerate(batch.rows.tolist()):
                ids = [
                    values[offsets[i] : offsets[i + 1] if i + 1 < len(batch) else None].tolist()
                    for values, offsets in fields
                ]
                weight = None if batch.weight is None else float(batch.weight[i])
                rows[row] = (batch.dense[i].tolist(), ids, batch.labels[i].tolist(), weight)
                assert in_split(batch.rows.numpy()[i : i + 1], split).all()
    return rows


def test_roles_follow_from_types(tmp_path):
    table = columns()
    source = open_source(write(tmp_path / "log.parquet", table, row_group_size=90))
    assert source.schema.dense == ("price", "count", "flag", "cost")
    assert [(f.name, f.max_length) for f in source.schema.fields] == [
        ("brand", 1),
        ("shop", 1),
        ("tags", 64),
        ("seen", 64),
    ]
    rows = read(source)
    assert sorted(rows) == list(range(N))
    plain = {name: column.to_pylist() for name, column in table.items()}
    for i, (dense, ids, labels, weight) in rows.items():
        assert dense == [plain["price"][i] or 0, i, float(i % 3 == 0), i / 4]
        brand = plain["brand"][i]
        assert ids == [
            [slow_id(brand, "brand", 65_536) if brand else 0],
            [slow_id(plain["shop"][i], "shop", 65_536)],
            [slow_id(t, "tags", 65_536) for t in plain["tags"][i] or []],
            [slow_id(t, "seen", 65_536) for t in plain["seen"][i]],
        ]
        assert labels == [i % 2]
        assert weight is None
    for split in Split:
        assert source.rows(split) == sum(in_split_of(i, split) for i in range(N))


def in_split_of(row, split):
    return {
        Split.TRAIN: slow_bucket(row) < 8,
        Split.VALID: slow_bucket(row) == 8,
        Split.TEST: slow_bucket(row) == 9,
    }[split]


def test_options_choose_the_roles(tmp_path):
    path = write(tmp_path / "log.parquet", columns())
    spec = (
        f"parquet:{path}?label=flag,label&ids=count&drop=cost,tags&weight=price"
        "&cardinality=100&max_length=2&transform=log1p"
    )
    source = open_source(spec)
    assert source.schema.tasks == ("flag", "label")
    assert source.schema.dense == ()
    assert [f.name for f in source.schema.fields] == ["count", "brand", "shop", "seen"]
    with pytest.raises(DataError, match="row 1: column `price` has no value"):
        read(source)
    rows = read(open_source(spec, on_bad_row=OnBadRow.SKIP))
    assert sorted(rows) == [i for i in range(N) if i % 7]
    _, ids, labels, weight = rows[13]
    assert ids[0] == [slow_id(13, "count", 100)]
    assert ids[3] == [slow_id(13, "seen", 100), slow_id(14, "seen", 100)]
    assert labels == [0, 1]
    assert weight == 13 / 4
    identity = source.identity()
    assert identity["label"] == "flag,label"
    assert identity["ids"] == "count,brand,shop,seen"
    assert identity["weight"] == "price"


def test_several_files_are_one_log(tmp_path):
    table = pa.table(columns())
    for k, part in enumerate((table.slice(0, 150), table.slice(150))):
        pq.write_table(part, tmp_path / f"part_{k}.parquet")
    both = read(open_source(f"parquet:{tmp_path}/part_*.parquet"))
    assert both == read(open_source(write(tmp_path / "whole.parquet", columns())))
    write(tmp_path / "part_2.parquet", {"label": [0, 1], "price": [1.0, 2.0]})
    with pytest.raises(DataError, match=r"part_2.parquet: its columns are not those of .*part_0.parquet"):
        open_source(f"parquet:{tmp_path}/part_*.parquet")


@pytest.mark.parametrize(
    ("name", "value", "reason", "message"),
    [
        ("price", float("nan"), "nan_dense", "dense feature `price` is NaN"),
        (
            "price",
            float("-inf"),
            "infinite_dense",
            "dense feature `price` is -inf, beyond the range of float32",
        ),
        ("price", 1e39, "infinite_dense", "dense feature `price` is 1e+39, beyond the range of float32"),
        ("label", 2, "bad_label", "label `label` is 2.0, neither 0 nor 1"),
        ("label", None, "bad_label", "label `label` is None, neither 0 nor 1"),
    ],
)
def test_bad_rows_are_named_or_counted(tmp_path, name, value, reason, message):
    table = {"price": [1.0] * 50, "label": [0.0, 1.0] * 25}
    table[name][30] = value
    one = write(tmp_path / "a.parquet", {"price": [1.0], "label": [1.0]})
    path = write(tmp_path / "b.parquet", table)
    spec = f"parquet:{one},{path}"
    with pytest.raises(DataError) as caught:
        read(open_source(spec))
    assert str(caught.value).startswith(f"{path}, row 31: {message}\n\nhint: ")
    source = open_source(spec, on_bad_row=OnBadRow.SKIP)
    assert source.rows(Split.TRAIN) is None
    assert sorted(read(source)) == [r for r in range(51) if r != 31]
    assert source.skipped == {reason: 1}


def test_options_that_do_not_fit(tmp_path):
    path = write(tmp_path / "log.parquet", columns() | {"when": pa.array([0] * N, type=pa.timestamp("s"))})
    cases = {
        "": (DataError, r"column `when` of type timestamp\[ms\] cannot be read"),
        "drop=when&label=lable": (UnknownNameError, "unknown label column `lable`.*did you mean `label`"),
        "drop=when&dense=brand": (DataError, "column `brand` of type string cannot be dense"),
        "drop=when&ids=price": (DataError, "column `price` of type double cannot be ids"),
        "drop=when,price&ids=price": (UsageError, "column `price` is named both as ids and as drop"),
        "drop=when&cardinality=1": (UsageError, "cardinality 1 of field `brand`"),
        "drop=when&max_length=0": (UsageError, "max_length must be >= 1"),
    }
    for query, (kind, message) in cases.items():
        with pytest.raises(kind, match=f"(?s){message}"):
            open_source(f"parquet:{path}?{query}")


def test_files_that_are_no_parquet(tmp_path):
    write(tmp_path / "one.parquet", columns())
    whole = (tmp_path / "one.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.parquet").write_text("label,price\n")
    (tmp_path / "empty.parquet").touch()
    write(tmp_path / "no_rows.parquet", {"label": pa.array([], pa.int8()), "x": pa.array([], pa.int8())})
    twice = pa.table([pa.array([1]), pa.array([1]), pa.array([0])], names=["x", "x", "label"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    for name, message in {
        "twice": "has two columns `x`",
        "cut": "cannot be read as Parquet",
        "text": "cannot be read as Parquet",
        "empty": "is empty",
        "missing": "no such file",
        "no_rows": "holds no rows",
    }.items():
        for prefix in ("parquet:", ""):
            with pytest.raises(DataError, match=rf"{name}\.parquet: {message}"):
                open_source(f"{prefix}{tmp_path}/{name}.parquet")
    with pytest.raises(DataError, match="is a directory"):
        open_source(f"parquet:{tmp_path}")


def test_damage_inside_a_file_is_named(tmp_path):
    path = tmp_path / "one.parquet"
    write(path, columns())
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"one\.parquet: cannot be read as Parquet"):
        read(open_source(str(path)))
