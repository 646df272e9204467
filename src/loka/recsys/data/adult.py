"""The Adult census (Becker and Kohavi 1996, UCI, doi 10.24432/C5XW20, CC BY 4.0): who earns over 50,000 $?

The file ships with the package, see `files/ADULT_ATTRIBUTION.md`; another file with the same columns can be
read in its place. Six numeric columns are dense: capital-gain, capital-loss and fnlwgt as log1p, then each
column standardised with the mean and deviation of the training rows. Eight text columns are fields: their
values are numbered in alphabetical order as they occur in the training rows; `?`, an empty text and a value
that no training row has are id 0. Nothing is learned from validation or test rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from loka.errors import DataError
from loka.recsys.batch import FieldSchema, Schema
from loka.recsys.data.arrow_columns import RowChecks, Vocabulary, is_text
from loka.recsys.data.bad_rows import shown
from loka.recsys.data.blocks import Block, BlockSource, IdColumn
from loka.recsys.data.dense import Standardization, signed_log1p
from loka.recsys.data.file_text import require_file
from loka.recsys.data.parquet import Piece, parquet_pieces, parquet_schema
from loka.recsys.data.splits import in_split
from loka.recsys.source import OnBadRow, Split

__all__ = ["ADULT_CATEGORIES", "ADULT_FILE", "ADULT_NUMBERS", "AdultSource", "has_adult_columns"]

ADULT_FILE = Path(__file__).parent / "files" / "adult.parquet.brotli"
ADULT_NUMBERS = ("age", "fnlwgt", "educational-num", "capital-gain", "capital-loss", "hours-per-week")
ADULT_CATEGORIES = (
    "workclass",
    "education",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "gender",
    "native-country",
)
_LOGARITHMIC = ("fnlwgt", "capital-gain", "capital-loss")
_LABEL = "income"
# The original test part writes its labels with a full stop.
_POSITIVE, _NEGATIVE = (">50K", ">50K."), ("<=50K", "<=50K.")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Good rows, not fitted yet: rows int64 [n], numbers float32 [n, 6], 8 Arrow arrays texts, labels [n]."""

    rows: NDArray[np.int64]
    numbers: NDArray[np.float32]
    texts: tuple[pa.Array, ...]
    labels: NDArray[np.float32]


class AdultSource(BlockSource):
    """Rows of the Adult census in file order. Reads the file once when made, to fit on the training rows.

    Args:
        path: A Parquet file with Adult's columns; None for the one in the package.
        on_bad_row: What to do with rows that cannot be read.

    Raises:
        DataError: if the file is missing, empty, a directory, no Parquet, or lacks a column.
    """

    def __init__(self, path: str | None = None, *, on_bad_row: OnBadRow = OnBadRow.ERROR) -> None:
        self._given = "adult" if path is None else path
        self._path = ADULT_FILE if path is None else Path(path)
        require_file(self._path)
        _check_columns(self._path)
        super().__init__("adult", Schema(ADULT_NUMBERS, ()), on_bad_row=on_bad_row)
        self._counts = dict.fromkeys(Split, 0)
        self._vocabularies = self._fit_vocabularies()
        self._standardization = Standardization.fit(
            (part.numbers[in_split(part.rows, Split.TRAIN)] for part in self._read()), len(ADULT_NUMBERS)
        )
        fields = zip(ADULT_CATEGORIES, self._vocabularies, strict=True)
        self.schema = Schema(ADULT_NUMBERS, tuple(FieldSchema(name, v.cardinality) for name, v in fields))

    def rows(self, split: Split) -> int | None:
        """Rows of the split that can be read."""
        return self._counts[split]

    def identity(self) -> dict[str, str | int | float]:
        """Path as given (`adult` for the file of the package), bytes on disk and the policy for bad rows."""
        return {
            "kind": self.name,
            "path": self._given,
            "bytes": self._path.stat().st_size,
            "on_bad_row": self._bad_rows.policy.value,
        }

    def _fit_vocabularies(self) -> tuple[Vocabulary, ...]:
        seen: list[set[str]] = [set() for _ in ADULT_CATEGORIES]
        for part in self._read():
            for split in Split:
                self._counts[split] += int(in_split(part.rows, split).sum())
            train = pa.array(in_split(part.rows, Split.TRAIN))
            for known, texts in zip(seen, part.texts, strict=True):
                known.update(pc.unique(texts.filter(train)).drop_null().to_pylist())
        return tuple(Vocabulary(sorted(known - {"?", ""})) for known in seen)

    def _blocks(self) -> Iterator[Block]:
        for part in self._read():
            ids = tuple(IdColumn(v.ids(t)) for v, t in zip(self._vocabularies, part.texts, strict=True))
            yield Block(part.rows, self._standardization.apply(part.numbers), ids, part.labels[:, None])

    def _read(self) -> Iterator[_Rows]:
        for piece in parquet_pieces([self._path], [*ADULT_NUMBERS, *ADULT_CATEGORIES, _LABEL]):
            yield self._checked(piece)

    def _checked(self, piece: Piece) -> _Rows:
        n = piece.columns.num_rows
        checks = RowChecks(n)
        income = _trimmed(piece, _LABEL)
        labels = pc.is_in(income, value_set=pa.array(_POSITIVE)).to_numpy(zero_copy_only=False)
        known = pc.is_in(income, value_set=pa.array(_POSITIVE + _NEGATIVE)).to_numpy(zero_copy_only=False)
        checks.flag(
            ~known, "bad_label", lambda i: f"{_LABEL} is `{shown(income[i])}`, neither `<=50K` nor `>50K`"
        )
        numbers = np.empty((n, len(ADULT_NUMBERS)), dtype=np.float32)
        for d, name in enumerate(ADULT_NUMBERS):
            column = checks.numbers(piece.columns[name], name=name, nulls_are_bad=True)
            numbers[:, d] = signed_log1p(column) if name in _LOGARITHMIC else column
        good = checks.report(self._bad_rows, first_row=piece.row, place=piece.place)
        texts = tuple(_trimmed(piece, name).take(pa.array(good)) for name in ADULT_CATEGORIES)
        return _Rows(good + piece.row, numbers[good], texts, labels[good].astype(np.float32))


def has_adult_columns(path: Path) -> bool:
    """Whether a Parquet file has all of Adult's columns."""
    names = set(parquet_schema(path)[0].names)
    return names.issuperset({*ADULT_NUMBERS, *ADULT_CATEGORIES, _LABEL})


def _check_columns(path: Path) -> None:
    columns, rows = parquet_schema(path)
    for name in (*ADULT_NUMBERS, *ADULT_CATEGORIES, _LABEL):
        if name not in columns.names:
            raise DataError(
                f"{path}: lacks Adult's column `{name}`", hint="read other Parquet files as `parquet:PATH`"
            )
        kind = columns.field(name).type
        numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        texts = is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)
        if not (numeric if name in ADULT_NUMBERS else texts):
            wanted = "numeric" if name in ADULT_NUMBERS else "text"
            raise DataError(f"{path}: column `{name}` is of type {kind}, Adult's is {wanted}")
    if rows == 0:
        raise DataError(f"{path}: holds no rows", hint="was it written to the end?")


def _trimmed(piece: Piece, name: str) -> pa.Array:
    try:
        return pc.utf8_trim_whitespace(piece.columns[name].cast(pa.string()))
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{piece.path}: column `{name}` holds a text that is not UTF-8", hint="write it anew as UTF-8"
        ) from error
