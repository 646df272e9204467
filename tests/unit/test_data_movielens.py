"""MovieLens in RecBole's form: a generated set against a plain reading; and the fetching script."""

import hashlib
import importlib.util
import math
import random
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_splits import slow_bucket

from loka.errors import DataError, UnknownNameError, UsageError
from loka.recsys.data import open_source
from loka.recsys.data.earlier import Earlier
from loka.recsys.source import OnBadRow, Split

GENRES = ["Action", "Children's", "Sci-Fi"]
USERS = [(f"{u}", f"{20 + u}", "MF"[u % 4 == 1], ["writer", "artist"][u % 3 == 0]) for u in (5, 3, 9, 1)]
YEARS = {10: "1995", 20: "", 30: "1987", 40: "1995"}
ITEMS = [(f"{i}", f'Film "{i}"', YEARS[i], " ".join(GENRES[: n % 4])) for n, i in enumerate(YEARS)]


def make_ratings(count=240):
    rng = random.Random(1)
    people = [*[u for u, *_ in USERS], "77"]  # 77 and 99 are in no table
    films = [*[i for i, *_ in ITEMS], "99"]
    return [
        (rng.choice(people), rng.choice(films), rng.randrange(1, 6), 881_250_000 + rng.randrange(count))
        for _ in range(count)
    ]


@pytest.fixture
def folder(tmp_path):
    def write(suffix, header, rows):
        lines = ["\t".join(header), *("\t".join(map(str, row)) for row in rows)]
        (tmp_path / f"ml.{suffix}").write_text("\n".join(lines) + "\n")

    write("inter", ["user_id:token", "item_id:token", "rating:float", "timestamp:float"], make_ratings())
    user_header = ["user_id:token", "age:token", "gender:token", "occupation:token", "zip_code:token"]
    write("user", user_header, [(*row, "85711") for row in USERS])
    write("item", ["item_id:token", "movie_title:token_seq", "release_year:token", "class:token_seq"], ITEMS)
    return tmp_path


def slow_rows(limit):
    """{row: (label, ids, raw dense)} in time order."""
    ratings = make_ratings()
    users, items = {u[0]: n + 1 for n, u in enumerate(USERS)}, {i[0]: n + 1 for n, i in enumerate(ITEMS)}
    order = sorted(range(len(ratings)), key=lambda r: (ratings[r][3], r))
    mean_age = sum(int(u[1]) for u in USERS) / len(USERS)
    rows = {}
    for r in order:
        user, item, rating, time = ratings[r]
        before = [q for q in order if ratings[q][3] < time]
        mine = [items.get(ratings[q][1], 0) for q in before if ratings[q][0] == user]
        others = [q for q in before if ratings[q][1] == item]
        _, age, gender, job = next((u for u in USERS if u[0] == user), ("", mean_age, None, None))
        _, _, year, genres = next((i for i in ITEMS if i[0] == item), ("", "", "", ""))
        ids = [
            [users.get(user, 0)],
            [items.get(item, 0)],
            [{"F": 1, "M": 2}.get(gender, 0)],
            [{"artist": 1, "writer": 2}.get(job, 0)],
            [{"1987": 1, "1995": 2}.get(year, 0)],
            [GENRES.index(g) + 1 for g in genres.split()],
            mine[-limit:],
        ]
        rows[r] = (float(rating >= 4), ids, [float(age), math.log1p(len(mine)), math.log1p(len(others))])
    return rows


@pytest.mark.parametrize("limit", [3, 64])
def test_rows_are_those_of_a_plain_reader(folder, limit):
    want = slow_rows(limit)
    train = np.array([dense for r, (_, _, dense) in want.items() if slow_bucket(r) < 8])
    mean, std = train.mean(axis=0), train.std(axis=0)
    source = open_source(f"movielens:{folder}?history={limit}")
    cardinalities = {f.name: f.cardinality for f in source.schema.fields}
    assert cardinalities == {
        "user": 5,
        "item": 5,
        "gender": 3,
        "occupation": 3,
        "release_year": 3,
        "genres": len({g for i in ITEMS for g in i[3].split()}) + 1,
        "history": 5,
    }
    total = 0
    for split in Split:
        buckets = {Split.TRAIN: range(8), Split.VALID: [8], Split.TEST: [9]}[split]
        expected = [r for r in want if slow_bucket(r) in buckets]
        batches = list(source.batches(split, 20))
        assert [r for b in batches for r in b.rows.tolist()] == expected
        assert source.rows(split) == len(expected)
        for batch in batches:
            batch.check(source.schema)
            fields = [batch.ids.field(f) for f in range(7)]
            for i, row in enumerate(batch.rows.tolist()):
                label, ids, dense = want[row]
                ends = [o.tolist()[i + 1] if i + 1 < len(batch) else len(v) for v, o in fields]
                got = [v[o[i] : e].tolist() for (v, o), e in zip(fields, ends, strict=True)]
                assert got == ids
                assert batch.label[i] == label
                np.testing.assert_allclose(batch.dense[i].numpy(), (dense - mean) / std, rtol=1e-4, atol=1e-5)
                total += 1
    assert total == len(want)


def test_options_and_ways_to_name_it(folder):
    assert open_source(str(folder)).name == "movielens"
    assert open_source(str(folder / "ml.inter")).name == "movielens"
    rate = {}
    for least in (1, 3, 6):
        source = open_source(f"{folder}?min_rating={least}")
        rate[least] = np.mean([v for b in source.batches(Split.TRAIN, 50) for v in b.label.tolist()])
    assert rate[1] == 1
    assert 0 < rate[3] < 1
    assert rate[6] == 0
    with pytest.raises(UsageError, match="history must be >= 1, got 0"):
        open_source(f"movielens:{folder}?history=0")


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        ("5\t10\t4", "wrong_field_count", "3 tab-separated fields, the header has 4"),
        ("\t10\t4\t881250000", "missing_value", "user_id is empty"),
        ("5\t10\tnan\t881250000", "bad_label", "rating is `nan`, not a finite number"),
        ("5\t10\t4\tsoon", "bad_timestamp", "timestamp is `soon`, not a finite number"),
    ],
)
def test_bad_ratings_are_named_or_counted(folder, line, reason, message):
    path = folder / "ml.inter"
    lines = path.read_text().splitlines()
    lines[30] = line
    path.write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        open_source(f"movielens:{folder}")
    assert str(caught.value).startswith(f"{path}, line 31: {message}\n\nhint: ")
    source = open_source(f"movielens:{folder}", on_bad_row=OnBadRow.SKIP)
    kept = [r for split in Split for b in source.batches(split, 50) for r in b.rows.tolist()]
    assert sorted(kept) == [r for r in range(240) if r != 29]
    assert source.skipped == {reason: 1}


def test_sets_that_are_not_whole(folder):
    item, user = folder / "ml.item", folder / "ml.user"
    text = user.read_text()
    user.write_text(text.replace("\t25\t", "\told\t"))
    with pytest.raises(DataError, match=r"ml\.user, line 2: row `5\\told"):
        open_source(f"movielens:{folder}", on_bad_row=OnBadRow.SKIP)
    user.write_text(text.replace("age:token", "years:token"))
    with pytest.raises(UnknownNameError, match=r"MovieLens column `age:token` in .*ml.user, line 1"):
        open_source(f"movielens:{folder}")
    user.unlink()
    with pytest.raises(DataError, match=r"ml\.user: no such file"):
        open_source(f"movielens:{folder}")
    user.write_text(text)
    item.write_text("")
    with pytest.raises(DataError, match=r"ml\.item: is empty"):
        open_source(f"movielens:{folder}")
    (folder / "ml.inter").unlink()
    with pytest.raises(DataError, match=r"holds 0 \.inter files"):
        open_source(f"movielens:{folder}")


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=40), st.integers(1, 5))
def test_earlier_events_by_brute_force(events, limit):
    events.sort(key=lambda e: e[1])
    keys, times = np.array(events).T
    earlier = Earlier(keys, times.astype(np.float64))
    want = [[q for q, (k, t) in enumerate(events) if k == key and t < time] for key, time in events]
    assert earlier.counts.tolist() == [len(w) for w in want]
    got, offsets = earlier.latest(np.arange(len(events)), limit=limit)
    assert [got[a:b].tolist() for a, b in pairwise(offsets)] == [w[-limit:] for w in want]


@pytest.fixture
def fetch():
    path = Path(__file__).parents[2] / "scripts" / "fetch_movielens.py"
    spec = importlib.util.spec_from_file_location("fetch_movielens", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(path, module, contents):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(f"{module.FOLDER}/{name}", content)
    return path


def test_fetching_puts_all_files_or_none(fetch, tmp_path, monkeypatch, capsys):
    contents = {name: name.encode() for name in fetch.SHA256}
    monkeypatch.setattr(fetch, "SHA256", {n: hashlib.sha256(c).hexdigest() for n, c in contents.items()})
    target = tmp_path / "data" / "ml-100k"
    wheels = [
        (contents | {"ml-100k.item": b"other"}, "ml-100k.item has SHA-256"),
        (
            {"ml-100k.inter": contents["ml-100k.inter"]},
            "holds no recbole/dataset_example/ml-100k/ml-100k.user",
        ),
    ]
    for wrong, message in wheels:
        wheel = make_wheel(tmp_path / "wrong.whl", fetch, wrong)
        monkeypatch.setattr(fetch, "download", lambda folder, wheel=wheel: wheel)
        assert fetch.main(["--to", str(target)]) == 2
        assert message in capsys.readouterr().err
        assert list(target.iterdir()) == []
    wheel = make_wheel(tmp_path / "right.whl", fetch, contents)
    monkeypatch.setattr(fetch, "download", lambda folder: wheel)
    assert fetch.main(["--to", str(target)]) == 0
    assert {p.name: p.read_bytes() for p in target.iterdir()} == contents
    assert [p.name for p in target.parent.iterdir()] == ["ml-100k"]  # no scratch is left
