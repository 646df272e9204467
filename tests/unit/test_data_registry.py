"""What `--data` takes: names, options and paths, and how it refuses the rest."""

import pytest

from loka.errors import DataError, UnknownNameError, UsageError
from loka.recsys.data import SOURCE_KINDS, open_source
from loka.recsys.source import Split


def test_the_kinds():
    assert SOURCE_KINDS == ("synthetic", "adult", "criteo", "parquet", "open_bandit", "movielens")


def test_synthetic_takes_its_options():
    source = open_source("synthetic?rows=500&seed=3&variant=raw&ctr=0.1")
    assert source.name == "synthetic"
    assert sum(len(b) for split in Split for b in source.batches(split, 100)) == 500
    identity = source.identity()
    assert (identity["rows"], identity["seed"], identity["variant"]) == (500, 3, "raw")


@pytest.mark.parametrize(
    ("spec", "kind", "message"),
    [
        ("adlt", UnknownNameError, "unknown data source `adlt`\n\nhint: did you mean `adult`?"),
        ("critoe:x.tsv", UnknownNameError, "unknown data source `critoe`\n\nhint: did you mean `criteo`?"),
        ("adult?rows=5", UnknownNameError, "unknown option `rows` in data source `adult`"),
        ("synthetic?row=5", UnknownNameError, "unknown option `row` in data source `synthetic`.*`rows`"),
        (
            "synthetic?rows=many",
            UsageError,
            "option `rows` of data source `synthetic` is `many`, not an integer",
        ),
        ("synthetic?ctr=low", UsageError, "option `ctr` of data source `synthetic` is `low`, not a number"),
        ("criteo:x?transform=sqrt", UsageError, "option `transform` .* is `sqrt`, not log1p or raw"),
        ("synthetic?rows", UsageError, "option `rows` of data source `synthetic` has no value"),
        ("synthetic?rows=5&rows=6", UsageError, "option `rows` of data source `synthetic` is given twice"),
        ("synthetic:x", UsageError, "data source `synthetic` takes no path, got `x`"),
        ("criteo", UsageError, "data source `criteo` needs a path"),
        ("parquet:", UsageError, "data source `parquet:` has an empty path"),
        ("log.tsv", DataError, "log.tsv: no such file"),
        ("a/b", DataError, "a/b: no such file"),
        (",", DataError, "no data file is named"),
    ],
)
def test_specs_that_cannot_work(spec, kind, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        open_source(spec)
    assert caught.value.exit_code == 2


def test_a_file_of_no_known_kind(tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(
        DataError, match=r"notes\.csv: its content is of no kind that is known\n\nhint: kinds: synth"
    ):
        open_source(str(path))


def test_a_path_may_look_like_a_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd:name,x.tsv").write_text("\t".join(["1", *["3"] * 13, *["0a0b0c0d"] * 26]) + "\n")
    source = open_source("odd:name,x.tsv")
    assert source.name == "criteo"
    assert [len(b) for split in Split for b in source.batches(split, 9)] == [1]
