"""MovieLens ratings in RecBole's atomic files (`NAME.inter`, `NAME.user`, `NAME.item`), e.g. MovieLens-100k.

The files are tab-separated with typed headers (`user_id:token`). GroupLens does not allow them to be handed
on; `scripts/fetch_movielens.py` fetches them. A row is one rating, the label is rating >= 4, and rows come
by timestamp (equal ones in file order):

- fields: user and item, numbered as in their files; gender, occupation; genres (several) and release year;
  history: the up to 64 items that the user rated last before, oldest first;
- dense: the user's age, log1p of how many ratings the user gave and of how many the item got before; each
  standardised on the training rows.

"Before" is strict: ratings of the same second do not see one another. The history tells what was rated, not
how. Zip codes are left out: 795 of them for 943 users say little more than the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from loka.errors import DataError, UsageError
from loka.recsys.batch import FieldSchema, Schema
from loka.recsys.data.arrow_columns import Vocabulary
from loka.recsys.data.bad_rows import BadRow, shown
from loka.recsys.data.blocks import Block, BlockSource, IdColumn
from loka.recsys.data.delimited import DelimitedParser, float_or_none, header_of, read_small_table
from loka.recsys.data.dense import Standardization
from loka.recsys.data.earlier import Earlier
from loka.recsys.data.file_text import total_bytes
from loka.recsys.data.lines import LineReader, UnparsableError
from loka.recsys.data.splits import in_split
from loka.recsys.source import OnBadRow, Split

__all__ = ["MovieLensSource", "find_ratings"]

_RATING_TYPES = {
    "user_id:token": pa.string(),
    "item_id:token": pa.string(),
    "rating:float": pa.float64(),
    "timestamp:float": pa.float64(),
}
_USER_TYPES = {
    "user_id:token": pa.string(),
    "age:token": pa.float32(),
    "gender:token": pa.string(),
    "occupation:token": pa.string(),
}
_ITEM_TYPES = dict.fromkeys(("item_id:token", "release_year:token", "class:token_seq"), pa.string())
_ROWS_AT_ONCE = 8192
_MAX_GENRES = 32


class MovieLensSource(BlockSource):
    """Ratings by timestamp; they are held in memory, about 80 bytes each, features are made block by block.

    Args:
        path: The directory of the three files, or the `.inter` file.
        min_rating: Ratings from this one on are positive.
        history: Most items of the history.
        on_bad_row: What to do with ratings that cannot be read; a bad line in the other two files is an
            error.

    Raises:
        DataError: if a file is missing, empty or damaged.
        UnknownNameError: if a column is missing.
        UsageError: if history < 1.
    """

    def __init__(
        self,
        path: str,
        *,
        min_rating: float = 4.0,
        history: int = 64,
        on_bad_row: OnBadRow = OnBadRow.ERROR,
    ) -> None:
        if history < 1:
            raise UsageError(f"history must be >= 1, got {history}")
        self._given, self._min_rating, self._history = path, min_rating, history
        self._path = find_ratings(Path(path))
        self._users = _Users(self._path.with_suffix(".user"))
        self._items = _Items(self._path.with_suffix(".item"))
        users, items = self._users, self._items
        fields = (
            FieldSchema("user", users.names.cardinality),
            FieldSchema("item", items.names.cardinality),
            FieldSchema("gender", users.genders.cardinality),
            FieldSchema("occupation", users.occupations.cardinality),
            FieldSchema("release_year", items.years.cardinality),
            FieldSchema("genres", items.genres.cardinality, _MAX_GENRES),
            FieldSchema("history", items.names.cardinality, history),
        )
        dense = ("age", "log1p_user_ratings_before", "log1p_item_ratings_before")
        super().__init__("movielens", Schema(dense, fields), on_bad_row=on_bad_row)
        self._load()

    def rows(self, split: Split) -> int | None:
        """Ratings of the split that can be read."""
        return int(in_split(self._row, split).sum())

    def identity(self) -> dict[str, str | int | float]:
        """Path as given, bytes on disk and options."""
        files = (self._path, self._path.with_suffix(".user"), self._path.with_suffix(".item"))
        return {
            "kind": self.name,
            "path": self._given,
            "bytes": total_bytes(files),
            "min_rating": self._min_rating,
            "history": self._history,
            "on_bad_row": self._bad_rows.policy.value,
        }

    def _load(self) -> None:
        names = header_of(self._path, delimiter="\t", wanted=list(_RATING_TYPES), kind="MovieLens")
        reader = LineReader(
            self._path,
            parse=_RatingParser(names),
            diagnose=lambda line: _diagnose(line, names),
            bad_rows=self._bad_rows,
            header_lines=1,
        )
        parts = list(reader.read())
        if not parts:
            left_out = ", ".join(f"{n} {reason}" for reason, n in self.skipped.items())
            raise DataError(f"no row of {self._path} can be read: left out {left_out}")
        table = pa.concat_tables([part for _, part in parts])
        row = np.concatenate([rows for rows, _ in parts])
        time: NDArray[np.float64] = table["timestamp:float"].to_numpy()
        order = np.lexsort((row, time))
        self._row = row[order]
        self._label = (table["rating:float"].to_numpy()[order] >= self._min_rating).astype(np.float32)
        self._user = self._users.names.ids(_one(table["user_id:token"]))[order]
        self._item = self._items.names.ids(_one(table["item_id:token"]))[order]
        # Users who are in no table share id 0 but are still different people with different histories.
        person = np.unique(_one(table["user_id:token"]).to_numpy(zero_copy_only=False), return_inverse=True)[
            1
        ]
        movie = np.unique(_one(table["item_id:token"]).to_numpy(zero_copy_only=False), return_inverse=True)[1]
        self._by_user = Earlier(person[order], time[order])
        self._by_item = Earlier(movie[order], time[order])
        train = in_split(self._row, Split.TRAIN)
        chunks = (np.arange(*span)[train[slice(*span)]] for span in self._spans())
        self._standardization = Standardization.fit(
            (self._dense(at) for at in chunks), len(self.schema.dense)
        )

    def _spans(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self._row), _ROWS_AT_ONCE):
            yield start, min(start + _ROWS_AT_ONCE, len(self._row))

    def _dense(self, at: NDArray[np.int64]) -> NDArray[np.float32]:
        columns = (
            self._users.age[self._user[at]],
            np.log1p(self._by_user.counts[at]),
            np.log1p(self._by_item.counts[at]),
        )
        return np.stack(columns, axis=1).astype(np.float32)

    def _blocks(self) -> Iterator[Block]:
        for start, stop in self._spans():
            at = np.arange(start, stop, dtype=np.int64)
            user, item = self._user[at], self._item[at]
            earlier, offsets = self._by_user.latest(at, limit=self._history)
            ids = (
                IdColumn(user),
                IdColumn(item),
                IdColumn(self._users.gender[user]),
                IdColumn(self._users.occupation[user]),
                IdColumn(self._items.year[item]),
                self._items.genre_lists.take(item),
                IdColumn(self._item[earlier], offsets),
            )
            dense = self._standardization.apply(self._dense(at))
            yield Block(self._row[at], dense, ids, self._label[at][:, None])


class _Users:
    """The user table; arrays are indexed by user id. User 0 is in no table: mean age, other ids 0."""

    def __init__(self, path: Path) -> None:
        table = read_small_table(path, _USER_TYPES, delimiter="\t", kind="MovieLens")
        self.names = Vocabulary(table["user_id:token"].to_pylist())
        self.genders, self.gender = _numbered(table["gender:token"])
        self.occupations, self.occupation = _numbered(table["occupation:token"])
        age: NDArray[np.float32] = table["age:token"].to_numpy()
        if not np.isfinite(age).all():
            line = int(np.argmin(np.isfinite(age))) + 2
            raise DataError(f"{path}, line {line}: age is not finite", hint="mend the table")
        self.age = np.append(age.mean(dtype=np.float64).astype(np.float32), age)


class _Items:
    """The item table; arrays are indexed by item id. Item 0 is in no table: no genres, other ids 0."""

    def __init__(self, path: Path) -> None:
        table = read_small_table(path, _ITEM_TYPES, delimiter="\t", kind="MovieLens")
        self.names = Vocabulary(table["item_id:token"].to_pylist())
        self.years, self.year = _numbered(table["release_year:token"])
        lists = [text.split()[:_MAX_GENRES] for text in table["class:token_seq"].to_pylist()]
        self.genres = Vocabulary(sorted({genre for genres in lists for genre in genres}))
        values = self.genres.ids(pa.array([genre for genres in lists for genre in genres], type=pa.string()))
        lengths = np.array([0, *(len(genres) for genres in lists)], dtype=np.int64)
        self.genre_lists = IdColumn(values, np.concatenate([[0], np.cumsum(lengths)]))


def _numbered(column: pa.Array) -> tuple[Vocabulary, NDArray[np.int64]]:
    """A column's values in alphabetical order, an empty text being none of them, and its ids after a 0."""
    vocabulary = Vocabulary(sorted(set(column.to_pylist()) - {""}))
    return vocabulary, np.append(np.zeros(1, dtype=np.int64), vocabulary.ids(column))


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks)


class _RatingParser(DelimitedParser):
    def __init__(self, names: list[str]) -> None:
        super().__init__(names, _RATING_TYPES, delimiter="\t")

    def __call__(self, data: bytes, lines: int) -> pa.Table:
        table = super().__call__(data, lines)
        for name, kind in _RATING_TYPES.items():
            column = table[name]
            if pa.types.is_string(kind):
                good = pc.all(pc.not_equal(column, "")).as_py()
            else:
                good = not column.null_count and bool(np.isfinite(column.to_numpy()).all())
            if not good:
                raise UnparsableError
        return table


def _diagnose(line: bytes, names: list[str]) -> BadRow | None:
    texts = line.split(b"\t")
    if len(texts) != len(names):
        return BadRow("wrong_field_count", f"{len(texts)} tab-separated fields, the header has {len(names)}")
    row = dict(zip(names, texts, strict=True))
    for name, kind in _RATING_TYPES.items():
        column, text = name.partition(":")[0], row[name]
        if pa.types.is_string(kind):
            if not text:
                return BadRow("missing_value", f"{column} is empty")
            continue
        number = float_or_none(text)
        if number is None or not np.isfinite(number):
            reason = "bad_label" if column == "rating" else "bad_timestamp"
            return BadRow(reason, f"{column} is `{shown(text)}`, not a finite number")
    return None


def find_ratings(path: Path) -> Path:
    """The one `.inter` file of a directory, or the path itself.

    Raises:
        DataError: if a directory does not hold exactly one.
    """
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.inter"))
    if len(found) != 1:
        raise DataError(
            f"{path}: holds {len(found)} .inter files, one is wanted",
            lines=[str(p) for p in found],
            hint="`python scripts/fetch_movielens.py` fetches MovieLens-100k in this form",
        )
    return found[0]
