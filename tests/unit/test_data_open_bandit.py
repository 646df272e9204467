"""Open Bandit campaigns: a small generated one in the published form, against a plain CSV reading."""

import csv
import gzip
import hashlib
import io
import math
import random

import pytest
from test_data_hashing import slow_id

from loka.errors import DataError, UnknownNameError
from loka.recsys.data import open_source
from loka.recsys.source import OnBadRow, Split

ITEMS = 6
HEADER = [
    "",
    "timestamp",
    "item_id",
    "position",
    "click",
    "propensity_score",
    *(f"user_feature_{i}" for i in range(4)),
    *(f"user-item_affinity_{i}" for i in range(ITEMS)),
]


def digest(text):
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def make_rows(count):
    rng = random.Random(3)
    for i in range(count):
        users = [digest(f"u{k}{rng.randrange(5)}") for k in range(4)]
        affinity = [rng.choice(["0.0", "1.0", "2.5"]) for _ in range(ITEMS)]
        time = f"2019-11-24 00:{i // 60:02}:{i % 60:02}.979311+00:00"
        shown = [str(rng.randrange(ITEMS)), str(rng.randrange(1, 4)), str(rng.randrange(2))]
        yield [str(i), time, *shown, "0.05", *users, *affinity]


def as_csv(rows):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


ITEM_ROWS = [
    [str(i), str(k), str(k / 4 - 1), digest(f"a{k % 2}"), digest(f"b{k % 3}"), digest("c")]
    for i, k in enumerate([3, 0, 1, 2, 5, 4])
]
ITEM_HEADER = ["", "item_id", *(f"item_feature_{i}" for i in range(4))]


@pytest.fixture
def campaign(tmp_path):
    folder = tmp_path / "bts" / "all"
    folder.mkdir(parents=True)
    write(folder / "all.csv.gz", [HEADER, *make_rows(200)])
    write(folder / "item_context.csv.gz", [ITEM_HEADER, *ITEM_ROWS])
    return folder


def write(path, rows):
    path.write_bytes(gzip.compress(as_csv(rows).encode()))


def test_rows_are_those_of_a_plain_reader(campaign):
    rows = list(make_rows(200))
    items = {int(row[1]): row for row in ITEM_ROWS}
    seen = []
    source = open_source(str(campaign))
    assert source.name == "open_bandit"
    names = ["item_id", "position", *(f"user_feature_{i}" for i in range(4))]
    assert [f.name for f in source.schema.fields] == [*names, *(f"item_feature_{i}" for i in (1, 2, 3))]
    assert [f.cardinality for f in source.schema.fields] == [7, 4, 4096, 4096, 4096, 4096, 3, 4, 2]
    numbering = [list(dict.fromkeys(row[3 + k] for row in ITEM_ROWS)) for k in range(3)]
    for split in Split:
        for batch in source.batches(split, 32):
            batch.check(source.schema)
            ids = batch.ids.values.reshape(9, -1).T.tolist()
            for row, dense, got, label in zip(
                batch.rows.tolist(), batch.dense.tolist(), ids, batch.label.tolist(), strict=True
            ):
                record = dict(zip(HEADER, rows[row], strict=True))
                item = int(record["item_id"])
                affinity = [float(record[f"user-item_affinity_{i}"]) for i in range(ITEMS)]
                users = [slow_id(record[n], n, 4096) for n in names[2:]]
                features = [numbering[k].index(items[item][3 + k]) + 1 for k in range(3)]
                assert got == [item + 1, int(record["position"]), *users, *features]
                want = [float(items[item][2]), math.log1p(affinity[item]), math.log1p(sum(affinity))]
                assert dense == pytest.approx(want, rel=1e-6)
                assert label == float(record["click"])
                seen.append(row)
    assert sorted(seen) == list(range(200))


def test_file_directory_and_kind_name_the_same_rows(campaign):
    specs = [str(campaign), f"open_bandit:{campaign}", str(campaign / "all.csv.gz")]
    first = [next(open_source(s).batches(Split.TRAIN, 50)) for s in specs]
    assert all(b.dense.equal(first[0].dense) and b.rows.equal(first[0].rows) for b in first)
    plain = campaign / "all.csv"
    plain.write_text(as_csv([HEADER, *make_rows(200)]))
    assert next(open_source(str(plain)).batches(Split.TRAIN, 50)).dense.equal(first[0].dense)


BAD = {
    "click": ("2", "bad_label", "label click is `2`, neither 0 nor 1"),
    "item_id": ("6", "bad_categorical", "item_id is `6`, not in 0..5"),
    "position": ("", "bad_categorical", "position is ``, not in 1..3"),
    "user-item_affinity_2": ("nan", "nan_dense", "dense feature user-item_affinity_2 is NaN"),
    "user-item_affinity_3": ("-inf", "infinite_dense", "dense feature user-item_affinity_3 is infinite"),
    "user-item_affinity_4": (
        "much",
        "bad_dense",
        "dense feature user-item_affinity_4 is `much`, not a number",
    ),
    "user-item_affinity_5": ("1,2", "wrong_field_count", "17 comma-separated fields, the header has 16"),
    # Python reads this as 10, pyarrow does not: found by halving, without a diagnosis.
    "user-item_affinity_0": ("1_0", "unreadable", "row `"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_lines_are_named_or_counted(campaign, name):
    value, reason, message = BAD[name]
    rows = [HEADER, *make_rows(200)]
    rows[77][HEADER.index(name)] = value
    path = campaign / "all.csv.gz"
    path.write_bytes(gzip.compress("".join(",".join(row) + "\n" for row in rows).encode()))
    with pytest.raises(DataError) as caught:
        list(open_source(str(campaign)).batches(Split.TRAIN, 32))
    assert str(caught.value).startswith(f"{path}, line 78: {message}")
    source = open_source(str(campaign), on_bad_row=OnBadRow.SKIP)
    kept = [r for split in Split for b in source.batches(split, 32) for r in b.rows.tolist()]
    assert sorted(kept) == [r for r in range(200) if r != 76]
    assert source.skipped == {reason: 1}


def test_a_cut_gzip(campaign):
    path = campaign / "all.csv.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"all\.csv\.gz, line \d+: gzip stream ends early"):
        list(open_source(str(campaign)).batches(Split.TRAIN, 32))
    source = open_source(str(campaign), on_bad_row=OnBadRow.SKIP)
    assert sum(len(b) for b in source.batches(Split.TRAIN, 32)) > 50
    assert source.skipped == {"damaged_gzip": 1}


def test_campaigns_that_are_not_whole(campaign):
    items = campaign / "item_context.csv.gz"
    write(items, [ITEM_HEADER, *ITEM_ROWS[:-1]])
    with pytest.raises(DataError, match=r"item_context.csv.gz: its item_id values are not 0..4, each once"):
        open_source(str(campaign))
    write(items, [ITEM_HEADER, *ITEM_ROWS[:2], [*ITEM_ROWS[2][:2], "", *ITEM_ROWS[2][3:]], *ITEM_ROWS[3:]])
    with pytest.raises(DataError, match="line 4: column `item_feature_0` has no value"):
        open_source(str(campaign))
    write(items, [ITEM_HEADER, [*ITEM_ROWS[0][:2], "warm", *ITEM_ROWS[0][3:]], *ITEM_ROWS[1:]])
    with pytest.raises(DataError, match=r"item_context\.csv\.gz, line 2: row `0,3,warm,"):
        open_source(str(campaign))
    write(items, [ITEM_HEADER, *ITEM_ROWS])
    header = ["clicks" if name == "click" else name for name in HEADER]
    write(campaign / "all.csv.gz", [header, *make_rows(3)])
    with pytest.raises(UnknownNameError, match=r"Open Bandit column `click` in .*all.csv.gz, line 1"):
        open_source(str(campaign))
    write(campaign / "all.csv.gz", [HEADER])
    with pytest.raises(DataError, match=r"all\.csv\.gz: holds no rows"):
        list(open_source(str(campaign)).batches(Split.TRAIN, 1))
    items.unlink()
    with pytest.raises(DataError, match=r"item_context\.csv: no such file"):
        open_source(f"open_bandit:{campaign}")
    write(campaign / "men.csv.gz", [HEADER])
    with pytest.raises(DataError, match="holds 2 campaign files"):
        open_source(f"open_bandit:{campaign}")
    with pytest.raises(DataError, match="holds 0 campaign files"):
        open_source(f"open_bandit:{campaign.parent}")
