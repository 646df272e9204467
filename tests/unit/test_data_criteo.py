"""The Criteo reader against a plain one that splits lines, and on all that can be wrong with a file."""

import gzip
import math
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_hashing import slow_id
from test_data_splits import slow_bucket

from loka.errors import DataError
from loka.recsys.data import open_source
from loka.recsys.data.criteo import CATEGORIES, CriteoSource, diagnose, hex_words, parse_lines
from loka.recsys.data.dense import DenseTransform
from loka.recsys.data.lines import UnparsableError
from loka.recsys.source import OnBadRow, Split


def make_lines(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        ints = [rng.choice(["", "0", "-2", str(rng.randrange(2_000_000))]) for _ in range(13)]
        cats = [
            rng.choice(["", f"{rng.randrange(2**32):08x}", f"{rng.randrange(50):08X}"]) for _ in range(26)
        ]
        lines.append("\t".join([str(rng.randrange(2)), *ints, *cats]))
    return lines


def slow_rows(lines, split, cardinality):
    """(row, label, dense, ids) of one split, straight from the format's description."""
    first = {Split.TRAIN: 0, Split.VALID: 8, Split.TEST: 9}[split]
    last = {Split.TRAIN: 7, Split.VALID: 8, Split.TEST: 9}[split]
    for row, line in enumerate(lines):
        if first <= slow_bucket(row) <= last:
            label, *texts = line.split("\t")
            ints = [int(t or 0) for t in texts[:13]]
            dense = [math.copysign(math.log1p(abs(v)), v) for v in ints]
            tokens = zip(CATEGORIES, texts[13:], strict=True)
            ids = [slow_id(int(t, 16), name, cardinality) if t else 0 for name, t in tokens]
            yield row, float(label), dense, ids


def check_against(lines, source, cardinality=65_536):
    for split in Split:
        batches = list(source.batches(split, 37))
        for batch in batches:
            batch.check(source.schema)
        want = list(slow_rows(lines, split, cardinality))
        assert [r for b in batches for r in b.rows.tolist()] == [row for row, *_ in want]
        assert [v for b in batches for v in b.label.tolist()] == [label for _, label, *_ in want]
        dense = np.concatenate([b.dense.numpy() for b in batches])
        np.testing.assert_allclose(dense, [d for _, _, d, _ in want], rtol=3e-7, atol=0)
        ids = np.concatenate([b.ids.values.reshape(26, -1).numpy().T for b in batches])
        assert ids.tolist() == [i for *_, i in want]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_are_those_of_a_plain_reader(tmp_path, end):
    lines = make_lines(600)
    path = tmp_path / "day_0.tsv"
    path.write_bytes(end.join(lines).encode())  # no line end after the last row
    check_against(lines, CriteoSource(str(path)))
    check_against(lines, CriteoSource(str(path), block_bytes=1000, cardinality=50), cardinality=50)


def test_several_files_plain_and_gzip_count_rows_on(tmp_path):
    lines = make_lines(500)
    (tmp_path / "day_0.tsv").write_text("\n".join(lines[:200]) + "\n")
    members = [gzip.compress(("\n".join(part) + "\n").encode()) for part in (lines[200:300], lines[300:])]
    (tmp_path / "day_1.gz").write_bytes(b"".join(members) + b"\0" * 512)
    check_against(lines, open_source(f"criteo:{tmp_path}/day_*"))
    check_against(lines, open_source(f"{tmp_path}/day_0.tsv,{tmp_path}/day_1.gz"))


def test_raw_integers_and_identity(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("\n".join(make_lines(40)))
    source = open_source(f"criteo:{path}?transform=raw&cardinality=100")
    assert isinstance(source, CriteoSource)
    batch = next(source.batches(Split.TRAIN, 40))
    row = int(batch.rows[3])
    assert batch.dense[3].tolist() == [float(t or 0) for t in make_lines(40)[row].split("\t")[1:14]]
    assert source.identity() == {
        "kind": "criteo",
        "path": str(path),
        "files": 1,
        "bytes": path.stat().st_size,
        "cardinality": 100,
        "transform": DenseTransform.RAW,
        "on_bad_row": "error",
    }
    assert source.rows(Split.TRAIN) is None
    assert source.skipped == {}


def test_skipping_batches_changes_nothing_after_them(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("\n".join(make_lines(300)))
    source = CriteoSource(str(path), block_bytes=4000)
    whole = list(source.batches(Split.TRAIN, 32))
    rest = list(source.batches(Split.TRAIN, 32, skip=3))
    assert len(rest) == len(whole) - 3
    for a, b in zip(whole[3:], rest, strict=True):
        assert a.dense.equal(b.dense)
        assert a.ids.values.equal(b.ids.values)
        assert a.rows.equal(b.rows)


GOOD = "1\t" + "\t".join(["5"] * 13) + "\t" + "\t".join(["0a1b2c3d"] * 26)


def changed(column: int, text: str) -> str:
    parts = GOOD.split("\t")
    parts[column] = text
    return "\t".join(parts)


BAD = {
    "39 fields": (
        GOOD.rsplit("\t", 1)[0],
        "wrong_field_count",
        "39 tab-separated fields, a Criteo row has 40",
    ),
    "41 fields": (GOOD + "\tx", "wrong_field_count", "41 tab-separated fields, a Criteo row has 40"),
    "blank line": ("", "wrong_field_count", "1 tab-separated fields, a Criteo row has 40"),
    "label 2": (changed(0, "2"), "bad_label", "label `2` is neither 0 nor 1"),
    "label empty": (changed(0, ""), "bad_label", "label `` is neither 0 nor 1"),
    "label 1.0": (changed(0, "1.0"), "bad_label", "label `1.0` is neither 0 nor 1"),
    "not hex": (changed(16, "0a1b2c3g"), "bad_categorical", "categorical C3 is `0a1b2c3g`, not 8 hex digits"),
    "dash in hex": (
        changed(39, "0a1b-c3d"),
        "bad_categorical",
        "categorical C26 is `0a1b-c3d`, not 8 hex digits",
    ),
    "short hex": (changed(14, "1b"), "bad_categorical", "categorical C1 is `1b`, not 8 hex digits"),
    "float": (changed(2, "1.5"), "bad_dense", "dense feature I2 is `1.5`, not a 64-bit integer"),
    "huge": (changed(2, "9" * 20), "bad_dense", f"dense feature I2 is `{'9' * 20}`, not a 64-bit integer"),
    "0x": (changed(2, "0x10"), "bad_dense", "dense feature I2 is `0x10`, not a 64-bit integer"),
    "blank": (changed(2, " 7"), "bad_dense", "dense feature I2 is ` 7`, not a 64-bit integer"),
    "NaN": (changed(13, "nan"), "nan_dense", "dense feature I13 is NaN"),
    "lone return": (changed(13, "1\r2"), "bad_dense", r"dense feature I13 is `1\r2`, not a 64-bit integer"),
    "bytes": (changed(14, "\x00\x01ü\udcff"), "bad_categorical", r"categorical C1 is `\x00\x01ü"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", list(BAD))
def test_a_bad_line_is_named_or_counted(tmp_path, case, packed):
    bad, reason, message = BAD[case]
    lines = make_lines(300)
    lines[122] = bad
    data = ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")
    path = tmp_path / "day.tsv"
    path.write_bytes(gzip.compress(data) if packed else data)

    with pytest.raises(DataError) as caught:
        list(open_source(f"criteo:{path}").batches(Split.TRAIN, 64))
    assert str(caught.value).startswith(f"{path}, line 123: {message}")
    assert "\n\nhint: " in str(caught.value)
    assert caught.value.exit_code == 2

    source = open_source(f"criteo:{path}", on_bad_row=OnBadRow.SKIP)
    rows = [r for split in Split for b in source.batches(split, 64) for r in b.rows.tolist()]
    assert sorted(rows) == [r for r in range(300) if r != 122]  # the others keep their numbers
    assert source.skipped == {reason: 1}  # once, though three passes met it


def test_which_rows_are_kept_does_not_depend_on_blocks(tmp_path):
    lines = make_lines(200)
    for i, (bad, *_) in enumerate(BAD.values()):
        lines[i * 11] = bad
    path = tmp_path / "day.tsv"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    kept = []
    for block_bytes in (500, 3000, 1 << 22):
        source = CriteoSource(str(path), on_bad_row=OnBadRow.SKIP, block_bytes=block_bytes)
        kept.append([r for b in source.batches(Split.TRAIN, 50) for r in b.rows.tolist()])
        assert sum(source.skipped.values()) == len(BAD)
    assert kept[0] == kept[1] == kept[2]


_alphabet = st.sampled_from("0123456789abfF-+x. \t\r\"'n")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 39), st.text(_alphabet, max_size=9))
def test_the_diagnosis_and_the_fast_parser_agree(column, text):
    line = changed(column, text)
    try:
        parse_lines(f"{line}\n".encode(), 1)
        accepted = True
    except UnparsableError:
        accepted = False
    assert accepted == (diagnose(line.removesuffix("\r").encode()) is None)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20), st.booleans())
def test_hex_words_decode_all_digits(values, upper):
    texts = [f"{v:08X}" if upper else f"{v:08x}" for v in values]
    words, valid = hex_words(np.frombuffer("".join(texts).encode(), dtype="<u8"))
    assert words.tolist() == values
    assert valid


def test_a_cut_gzip_names_the_line_and_skip_keeps_the_rows_before(tmp_path):
    lines = make_lines(2000)
    whole = gzip.compress(("\n".join(lines) + "\n").encode())
    (tmp_path / "a.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.tsv").write_text("\n".join(make_lines(50, seed=1)))
    spec = f"criteo:{tmp_path}/a.gz,{tmp_path}/b.tsv"
    with pytest.raises(DataError, match=r"a\.gz, line \d+: gzip stream ends early\n\nhint: ") as caught:
        list(open_source(spec).batches(Split.TRAIN, 100))
    line = int(str(caught.value).split("line ")[1].split(":")[0])
    assert 100 < line < 2000

    source = open_source(spec, on_bad_row=OnBadRow.SKIP)
    rows = sorted(r for split in Split for b in source.batches(split, 100) for r in b.rows.tolist())
    # All whole lines, then the one that was cut keeps a number, then the second file.
    assert rows == [*range(line - 1), *range(line, line + 50)]
    assert source.skipped == {"damaged_gzip": 1}


def test_a_gzip_with_a_wrong_byte_is_damaged(tmp_path):
    data = bytearray(gzip.compress("\n".join(make_lines(500)).encode()))
    data[-5] ^= 0xFF  # the checksum
    path = tmp_path / "a.gz"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.gz, line \d+: gzip stream does not decode"):
        list(open_source(str(path)).batches(Split.TRAIN, 100))


def test_files_that_cannot_be_read_at_all(tmp_path):
    (tmp_path / "empty.tsv").touch()
    (tmp_path / "nothing.gz").write_bytes(gzip.compress(b""))
    cases = {
        f"{tmp_path}/missing.tsv": "missing.tsv: no such file",
        f"{tmp_path}/no_*.tsv": "no file matches",
        f"{tmp_path}": "is a directory, a file is wanted",
        f"{tmp_path}/empty.tsv": "is empty",
        f"{tmp_path}/empty.tsv,{tmp_path}/missing.tsv": "is empty",
    }
    for spec, message in cases.items():
        for prefix in ("criteo:", ""):
            with pytest.raises(DataError, match=message) as caught:
                open_source(prefix + spec)
            assert "\n\nhint: " in str(caught.value)
    with pytest.raises(DataError, match=r"nothing\.gz: holds no rows"):
        list(open_source(f"{tmp_path}/nothing.gz").batches(Split.TRAIN, 4))


def test_a_file_of_another_kind_under_skip_is_no_empty_success(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("some\nnotes\n")
    source = open_source(f"criteo:{path}", on_bad_row=OnBadRow.SKIP)
    with pytest.raises(DataError, match=r"no row of .*notes.txt can be read: left out 2 wrong_field_count"):
        list(source.batches(Split.TRAIN, 4))


def test_memory_is_bounded_though_a_gzip_unpacks_a_thousandfold(tmp_path):
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(64):
            file.write(b"\0" * (1 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match="line 1: longer than 1048576 bytes"):
        list(open_source(f"criteo:{path}").batches(Split.TRAIN, 4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
